"""benchmarks/gpu_engines.py, as far as it goes without a GPU: over strict stand-ins for TensorRT and CUDA."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

import strict_tensorrt
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import LOGITS, DType
from dflash_deploy.runtime import cuda_device
from strict_tensorrt import World, installed, strict_build
from verified_page import run_from_text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_engines.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_engines", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_engines"] = module  # its dataclasses look for themselves there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_engines"]


@pytest.fixture
def world():
    with installed(World()) as world:
        yield world


@pytest.fixture
def bundle(tiny_bundle, tmp_path):
    copy = tmp_path / "pair"
    shutil.copytree(tiny_bundle("dflash2").bundle, copy)
    strict_build(copy, manifest_from_bundle(copy))
    return copy


def arguments(bundle: Path, record: Path, *more: str) -> list[str]:
    return [
        *("--bundle", str(bundle), "--backend", "tensorrt-rtx", *more),
        *("--tokens", "16", "--prompts", "2", "--record", str(record)),
    ]


def test_the_whole_script_over_the_stand_in(script, bundle, world, tmp_path, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}

    def build(work: Path, backend: str, capabilities: tuple[str, ...]) -> None:
        assert (backend, capabilities) == ("tensorrt-rtx", ("8.9",))
        strict_build(work, manifest_from_bundle(work))

    monkeypatch.setattr(script, "build_engines", build)
    # The stand-in's clock says nothing about a GPU, so give the script all the time it wants.
    assert script.main([*arguments(bundle, tmp_path / "run.json"), "--seconds", "1e9"]) == 0
    printed = capsys.readouterr().out
    run = run_from_text((tmp_path / "run.json").read_text(), "run.json")
    assert run.passed
    assert run.device == "stand-in GPU"
    (found,) = run.figures["bundles"]
    assert found["build_s"] >= 0
    assert before == {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    names = [stage["name"] for stage in found["stages"]]
    assert names[:2] == ["prefill logits", "prefill features"]
    assert any(name.startswith("draft after verify, 7 of 7") for name in names)
    assert all(stage["relative"] == 0 for stage in found["stages"]), "both sides are ONNX Runtime"
    assert found["tokens"]["agreement"] == 1
    assert found["graphs"]["target"]["replays"] > 2
    assert {way: set(found["speed"][way]) >= {"plain", "speculative"} for way in found["speed"]} == {
        "graphs on": True,
        "graphs off": True,
    }
    assert run.figures["left_out"] == []
    assert "trt_engine" in str(run.source)
    for text in ("ok   verify logits", "captured passes", "graphs off"):
        assert text in printed


def test_a_wrong_engine_fails(script, bundle, world, tmp_path, monkeypatch, capsys):
    compute = strict_tensorrt._compute

    def wrong(graph, model, io, shapes, addresses):
        compute(graph, model, io, shapes, addresses)
        if LOGITS in io:
            world.cuda.memory(addresses[LOGITS], 64, LOGITS)[:] = 1

    monkeypatch.setattr(strict_tensorrt, "_compute", wrong)
    assert script.main(arguments(bundle, tmp_path / "run.json", "--built")) == 1
    assert not json.loads((tmp_path / "run.json").read_text())["passed"]
    assert "FAIL prefill logits" in capsys.readouterr().out


def test_a_bundle_that_breaks_does_not_hide_the_others(script, bundle, world, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    manifest = strict_build(other, manifest_from_bundle(other), version="1.0")
    assert manifest.engines["target.tensorrt-rtx"].version == "1.0"
    options = ["--bundle", str(other), *arguments(bundle, tmp_path / "run.json", "--built")]
    assert script.main([*options, "--seconds", "1e9"]) == 1
    figures = json.loads((tmp_path / "run.json").read_text())["figures"]
    assert [bool(found.get("passed")) for found in figures["bundles"]] == [False, True]
    assert "version: got '1.0', expected '1.7.1.116'" in figures["errors"][0]


def test_out_of_time_is_said(script, bundle, world, tmp_path, capsys):
    assert script.main([*arguments(bundle, tmp_path / "run.json"), "--seconds", "0"]) == 1
    assert "out of time: pair is left out" in capsys.readouterr().out


def test_without_a_gpu(script, bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cuda_device, "cuda_devices", lambda: ((), "no NVIDIA driver"))
    assert script.main(arguments(bundle, tmp_path / "run.json")) == 2
    assert "gpu: no NVIDIA driver" in capsys.readouterr().err


def test_the_backend_fits_the_gpu(script):
    assert script.choose_backend("8.9") == "tensorrt-rtx"


def test_the_pairs_it_makes_itself(script, tmp_path, monkeypatch):
    """Checkpoints are made for real; what becomes of them is for the tests of the exporter."""
    made = []

    def export(target: str, draft: str, bundle: Path, dtype: DType) -> None:
        made.append((Path(target), Path(draft), dtype))

    monkeypatch.setattr("dflash_deploy.exporter.export.export_bundle", export)
    subjects = script.tiny_subjects(tmp_path)
    assert [s.name for s in subjects] == ["tiny-float32", "tiny-float16", "tiny-bfloat16"]
    assert [s.reference.name for s in subjects] == ["tiny-float32", "tiny-float16", "tiny-float32"]
    assert len(made) == 3
    for target, draft, _ in made:
        assert (target / "config.json").is_file()
        assert (draft / "config.json").is_file()
