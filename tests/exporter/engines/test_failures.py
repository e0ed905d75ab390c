"""Whatever goes wrong: a message that says what to do, and a bundle that is as it was."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper

from dflash_deploy.bundle.errors import (
    BundleError,
    EngineBuildError,
    OutputError,
    ProviderError,
    RequestError,
)
from dflash_deploy.bundle.gpu import cuda_devices
from dflash_deploy.bundle.manifest import file_info, manifest_alone, manifest_from_bundle, manifest_to_file
from dflash_deploy.exporter.engines import build as build_module
from dflash_deploy.exporter.engines import process
from dflash_deploy.exporter.engines.build import build_engines
from dflash_deploy.exporter.engines.options import BuildOptions, Weights
from dflash_deploy.exporter.progress import NullProgress

from .conftest import build, content

no_gpu = pytest.mark.skipif(bool(cuda_devices()[0]), reason="there is a GPU")


def with_nodes(bundle: Path, *nodes: onnx.NodeProto) -> None:
    """Add nodes to the target's graph, as an exporter with another idea of ONNX might."""
    path = bundle / "target.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node.extend(nodes)
    if any(node.domain for node in nodes):
        model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    onnx.save(model, path)
    manifest = manifest_alone(bundle)
    files = {**manifest.files, path.name: file_info(path)}
    manifest_to_file(replace(manifest, files=files), bundle)


def test_every_parser_error_names_node_operator_and_reason(half):
    with_nodes(
        half,
        helper.make_node("Det", ["input_ids"], ["d"], "a determinant"),
        helper.make_node("Softmax", ["d"], ["s"], "a softmax", axis=9),
        helper.make_node("Teleport", ["s"], ["t"], "a teleport", domain="elsewhere"),
    )
    before = content(half)
    with pytest.raises(EngineBuildError) as found:
        build(half, ("draft", "target"))
    text = str(found.value)
    assert text.startswith("engine target.tensorrt-rtx: tensorrt-rtx cannot build it:")
    assert "node a determinant (Det): this operator is not supported by the parser of version 1" in text
    assert "node a teleport (Teleport): neither an operator nor a plugin that version 1" in text
    assert content(half) == before, "the draft's engine was built, and is not there either"


def test_turing_is_refused_for_the_draft_with_the_reason(half):
    before = content(half)
    with pytest.raises(EngineBuildError, match=r"7\.5 has no float32 matrix product.*leave 7\.5 out"):
        build(half, ("draft",), ("7.5", "8.9"))
    assert content(half) == before


@no_gpu
def test_stripping_weights_without_a_gpu_is_refused_with_the_reason(half):
    before = content(half)
    expected = (
        r"strips weights on a machine with an NVIDIA GPU and its driver only; leave --weights stripped out"
    )
    with pytest.raises(ProviderError, match=expected):
        build(half, options=BuildOptions(weights=Weights.STRIPPED))
    assert content(half) == before


def test_a_process_that_dies_is_an_error_with_its_last_words(half, monkeypatch):
    death = "import os, sys; sys.stderr.write('the last words\\n'); sys.stderr.flush(); os.abort()"
    monkeypatch.setattr(process, "_START", death)
    before = content(half)
    with pytest.raises(
        EngineBuildError, match=r"died \(SIGABRT\) at 'starting'; it last printed:\n  the last words"
    ):
        build(half)
    assert content(half) == before


def test_a_failed_rebuild_keeps_the_engine_before_it(half, monkeypatch):
    kept = build(half)
    before = content(half)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "manifest_to_file", full)
    with pytest.raises(OutputError, match=r"No space left on device; the bundle is as it was"):
        build(half)
    assert content(half) == before
    assert manifest_from_bundle(half) == kept


def test_a_failed_first_build_leaves_no_directory(half, monkeypatch):
    before = content(half)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "manifest_to_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(half)
    assert content(half) == before


def test_an_interrupt_ends_the_process_and_changes_nothing(half, monkeypatch):
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def watched(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    class Impatient(NullProgress):
        def detail(self, text: str) -> None:
            if text.startswith("Building"):
                raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", watched)
    before = content(half)
    with pytest.raises(KeyboardInterrupt):
        build(half, progress=Impatient())
    assert content(half) == before
    assert [child.poll() for child in started] == [-9]


def test_a_bundle_changed_while_building_is_left_alone(half, monkeypatch):
    real = build_module._build

    def meanwhile(*args):
        done = real(*args)
        manifest_to_file(replace(manifest_from_bundle(half), name="another"), half)
        return done

    monkeypatch.setattr(build_module, "_build", meanwhile)
    with pytest.raises(OutputError, match=r"was changed while the engines were built"):
        build(half)
    assert manifest_from_bundle(half).name == "another"
    assert not (half / "engines").exists()


def test_two_builders_do_not_meet(half):
    handle = os.open(half, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process is building engines"):
            build(half)
    finally:
        os.close(handle)


def test_what_a_killed_build_left_is_removed(half):
    left = half / ".engines.x.partial"
    left.mkdir()
    (left / "engine").write_bytes(b"half of one")
    build(half)
    assert not left.exists()


def test_a_corrupt_engine_can_be_built_again(half):
    manifest = build(half)
    (info,) = manifest.engines.values()
    (half / info.file).write_bytes(b"broken")
    again = build(half)
    assert manifest_from_bundle(half) == again


def test_changed_weights_are_refused_before_building(half):
    data = bytearray((half / "weights.bin").read_bytes())
    data[-1] ^= 1
    (half / "weights.bin").write_bytes(data)
    with pytest.raises(BundleError, match=r"weights\.bin: got SHA-256"):
        build(half)


def test_a_bundle_that_cannot_be_written_is_refused_before_building(half, monkeypatch):
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    with pytest.raises(OutputError, match=r"cannot write into .*Read-only file system"):
        build(half)


def test_too_little_space_is_refused_before_building(half, monkeypatch):
    usage = shutil.disk_usage(half)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"got 0.00 GB free, expected at least"):
        build(half)


def test_what_cannot_be_built_for_is_refused_by_name(half):
    with pytest.raises(ProviderError, match=r"got '9.0', expected one of 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"):
        build(half, generations=("8.9", "9.0"))
    with pytest.raises(ProviderError, match="got 'cuda', expected one of tensorrt-rtx, tensorrt"):
        build_engines(half, "cuda")
    with pytest.raises(RequestError, match="graph: got 'encoder', expected one of target, draft"):
        build(half, ("encoder",))
    with pytest.raises(
        RequestError, match=r"graph: got 'round', expected one of target, draft; export with --r"
    ):
        build(half, ("round",))
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        build(half / "nowhere")


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        (
            BuildOptions(max_context=129),
            RequestError,
            "max_context: got 129, expected 2 to 128.*",
        ),
        (BuildOptions(max_context=1), RequestError, "max_context: got 1, expected 2 to 128"),
        (BuildOptions(max_batch=0), RequestError, "max_batch: got 0, expected >= 1"),
        (BuildOptions(max_prompt=0), RequestError, "max_prompt: got 0, expected >= 1"),
        (BuildOptions(workspace_bytes=0), RequestError, "workspace: got 0"),
        (
            BuildOptions(timing_cache=Path("a.cache")),
            ProviderError,
            "timing cache: .*measures nothing",
        ),
    ],
)
def test_options_out_of_range_are_refused_before_building(half, options, kind, expected):
    before = content(half)
    with pytest.raises(kind, match=expected):
        build(half, options=options)
    assert content(half) == before


class TestTensorRT:
    """The other flavour: the same loaders, as far as they come without it."""

    def test_not_installed_names_the_extra(self, half, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            ProviderError, match=r"tensorrt is not installed; pip install 'dflash-deploy\[tensorrt\]'"
        ):
            build_engines(half, "tensorrt")

    @pytest.mark.parametrize(
        "package",
        [
            "raise ImportError('libnvinfer.so.11: cannot open shared object file')",
            "raise FileNotFoundError('libnvinfer')",
            "__version__ = '11.4.0'",  # the runtime alone: nothing to build with
        ],
    )
    def test_without_its_libraries_names_the_extra(self, half, tmp_path, monkeypatch, package):
        (tmp_path / "stub").mkdir()
        (tmp_path / "stub/tensorrt.py").write_text(package)
        monkeypatch.syspath_prepend(tmp_path / "stub")
        before = content(half)
        with pytest.raises(ProviderError, match=r"tensorrt cannot be loaded .*dflash-deploy\[tensorrt\]"):
            build_engines(half, "tensorrt", (), ("target",))
        assert content(half) == before

    def test_compute_capabilities_are_not_for_it(self, half, tmp_path, monkeypatch):
        (tmp_path / "tensorrt.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ProviderError, match="builds for the GPU of the machine it runs on"):
            build_engines(half, "tensorrt", ("8.9",))


def test_the_builder_process_loads_no_torch(half):
    """And neither does the process that starts it."""
    code = (
        "import sys; from pathlib import Path;"
        "from dflash_deploy.exporter.engines.build import build_engines;"
        "build_engines(Path(sys.argv[1]), 'tensorrt-rtx', ('8.9',), ('target',));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tensorrt_rtx')))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(half)], cwd=half.parent, check=False)
    assert done.returncode == 0
    assert time.monotonic() - began < 60
