"""The protocol with other programs, through a process that plays one."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_deploy.bench.measure import Task
from dflash_deploy.bench.peers import ALL_INSTALLED, PEERS, PeerKind, choose_peers
from dflash_deploy.bench.peers.checkpoint import fingerprint, is_gguf, made_once
from dflash_deploy.bench.peers.client import PeerPlace, PeerWay, open_peers
from dflash_deploy.bench.peers.protocol import Answer, OpenRequest
from dflash_deploy.bench.peers.worker import serve
from dflash_deploy.bundle.errors import EngineError, ProviderError, RequestError


def opened(stack: ExitStack, folder: Path, **how: object) -> PeerWay:
    target = folder / "target.gguf"
    target.write_text(json.dumps(how))
    (way,) = open_peers(stack, ["fake"], PeerPlace(target), 2)
    return way


def test_a_program_is_opened_and_asked(fake_peer, tmp_path):
    with ExitStack() as stack:
        way = opened(stack, tmp_path, tokens={"4,5": [1, 2, 3]})
        assert way.opened.to_dict() == {"version": "1.2", "precision": "float32", "note": "2 threads, OMP 2"}
        assert way.open_ms > 0
        sample = way.run(Task((4, 5), 3))
        assert (sample.ids, sample.first_tokens, sample.first_token_ms, sample.total_ms) == (
            (1, 2, 3),
            1,
            5.0,
            9.0,
        )
        assert (sample.decode_ms, sample.decoded) == (4.0, 2)
        assert way.run(Task((9,), 2)).ids == (7, 7)
    assert way.process._process.poll() == 0  # the stack ended it, and it left by itself


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"fail_at": 2}, "peer fake: RuntimeError: out of luck"),
        ({"die_at": 2}, "peer fake: ended with exit status 3\n.*the last words"),
        ({"nonsense_at": 2}, "peer fake: answered .* which is no answer"),
    ],
)
def test_what_goes_wrong_is_told(fake_peer, tmp_path, how, words):
    with ExitStack() as stack:
        way = opened(stack, tmp_path, **how)
        way.run(Task((1,), 2))
        with pytest.raises(EngineError, match=f"(?s){words}"):
            way.run(Task((1,), 2))


def test_a_program_that_cannot_be_opened(fake_peer, tmp_path, monkeypatch):
    with ExitStack() as stack, pytest.raises(EngineError, match="peer fake: ValueError: wrong weights"):
        opened(stack, tmp_path, refuse="wrong weights")
    monkeypatch.setitem(PEERS, "fake", PeerKind("no_such_module", (), ""))
    with ExitStack() as stack, pytest.raises(EngineError, match="peer fake: ModuleNotFoundError"):
        opened(stack, tmp_path)


def test_messages_are_lines(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "t").write_text("{}")
    request = OpenRequest(tmp_path / "t", 3, None, "int4")
    assert OpenRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    answers = io.StringIO()
    lines = [request.to_json(), {"ids": [1], "new_tokens": 2}, {"ids": [1]}]
    serve("fake_peer", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert told[0]["note"].startswith("3 threads")
    assert Answer.from_json(told[1]) == Answer((7, 7), 1, 5.0, 7.0)
    assert told[2] == {"error": "KeyError: 'new_tokens'"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": []},
        {"first_tokens": 3},
        {"first_tokens": 0},
        {"first_token_ms": 9.0},
        {"first_token_ms": -1.0},
    ],
)
def test_an_answer_that_cannot_be(wrong):
    right = {"ids": [1, 2], "first_tokens": 1, "first_token_ms": 1.0, "total_ms": 2.0}
    assert Answer.from_json(right).ids == (1, 2)
    with pytest.raises(ValueError, match=r"tokens|ms"):
        Answer.from_json({**right, **wrong})


def test_programs_are_checked_before_anything_is_opened(fake_peer, monkeypatch, tmp_path):
    gguf, folder = tmp_path / "t.gguf", tmp_path / "hf"
    gguf.write_text("")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in PEERS:
        monkeypatch.setitem(PEERS, name, PeerKind(**{**vars(PEERS[name]), "needs": ("json",)}))
    assert choose_peers([], None, None) == []
    assert choose_peers(["llama.cpp", "fake", "llama.cpp"], gguf, None) == ["llama.cpp", "fake"]
    assert choose_peers([ALL_INSTALLED], gguf, tmp_path) == list(PEERS)
    assert choose_peers([ALL_INSTALLED], folder, tmp_path) == [name for name in PEERS if name != "llama.cpp"]
    for names, target, words in (
        (["vllm"], gguf, "peer: got 'vllm', expected one of transformers, "),
        (["fake"], None, r"peer fake: --target is missing; .* with --target PATH$"),
        (["all-installed"], None, "peer all-installed: --target is missing; other programs cannot read a"),
        (["fake"], tmp_path / "none.gguf", "target: got .*none.gguf.* expected a path that exists"),
        (["llama.cpp"], folder, "peer llama.cpp: .* expected a .gguf file; give another --target"),
        (["fake"], tmp_path, "peer fake: .* expected a .gguf file or a Hugging Face folder"),
        (["onnxruntime-genai"], gguf, "builds a model of its own.* give --peer-cache DIR"),
    ):
        with pytest.raises(RequestError, match=words):
            choose_peers(names, target, None)


def test_a_target_that_no_program_reads_is_told_as_that(monkeypatch, tmp_path):
    """Not as a program that is missing."""
    for name, kind in PEERS.items():
        monkeypatch.setitem(PEERS, name, PeerKind(**{**vars(kind), "needs": ("json",)}))
    with pytest.raises(RequestError, match=r"got the target .* expected a .gguf file or a Hugging"):
        choose_peers([ALL_INSTALLED], tmp_path, tmp_path)
    for name, kind in PEERS.items():
        needs = "json" if name == "llama.cpp" else "no_such_package"
        monkeypatch.setitem(PEERS, name, PeerKind(**{**vars(kind), "needs": (needs,)}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"peer llama.cpp: got the target .*, expected a .gguf file; give"):
        choose_peers([ALL_INSTALLED], tmp_path, tmp_path)
    loud = tmp_path / "T.GGUF"
    loud.write_text("")
    assert choose_peers([ALL_INSTALLED], loud, None) == ["llama.cpp"]
    assert is_gguf(loud)


def test_a_program_that_is_missing_is_an_error_with_its_pip_line(monkeypatch, tmp_path):
    for name, kind in list(PEERS.items()):
        monkeypatch.setitem(PEERS, name, PeerKind(**{**vars(kind), "needs": ("no_such_package",)}))
        with pytest.raises(ProviderError, match="no_such_package not installed; pip install ") as error:
            choose_peers([name], tmp_path, tmp_path)
        assert str(error.value).endswith(kind.install)
    with pytest.raises(ProviderError, match=r"peers: none of transformers, .* is installed; pip install"):
        choose_peers([ALL_INSTALLED], tmp_path, tmp_path)


def test_a_model_is_built_once_and_whole(tmp_path):
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model").write_text("x")
        if len(made) == 1:
            raise RuntimeError("half way")

    place = tmp_path / "cache" / "model"
    with pytest.raises(RuntimeError, match="half way"):
        made_once(place, make)
    assert not list(place.parent.iterdir())
    for _ in range(2):
        assert made_once(place, make) == place
    assert len(made) == 2
    assert [file.name for file in place.iterdir()] == ["model"]


def test_a_changed_checkpoint_is_another(tmp_path):
    file = tmp_path / "t.gguf"
    file.write_text("one")
    before = fingerprint(file)
    assert fingerprint(file) == before
    file.write_text("three")
    assert fingerprint(file) != before
