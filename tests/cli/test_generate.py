"""`generate` and `bench` through the command line: text on standard output, the summary beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import toy_onnx
from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.tensors import LOGIT_SUMS
from dflash_deploy.cli import cli
from dflash_deploy.runtime.decoder import Decoder
from text_bundle import write_text_bundle
from toy_engines import always, never, toy_decoder


class Codec:
    """Every token is one letter; a prompt's ids are its characters."""

    has_chat_template = False

    def encode_prompt(self, prompt: str, chat: bool, system: str | None) -> list[int]:
        assert not chat
        return [ord(char) % 97 for char in prompt]

    def stream(self) -> Codec:
        return self

    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def close(self) -> str:
        return ""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Decoders made of toys; gives the settings that the command asked for."""
    asked: dict = {}

    def open_toy(bundle: Path, **settings: object) -> Decoder:
        asked.update(settings, bundle=bundle)
        return toy_decoder(
            asked.get("spoiler", never), codec=Codec(), fail_at=asked.get("fail_at"), fault=asked.get("fault")
        )

    monkeypatch.setattr(Decoder, "open", staticmethod(open_toy))
    return asked


@pytest.fixture
def toy_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys that can be sampled from."""

    def open_toy(bundle: Path, **settings: object) -> Decoder:
        return toy_decoder(codec=Codec(), with_logits=True)

    monkeypatch.setattr(Decoder, "open", staticmethod(open_toy))


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_text_and_nothing_else_is_on_standard_output(toy):
    result = _run("generate", "b", "hello", "--max-new-tokens", 20, "--threads", 2, "--verify-rows", 3)
    assert result.exit_code == 0, result.output
    assert len(result.stdout) == 21
    assert result.stdout.endswith("\n")
    assert result.stderr.startswith("20 tokens (length) | ")
    assert "acceptance length" in result.stderr
    assert toy == {
        "bundle": Path("b"),
        "provider": "cpu",
        "threads": 2,
        "verify_rows": 3,
        "backend": "onnxruntime",
    }


def test_plain_decoding_gives_the_same_text(toy):
    plain = _run("generate", "b", "hello", "--max-new-tokens", 30, "--plain")
    assert plain.stdout == _run("generate", "b", "hello", "--max-new-tokens", 30).stdout
    assert "acceptance length" not in plain.stderr


REMARK = r"no proposal of the draft was accepted in (\d+) rounds; `dflash parity BUNDLE` says"


def test_a_draft_of_no_use_is_remarked_upon_once(toy):
    toy["spoiler"] = always
    useless = _run("generate", "b", "hello", "--max-new-tokens", 30)
    assert re.findall(REMARK, useless.stderr) == ["29"]
    for arguments in (["--max-new-tokens", 8], ["--max-new-tokens", 30, "--plain"]):  # too few; no draft
        assert not re.search(REMARK, _run("generate", "b", "hello", *arguments).stderr)
    toy["spoiler"] = never
    assert not re.search(REMARK, _run("generate", "b", "hello", "--max-new-tokens", 90).stderr)


def test_bench_remarks_upon_it_too(toy, tmp_path):
    (tmp_path / "prompts.txt").write_text("hello\n")
    for spoiler, count in ((always, 1), (never, 0)):
        toy["spoiler"] = spoiler
        result = _run("bench", "b", "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 60)
        assert result.exit_code == 0, result.output
        assert len(re.findall(REMARK, result.stderr)) == count


def test_an_engine_that_fails_is_no_fault_of_the_user(toy):
    toy["fail_at"] = 3
    result = _run("generate", "b", "hello", "--max-new-tokens", 90)
    assert result.exit_code == EngineError.exit_code == 1
    assert result.stderr == "dflash: target broke\n"


@pytest.mark.parametrize(
    ("prompt", "message"), [("x" * 400, "length in tokens: got 400, expected at most 399"), ("", "no tokens")]
)
def test_a_prompt_that_cannot_be_served_is_the_users_fault(toy, prompt, message):
    result = _run("generate", "b", prompt)
    assert result.exit_code == 2
    assert message in result.stderr


def test_sampling_options_arrive(toy_logits):
    """Each option alone changes the answer, or the summary; the same seed gives the same."""
    base = ("generate", "b", "hello", "--max-new-tokens", 40, "--temperature", 0.9, "--seed", 7)
    drawn = _run(*base).stdout
    assert _run(*base).stdout == drawn != _run("generate", "b", "hello", "--max-new-tokens", 40).stdout
    for option, value in (
        ("--seed", 8),
        ("--temperature", 0.3),
        ("--top-k", 2),
        ("--top-p", 0.3),
        ("--min-p", 0.6),
        ("--repetition-penalty", 3.0),
        ("--presence-penalty", 2.0),
        ("--frequency-penalty", 2.0),
    ):
        result = _run(*base, option, value)
        assert result.exit_code == 0, result.output
        assert result.stdout != drawn, option


def test_options_out_of_range_are_named(toy):
    for option, value in (("--temperature", -1), ("--top-p", 0), ("--top-k", 0), ("--min-new-tokens", 999)):
        result = _run("generate", "b", "hello", option, value)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert option[2:].replace("-", "_") in result.stderr


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "bundle"
    write_text_bundle(directory)
    return directory


def test_a_real_tokenizer_stop_strings_and_least_tokens(text_bundle):
    drawn = ("generate", text_bundle, "hello", "--temperature", 1, "--seed", 3, "--threads", 1)
    ended = _run(*drawn)
    assert "(stop)" in ended.stderr
    cut = _run(*drawn, "--stop", "never", "--stop", ended.stdout[1:3])
    assert cut.stdout == ended.stdout[: ended.stdout.index(ended.stdout[1:3])] + "\n"
    assert "(stop)" in cut.stderr
    longer = _run(*drawn, "--min-new-tokens", 100, "--max-new-tokens", 120)
    assert int(longer.stderr.split()[0]) > 100
    assert int(ended.stderr.split()[0]) < 100


def test_ids_in_are_ids_out(text_bundle, tmp_path):
    """With a tokenizer or without one."""
    toy_onnx.write_bundle(tmp_path / "bare")
    for bundle in (text_bundle, tmp_path / "bare"):
        arguments = ("generate", bundle, "--ids", "5,6, 7", "--max-new-tokens", 9, "--threads", 1)
        result = _run(*arguments)
        assert result.exit_code == 0, result.output
        with Decoder.open(bundle, threads=1) as decoder:
            ids = decoder.generate([5, 6, 7], 9).ids
        assert result.stdout == ",".join(map(str, ids)) + "\n"
        assert _run(*arguments, "--plain").stdout == result.stdout
    refused = _run("generate", tmp_path / "bare", "hello", "--threads", 1)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--ids" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a PROMPT, or its token ids with --ids"),
        (("hi", "--ids", "1"), "give a PROMPT, or its token ids with --ids"),
        (("--ids", "1", "--chat"), "taken as they are"),
        (("--ids", "1", "--system", "x"), "system"),
        (("--ids", "1;2"), "--ids: got '1;2', expected numbers with commas between them"),
        (("--ids", ""), "--ids: got ''"),
        (("--ids", "1,97000"), "prompt[1]: got 97000"),
    ],
)
def test_a_prompt_is_one_thing(toy, arguments, message):
    result = _run("generate", "b", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_draft_that_fails_is_told_behind_the_text(toy):
    """Its warning comes as a line of its own, once the text is out."""

    def fault(call: int, outputs: dict) -> None:
        if call > 2:
            outputs[LOGIT_SUMS][:] = float("nan")

    toy["fault"] = fault
    result = _run("generate", "b", "hello", "--max-new-tokens", 60)
    assert result.exit_code == 0
    text, end = result.output[:60], result.output[60:]
    assert text == _run("generate", "b", "hello", "--max-new-tokens", 60, "--plain").stdout[:60]
    assert end.startswith("\ndflash: draft failed")
    assert "the rest was decoded plainly" in end.splitlines()[-1]


def _dflash(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_deploy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)


def test_the_real_pair_answers(demo_bundle):
    prompt = "What is photosynthesis?"
    done = _dflash("generate", demo_bundle, prompt, "--max-new-tokens", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    plain = _dflash("generate", demo_bundle, prompt, "--max-new-tokens", 12, "--plain")
    assert plain.stdout == done.stdout
    empty = _dflash("generate", demo_bundle, " ")
    assert (empty.returncode, empty.stdout) == (2, "")
    assert empty.stderr == "dflash: prompt: got ' ', expected some text\n"


def test_the_real_pair_is_timed(demo_bundle, tmp_path):
    (tmp_path / "prompts.txt").write_text("What is photosynthesis?\n\n")
    report = tmp_path / "bench.json"
    arguments = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 8, "--json", report)
    done = _dflash("bench", demo_bundle, *arguments)
    assert done.returncode == 0, done.stderr
    assert "speculative" in done.stdout
    found = json.loads(report.read_text(encoding="utf-8"))
    (figures,) = found["bundles"]
    assert figures["tokens_identical"] is True
    assert (found["settings"]["prompts"], found["settings"]["prompt_count"]) == ("prompts.txt", 1)
    assert {"speedup", "acceptance_length", "rounds", "threads", "open_ms"} <= set(figures)
    assert {"tokens_per_s", "verify_ms", "draft_ms"} <= set(figures["plain"]) & set(figures["speculative"])
