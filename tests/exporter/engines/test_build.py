"""TensorRT-RTX builds tiny pairs without a GPU; the engines land in the bundle with their description."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.bundle.engines import DIRECTORY, Library, check_engine, read_engine
from dflash_deploy.bundle.limits import PREFILL_ROWS, ShapeLimits, round_up
from dflash_deploy.bundle.manifest import EngineFlag, file_info, manifest_from_bundle, manifest_to_file
from dflash_deploy.bundle.profiles import ProfileSet
from dflash_deploy.bundle.round_graph import ROUND
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.engines.options import SLOTS_MULTIPLE, BuildOptions, Residence
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.progress import NullProgress
from dflash_deploy.exporter.simple.seed import seed_checkpoints
from dflash_deploy.exporter.tune.fuse_round import round_to_bundle

from .conftest import build

ALL = ("8.0", "8.6", "8.9", "12.0", "12.1")


def engine_files(bundle: Path) -> list[str]:
    return sorted(f"{DIRECTORY}/{path.name}" for path in (bundle / DIRECTORY).iterdir())


class Diary(NullProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def detail(self, text: str) -> None:
        self.said.append(text)


def test_a_pair_builds_from_any_directory_and_after_a_move(half, tmp_path, monkeypatch):
    before = {path.name for path in half.iterdir()}
    monkeypatch.chdir(tmp_path)
    diary = Diary()
    first = build(Path(os.path.relpath(half)), ("target", "draft"), ("8.9",), progress=diary)
    assert manifest_from_bundle(half) == first, "hashes hold, and the manifest on disk is the one returned"
    assert sorted(first.engines) == ["draft.tensorrt-rtx", "target.tensorrt-rtx"]
    assert engine_files(half) == sorted(info.file for info in first.engines.values())
    assert {path.name for path in half.iterdir()} == before | {DIRECTORY}, "nothing temporary is left"
    assert any(text.startswith("Building engine") for text in diary.said)

    for graph in ("target", "draft"):
        version = first.engines[f"{graph}.tensorrt-rtx"].version
        info = check_engine(first, graph, Library("tensorrt-rtx", version, "8.9"))
        assert len(read_engine(half, first, info)) > 10_000
        assert info.precision == "float16"
        assert info.compute_capabilities == ("8.9",)
        assert info.flags == (EngineFlag.USER_ALLOCATION,)
        assert info.limits == BuildOptions().limits(first)
        assert list(info.profiles) == ["all"]
        assert set(info.weights_sha256) == set(first.graphs[graph].weights)

    moved = tmp_path / "deeper" / "down"
    moved.parent.mkdir()
    half.rename(moved)
    second = build(moved, ("target", "conv", "selector"))
    assert manifest_from_bundle(moved) == second
    assert second.engines["target.tensorrt-rtx"].compute_capabilities == ALL
    assert second.engines["draft.tensorrt-rtx"] == first.engines["draft.tensorrt-rtx"], "the other one stays"
    assert sorted(second.engines) == [f"{g}.tensorrt-rtx" for g in ("conv", "draft", "selector", "target")]
    assert engine_files(moved) == sorted(info.file for info in second.engines.values()), "the old one is gone"


def test_a_whole_round_builds_as_one_engine_and_holds_shared_weights_once(half):
    manifest = manifest_from_bundle(half)
    graph = round_to_bundle(half, manifest.graphs, manifest.target, manifest.draft)
    files = {**manifest.files, graph.file: file_info(half / graph.file)}
    manifest_to_file(replace(manifest, graphs={**manifest.graphs, ROUND: graph}, files=files), half)
    built = build(half, ("target", "draft", ROUND))
    assert manifest_from_bundle(half) == built
    sizes = {info.graph: built.files[info.file].bytes for info in built.engines.values()}
    assert sizes[ROUND] < sizes["target"] + sizes["draft"]
    ranges = built.engines[f"{ROUND}.tensorrt-rtx"].profiles["all"]
    assert ranges["rows"][2] == built.draft.proposals + 1


def test_bfloat16_builds(bundle_of):
    bundle = bundle_of(DType.BFLOAT16)
    manifest = build(bundle, ("target", "draft"), ("8.0", "12.0"))
    for info in manifest.engines.values():
        assert info.precision == "bfloat16"
        assert info.compute_capabilities == ("8.0", "12.0")
        assert EngineFlag.DECOMPOSABLE_ATTENTION not in info.flags


@pytest.mark.slow
def test_float32_builds_with_attention_taken_apart(bundle_of):
    (info,) = build(bundle_of(DType.FLOAT32)).engines.values()
    assert EngineFlag.DECOMPOSABLE_ATTENTION in info.flags


def test_the_target_builds_for_turing(half):
    (info,) = build(half, generations=("8.9", "7.5", "8.9")).engines.values()
    assert info.compute_capabilities == ("7.5", "8.9")


def test_options_reach_the_engine(half):
    options = BuildOptions(
        max_batch=3,
        max_prompt=16,
        max_context=64,
        workspace_bytes=1 << 28,
        residence=Residence.STREAMED,
        profile_set=ProfileSet.PHASES,
    )
    manifest = build(half, options=options)
    (info,) = manifest.engines.values()
    assert info.limits == ShapeLimits(64, round_up(64 + manifest.slack_slots, SLOTS_MULTIPLE), 16, 8, 3)
    assert list(info.profiles) == ["plain", "verify", "prefill"]
    assert info.profiles["prefill"]["rows"] == (1, 16, 16)
    assert info.profiles["verify"]["batch"] == (1, 3, 3)
    assert info.flags == (EngineFlag.WEIGHT_STREAMING,)


def test_default_limits_are_the_bundles(half):
    manifest = manifest_from_bundle(half)
    limits = BuildOptions().limits(manifest)
    assert replace(limits, capacity=0) == replace(ShapeLimits.from_manifest(manifest), capacity=0)
    least = ShapeLimits.from_manifest(manifest).capacity
    assert least <= limits.capacity < least + SLOTS_MULTIPLE
    assert limits.capacity % SLOTS_MULTIPLE == 0
    longer = replace(manifest, max_length=5000)
    assert BuildOptions().limits(longer).rows == PREFILL_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "speculators", "speculators2"])
def test_every_draft_format_and_target_family_builds(tiny_bundle, tmp_path, name):
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle(name).bundle, bundle)
    manifest = build(bundle, ("target", "draft"), ("8.6",))
    assert len(manifest.engines) == 2


@pytest.mark.slow
def test_the_simple_family_builds(tmp_path):
    target, draft = seed_checkpoints(tmp_path / "seed")
    export_bundle(str(target), str(draft), tmp_path / "bundle", DType.FLOAT32)
    manifest = build(tmp_path / "bundle", ("target", "draft"), ("8.9",))
    for info in manifest.engines.values():
        assert EngineFlag.DECOMPOSABLE_ATTENTION not in info.flags, "there is no attention in it"
