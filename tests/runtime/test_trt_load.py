"""From a bundle to running engines: what is found out before the library is asked, and what it then says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.engines import PLUGIN
from dflash_deploy.bundle.errors import BundleError, EngineError, ProviderError, RequestError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import EngineFlag, Manifest, manifest_from_bundle, manifest_to_file
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.cli import cli
from dflash_deploy.runtime import cuda_device, trt_library
from dflash_deploy.runtime.backends import BACKENDS, runners_from_bundle
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.kernel_cache import DIRECTORY_VARIABLE
from dflash_deploy.runtime.ort_engine import OrtRunner
from dflash_deploy.runtime.trt_engine import TrtRunner, runner_from_engine
from strict_cuda import real
from strict_tensorrt import CAPABILITY, EngineValidity, World, installed, strict_build
from toy_onnx import write_bundle

ENGINES = ("tensorrt-rtx", "tensorrt")
NAME = f"target.{ENGINES[0]}"


@pytest.fixture
def bundle(tmp_path):
    write_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(params=ENGINES)
def world(request):
    with installed(World(request.param)) as world:
        yield world


@pytest.fixture
def rtx():
    with installed(World()) as world:
        yield world


def build(bundle: Path, backend: str = "tensorrt-rtx", **more: Any) -> Manifest:
    return strict_build(bundle, manifest_from_bundle(bundle), backend, **more)


def fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def asked(world: World) -> list[str]:
    """Note whether the library is asked for an engine."""
    calls: list[str] = []

    def deserialize(runtime: Any, plan: bytes) -> None:
        calls.append("deserialize")

    world.faults["Runtime.deserialize_cuda_engine"] = deserialize
    return calls


# Backends.


def test_every_backend_gives_runners(bundle, world):
    manifest = build(bundle, world.backend)
    for backend, kind in (("onnxruntime", OrtRunner), (world.backend, TrtRunner)):
        assert backend in BACKENDS
        target, draft = runners_from_bundle(bundle, manifest, backend)
        assert isinstance(target, kind)
        assert (target.info, draft.info) == (manifest.graphs[TARGET], manifest.graphs[DRAFT])
        assert (target.limits is None) == (backend == "onnxruntime")
        target.close()
        draft.close()


def test_a_decoder_opens_over_engines(bundle, world):
    build(bundle, world.backend, max_prompt=16)
    with Decoder.open(bundle, backend=world.backend) as decoder, Decoder.open(bundle, threads=1) as reference:
        assert decoder.effective["engine"] == world.backend
        assert decoder.effective["engine_version"] == world.version
        assert decoder.generate([5, 9, 2], 40).ids == reference.generate([5, 9, 2], 40).ids


def test_what_says_nothing_to_a_backend_is_refused(bundle):
    manifest = manifest_from_bundle(bundle)
    with pytest.raises(
        ProviderError, match=r"backend: got 'tpu', expected one of onnxruntime, tensorrt, tens"
    ):
        runners_from_bundle(bundle, manifest, "tpu")
    with pytest.raises(RequestError, match=r"provider: got 'cuda', but --backend tensorrt runs engines"):
        runners_from_bundle(bundle, manifest, "tensorrt", "cuda")
    with pytest.raises(
        RequestError, match=r"threads: got 2, but --backend tensorrt computes nothing on the CPU"
    ):
        runners_from_bundle(bundle, manifest, "tensorrt", threads=2)


def test_engines_need_neither_onnxruntime_nor_torch():
    """Nor are the engine library and cuda-python loaded before they are used."""
    code = (
        "import sys, dflash_deploy.runtime.trt_engine, dflash_deploy.runtime.decoder\n"
        "names = ('onnxruntime', 'torch', 'onnx', 'tensorrt', 'tensorrt_rtx', 'cuda', 'polygraphy')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_draft_engine_closes_the_target(bundle, world):
    manifest = build(bundle, world.backend, graphs=(TARGET,))
    with pytest.raises(
        BundleError, match=rf"an engine named 'draft\.{world.backend}'; run `dflash build-engine`"
    ):
        runners_from_bundle(bundle, manifest, world.backend)
    assert world.cuda.live == []


# The machine.


def test_without_a_gpu(bundle, rtx, monkeypatch):
    manifest = build(bundle)
    monkeypatch.setattr(cuda_device, "cuda_devices", lambda: ((), "no NVIDIA driver"))
    with pytest.raises(ProviderError, match=r"gpu: no NVIDIA driver, .*use --backend onnxruntime"):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")


@pytest.mark.skipif(bool(cuda_device.cuda_devices()[0]), reason="this machine has a GPU")
def test_on_this_machine_without_a_gpu(bundle):
    """No stand-in: the real packages, as far as they come."""
    with pytest.raises(ProviderError, match=r"gpu: .*use --backend onnxruntime on this machine"):
        Decoder.open(bundle, backend="tensorrt-rtx")


@pytest.mark.skipif(bool(cuda_device.cuda_devices()[0]), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--backend", "tensorrt"], "gpu: "),
        (
            ["--backend", "tensorrt-rtx", "--provider", "cuda"],
            "provider: got 'cuda', but --backend",
        ),
        (["--backend", "tensorrt", "--threads", "1"], "threads: got 1, but --backend tensorrt"),
    ],
)
def test_the_command_line_passes_it_on(bundle, tmp_path, options, expected):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    for command in (["generate", str(bundle), "hello"], ["bench", str(bundle), "--prompts", str(prompts)]):
        done = CliRunner().invoke(cli, [*command, *options])
        assert done.exit_code == 2
        assert f"dflash: {expected}" in done.output


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (
            "cuda.bindings.runtime",
            r"cuda\.bindings\.runtime: cannot be imported .*pip install 'dflash-deploy\[rtx\]'",
        ),
        (
            "tensorrt_rtx",
            r"backend tensorrt-rtx: tensorrt_rtx cannot be loaded .*pip install 'dflash-deploy\[rtx\]'",
        ),
    ],
)
def test_without_a_package(bundle, rtx, monkeypatch, missing, expected):
    manifest = build(bundle)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ProviderError, match=expected):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")


def test_a_gpu_that_does_not_start(bundle, rtx):
    manifest = build(bundle)
    rtx.cuda.faults["cudaSetDevice"] = real.cudaError_t.cudaErrorInsufficientDriver
    with pytest.raises(EngineError, match="CUDA failed while starting the GPU: cudaErrorInsufficientDriver"):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")


def test_an_unknown_engine_backend():
    with pytest.raises(ProviderError, match="backend: got 'tpu', expected one of tensorrt, tensorrt-rtx"):
        trt_library.TrtLibrary("tpu")


# C05: stale, foreign or corrupt engines are refused with both values, before the library is asked.


@pytest.mark.parametrize(
    ("what", "change", "kind", "expected"),
    [
        ("version", "1.7.0.1", ProviderError, "version: got '1.7.0.1', expected '1.7.1.116'"),
        ("compute_capabilities", ("8.0", "12.0"), ProviderError, "got '8.0, 12.0', expected 8.9, that of"),
        ("precision", "float16", BundleError, "precision: got 'float16', expected 'float32'"),
        ("graph_sha256", "0" * 64, BundleError, "SHA-256 of target.onnx: got '000"),
        ("weights_sha256", {}, BundleError, "SHA-256 of weights.bin: got None"),
        ("graph", DRAFT, BundleError, "graph: got 'draft', expected 'target'"),
        ("plugin", "other::Plugin 3", ProviderError, f"plugin: got 'other::Plugin 3', expected '{PLUGIN}'"),
    ],
)  # fmt: skip
def test_a_foreign_or_stale_engine_is_refused(bundle, rtx, what, change, kind, expected):
    calls = asked(rtx)
    manifest = build(bundle)
    wrong = replace(manifest.engines[NAME], **{what: change})
    manifest = replace(manifest, engines={**manifest.engines, NAME: wrong})
    with pytest.raises(kind) as found:
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")
    assert expected in str(found.value)
    assert "dflash build-engine" in str(found.value)
    assert calls == []


def test_engines_of_a_bundle_that_was_exported_again(bundle, rtx):
    manifest = build(bundle)
    write_bundle(bundle, max_length=200)
    again = replace(manifest_from_bundle(bundle), engines=manifest.engines)
    files = {**manifest.files, **again.files}
    (bundle / "target.onnx").write_bytes((bundle / "target.onnx").read_bytes() + b"\0")
    manifest_to_file(replace(again, files=files), bundle)
    with pytest.raises(BundleError, match=r"target\.onnx: got \d+ bytes, expected"):
        Decoder.open(bundle, backend="tensorrt-rtx")


def test_a_corrupt_engine(bundle, rtx):
    calls = asked(rtx)
    manifest = build(bundle)
    path = bundle / manifest.engines[NAME].file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match=r"target\.tensorrt-rtx\.\w+\.engine: got SHA-256 .*, expected"):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")
    assert calls == []


def test_an_engine_that_covers_too_little(bundle, rtx):
    calls = asked(rtx)
    manifest = build(bundle, max_prompt=16)
    needed = ShapeLimits.from_manifest(manifest)
    with pytest.raises(
        ProviderError, match=r"target\.tensorrt-rtx: rows: got 16, expected >= 124; ask for less"
    ):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx", needed=needed)
    assert calls == []


# What only the library knows.


def test_a_plan_that_the_library_does_not_take(bundle, world):
    """C05: bytes whose hash is right and that are no engine."""
    manifest = build(bundle, world.backend)
    name = f"target.{world.backend}"
    path = bundle / manifest.engines[name].file
    path.write_bytes(b"no engine at all, but long enough for its head to be looked at" * 9)
    from dflash_deploy.bundle.manifest import file_info

    files = {**manifest.files, manifest.engines[name].file: file_info(path)}
    expected = (
        "malformed engine" if world.rtx else r"gives no engine .*\(Serialization assertion magic failed\)"
    )
    kind = ProviderError if world.rtx else EngineError
    with pytest.raises(kind, match=expected):
        runner_from_engine(bundle, replace(manifest, files=files), TARGET, world.backend)


def test_no_engine_and_its_plugin(bundle, world):
    """C01: the library gives None for want of a plugin; the error names it, and where it was looked for."""
    manifest = build(bundle, world.backend, plugin=PLUGIN)
    runner_from_engine(bundle, manifest, TARGET, world.backend).close()  # its kernel is in the engine

    def hidden(runtime: Any, plan: bytes) -> None:
        runtime._logger.log(1, "Cannot find plugin: GroupedDynamicConv, version: 1, namespace: dflash")

    world.faults["Runtime.deserialize_cuda_engine"] = hidden
    with pytest.raises(EngineError) as found:
        runner_from_engine(bundle, manifest, TARGET, world.backend)
    for part in (
        "Cannot find plugin",
        "'GroupedDynamicConv'",
        "version '1'",
        "'dflash'",
        world.module.__name__,
    ):
        assert part in str(found.value)
    assert not isinstance(found.value.__cause__, AttributeError)


def test_the_library_raises(bundle, world):
    manifest = build(bundle, world.backend)

    def fail(runtime: Any, plan: bytes) -> None:
        raise RuntimeError("bad plan")

    world.faults["Runtime.deserialize_cuda_engine"] = fail
    with pytest.raises(EngineError, match=r"gives no engine .*\(bad plan\); build it again"):
        runner_from_engine(bundle, manifest, TARGET, world.backend)


def test_no_memory_for_the_weights(bundle, world):
    manifest = build(bundle, world.backend)

    def fail(runtime: Any, plan: bytes) -> None:
        runtime._logger.log(1, "Requested amount of GPU memory could not be allocated: OutOfMemory")

    world.faults["Runtime.deserialize_cuda_engine"] = fail
    with pytest.raises(EngineError, match=r"cannot be loaded .*OutOfMemory.*close other programs on the GPU"):
        runner_from_engine(bundle, manifest, TARGET, world.backend)


def test_an_invalid_engine_is_not_loaded(bundle, rtx):
    calls = asked(rtx)
    manifest = build(bundle)
    rtx.faults["Runtime.get_engine_validity"] = lambda runtime, head: (EngineValidity.INVALID, 4)
    with pytest.raises(ProviderError, match=r"does not run here \(old cuda driver\)"):
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx")
    assert calls == []


def test_no_memory_to_work_in(bundle, world):
    manifest = build(bundle, world.backend)
    world.cuda.total_bytes = 1000
    with pytest.raises(
        EngineError, match=r"no GPU memory: 0\.1 MB are needed for working memory of engine target"
    ):
        runner_from_engine(bundle, manifest, TARGET, world.backend)


def test_an_engine_with_other_tensors(bundle, world):
    manifest = build(bundle, world.backend)
    name = f"target.{world.backend}"
    info = manifest.engines[name]
    other = replace(info, profiles={k: {**r, "rows": (1, 9, 9)} for k, r in info.profiles.items()})
    wrong = replace(manifest, engines={**manifest.engines, name: other})
    with pytest.raises(
        ProviderError, match=r"input_ids: shapes of profile '\w+': got .*, expected .*by the manifest"
    ):
        runner_from_engine(bundle, wrong, TARGET, world.backend)
    one = {name: next(iter(info.profiles.values()))}
    wrong = replace(
        manifest, engines={**manifest.engines, name: replace(info, profiles={**one, **info.profiles})}
    )
    with pytest.raises(ProviderError, match="number of profiles: got"):
        runner_from_engine(bundle, wrong, TARGET, world.backend)
    io = manifest.graphs[TARGET].io
    graph = replace(manifest.graphs[TARGET], io=replace(io, outputs=io.outputs[1:]))
    with pytest.raises(ProviderError, match=r"tensors: got \[.*'greedy_ids'"):
        runner_from_engine(bundle, replace(manifest, graphs={TARGET: graph}), TARGET, world.backend)
    world.faults["ICudaEngine.get_aliased_input_tensor"] = lambda engine, name: None
    with pytest.raises(ProviderError, match=r"present_key\.0: updates: got None, expected past_key\.0"):
        runner_from_engine(bundle, manifest, TARGET, world.backend)


# Kernels that TensorRT-RTX compiled.


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "deep" / "kernels"))
    return tmp_path / "deep" / "kernels"


def test_kernels_are_kept_from_one_process_to_the_next(bundle, rtx, kept):
    build(bundle, max_prompt=16)
    with Decoder.open(bundle, backend="tensorrt-rtx") as decoder:
        decoder.generate([5, 9, 2], 40)
    files = sorted(path.name for path in kept.iterdir())
    assert [name.partition("-1.7")[0] for name in files] == ["draft.tensorrt-rtx", "target.tensorrt-rtx"]
    assert all(CAPABILITY in name for name in files)
    before = {path: path.read_bytes() for path in kept.iterdir()}
    for runner in runners_from_bundle(bundle, manifest_from_bundle(bundle), "tensorrt-rtx"):
        runner.close()  # compiled nothing, and forgot nothing
    assert before == {path: path.read_bytes() for path in kept.iterdir()}
    assert min(map(len, before.values())) > 100


def test_kernels_are_not_kept_unless_asked_for(bundle, rtx, monkeypatch, tmp_path):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    rtx.faults["IRuntimeCache.serialize"] = fails(AssertionError("asked"))
    build(bundle)
    Decoder.open(bundle, backend="tensorrt-rtx").close()


def test_kept_kernels_that_are_not_taken(bundle, rtx, kept, caplog):
    manifest = build(bundle)
    runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx").close()
    (path,) = kept.iterdir()
    for broken in (b"cut off", b""):
        path.write_bytes(broken)
        runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx").close()
        assert "kept kernels are not used (the library does not take them)" in caplog.text
        assert path.read_bytes() not in (b"cut off", b"")
    rtx.faults["IRuntimeCache.deserialize"] = fails(RuntimeError("bad blob"))
    rtx.faults["IRuntimeCache.serialize"] = lambda cache: None
    runner_from_engine(bundle, manifest, TARGET, "tensorrt-rtx").close()
    assert "kept kernels are not used (bad blob)" in caplog.text
    assert "compiled kernels are not kept (the library gives none)" in caplog.text


# Weights that come from the bundle.


def test_a_stripped_engine_is_refitted_from_any_directory(bundle, world, monkeypatch, tmp_path):
    manifest = build(bundle, world.backend, flags=(EngineFlag.STRIPPED,))
    with Decoder.open(bundle, threads=1) as reference:
        expected = reference.generate([5, 9, 2], 30).ids
    monkeypatch.chdir(tmp_path)
    with Decoder.open(os.path.relpath(bundle), backend=world.backend) as decoder:
        assert decoder.generate([5, 9, 2], 30).ids == expected
    assert EngineFlag.STRIPPED in manifest.engines[f"target.{world.backend}"].flags


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (
            {"OnnxParserRefitter.refit_from_file": lambda parser, model: False},
            r"weights of target\.onnx do not go .* \(2 weights are missing, embed_tokens\.weight, .* first",
        ),
        ({"Refitter.refit_cuda_engine": lambda refitter: False}, "it gives no reason"),
        ({"Refitter.get_missing_weights": fails(RuntimeError("null"))}, r"\(null\)"),
    ],
)
def test_weights_that_do_not_go_in(bundle, world, faults, expected):
    manifest = build(bundle, world.backend, flags=(EngineFlag.STRIPPED,))
    world.faults.update(faults)
    with pytest.raises(EngineError, match=expected + r".*; build it again with --weights embedded"):
        runner_from_engine(bundle, manifest, TARGET, world.backend)


def test_a_parser_that_counts_otherwise_than_the_refitter(bundle, world, caplog):
    """It may answer no when nothing is missing; the refitter decides."""
    manifest = build(bundle, world.backend, flags=(EngineFlag.STRIPPED,))

    def no(parser: Any, model: str) -> bool:
        parser._refitter._found = model
        parser._errors.append("one weight too many")
        return False

    world.faults["OnnxParserRefitter.refit_from_file"] = no
    runner_from_engine(bundle, manifest, TARGET, world.backend).close()
    assert "refitted, but its parser says: one weight too many" in caplog.text
