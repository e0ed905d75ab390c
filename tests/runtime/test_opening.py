"""Opening a bundle: damage is found and named, and nothing is left open."""

import threading

import pytest

from dflash_deploy.bundle.errors import BundleError, EngineError, ProviderError
from dflash_deploy.bundle.manifest import Verify
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.runtime import backends, decoder, ort_engine
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.ort_engine import runner_from_onnx
from toy_onnx import WEIGHTS, write_bundle


@pytest.fixture
def bundle(tmp_path):
    write_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_damaged_graph(bundle, manifest_of):
    manifest = manifest_of(bundle)
    data = (bundle / "target.onnx").read_bytes()
    for broken in (data[: len(data) // 2], b"", b"\0" * len(data), b"not a graph" * 50):
        (bundle / "target.onnx").write_bytes(broken)
        with pytest.raises(BundleError, match=r"target\.onnx: cannot be loaded"):
            runner_from_onnx(bundle, manifest.graphs[TARGET])
    with pytest.raises(BundleError, match=r"target\.onnx: got .* bytes"):
        Decoder.open(bundle)


def test_truncated_and_missing_weights(bundle, manifest_of):
    manifest = manifest_of(bundle)
    data = (bundle / WEIGHTS).read_bytes()
    (bundle / WEIGHTS).write_bytes(data[:-100])
    with pytest.raises(BundleError, match=r"target\.onnx: cannot be loaded"):
        runner_from_onnx(bundle, manifest.graphs[TARGET])
    with pytest.raises(BundleError, match=rf"{WEIGHTS}: got .* bytes"):
        Decoder.open(bundle, verify=Verify.SIZES)
    (bundle / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"target\.onnx: cannot be loaded"):
        runner_from_onnx(bundle, manifest.graphs[TARGET])
    with pytest.raises(BundleError, match=rf"{WEIGHTS}: missing"):
        Decoder.open(bundle)


def test_changed_weights(bundle):
    data = bytearray((bundle / WEIGHTS).read_bytes())
    data[10] ^= 1
    (bundle / WEIGHTS).write_bytes(data)
    with pytest.raises(BundleError, match=rf"{WEIGHTS}: got SHA-256"):
        Decoder.open(bundle)
    Decoder.open(bundle, verify=Verify.SIZES).close()


@pytest.mark.parametrize("readable", [True, False])
def test_changed_weights_are_the_reason_whatever_their_reading_gave(bundle, monkeypatch, readable):
    """They are hashed while they are read, and nothing of them stays."""
    data = bytearray((bundle / WEIGHTS).read_bytes())
    data[10] ^= 1
    (bundle / WEIGHTS).write_bytes(data)
    closed = []

    class Runner:
        def close(self):
            closed.append(self)

    def runners(*_, **__):
        if not readable:
            raise ProviderError("no memory")
        return Runner(), Runner()

    monkeypatch.setattr(decoder, "runners_from_bundle", runners)
    with pytest.raises(BundleError, match=rf"{WEIGHTS}: got SHA-256"):
        Decoder.open(bundle)
    assert len(closed) == (2 if readable else 0)


def test_a_changed_graph_is_found_before_anything_is_read(bundle, monkeypatch):
    data = bytearray((bundle / "draft.onnx").read_bytes())
    data[-1] ^= 1
    (bundle / "draft.onnx").write_bytes(data)
    monkeypatch.setattr(decoder, "runners_from_bundle", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(BundleError, match=r"draft\.onnx: got SHA-256"):
        Decoder.open(bundle)


@pytest.mark.parametrize("first", ["target fails", "draft fails", "interrupt in target"])
def test_nothing_is_left_open_when_one_model_cannot_be_read(bundle, manifest_of, monkeypatch, first):
    """Both are read at once; whichever ends first, and also if the user has had enough meanwhile."""
    manifest, closed, draft_may_end = manifest_of(bundle), [], threading.Event()

    class Runner:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)

    def load(_directory, info, *_):
        name = TARGET if info.file.startswith(TARGET) else DRAFT
        if name == TARGET:
            if first == "interrupt in target":
                threading.Timer(0.05, draft_may_end.set).start()
                raise KeyboardInterrupt
            if first == "target fails":
                draft_may_end.set()
                raise EngineError("no memory")
            draft_may_end.set()
        elif not draft_may_end.wait(10):
            pytest.fail("the target was never read")
        elif first == "draft fails":
            raise EngineError("no memory")
        return Runner(name)

    monkeypatch.setattr(ort_engine, "runner_from_onnx", load)
    expected = KeyboardInterrupt if first == "interrupt in target" else EngineError
    with pytest.raises(expected):
        backends.runners_from_bundle(bundle, manifest)
    assert closed == [TARGET if first == "draft fails" else DRAFT]


def test_no_bundle(tmp_path):
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        Decoder.open(tmp_path)
