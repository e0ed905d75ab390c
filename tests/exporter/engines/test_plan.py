"""What a dry run says: limits, profiles and costs, without loading a library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.profiles import ProfileSet
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.exporter.engines.options import BuildOptions, Weights
from dflash_deploy.exporter.engines.plan import BuildPlan, plan_engines


@pytest.fixture
def plan(half):
    """Plan for the tiny pair in float16."""
    manifest = manifest_from_bundle(half)

    def give(backend: str = "tensorrt-rtx", generations=(), graphs=(), **options) -> BuildPlan:
        return plan_engines(half, manifest, backend, generations, graphs, BuildOptions(**options))

    return give


def test_only_what_moves_is_in_a_profile(plan):
    target, draft = plan().engines
    assert (target.graph, draft.graph) == (TARGET, DRAFT)
    assert set(target.shapes["all"]) == {"input_ids", "slots", "wanted_rows"}
    assert set(draft.shapes["all"]) == {"features", "slots"}
    several = plan(max_batch=2).engines[0]
    assert "past_key.0" in several.shapes["all"]
    least, typical, largest = several.shapes["all"]["past_key.0"]
    assert (least[0], typical[0], largest[0]) == (1, 2, 2)
    assert least[1:] == typical[1:] == largest[1:], "only the batch moves: the capacity is fixed"


def test_each_backend_has_its_own_profiles(plan):
    assert [len(engine.profiles) for engine in plan().engines] == [1, 1]
    assert [len(engine.profiles) for engine in plan("tensorrt").engines] == [3, 2]
    forced = plan("tensorrt", profile_set=ProfileSet.ONE)
    assert [len(engine.profiles) for engine in forced.engines] == [1, 1]


def test_estimates_follow_what_is_asked_for(plan):
    plain, batch, phases, stripped, short = (
        plan().engines[0].estimate,
        plan(max_batch=8).engines[0].estimate,
        plan(profile_set=ProfileSet.PHASES).engines[0].estimate,
        plan(weights=Weights.STRIPPED).engines[0].estimate,
        plan(max_context=16).engines[0].estimate,
    )
    assert batch.device_bytes > plain.device_bytes > short.device_bytes
    assert phases.engine_bytes > plain.engine_bytes > stripped.engine_bytes
    weights = plan().engines[0].source.weights_bytes
    assert plain.engine_bytes - stripped.engine_bytes == weights
    assert plain.host_bytes > weights


def test_the_caches_are_counted_once(plan, half):
    manifest = manifest_from_bundle(half)
    cache = manifest.target.cache.bytes(1, 1)
    short, longer = (plan(max_context=n).engines[0].estimate.device_bytes for n in (100, 101))
    assert cache <= longer - short < 2 * cache + 10_000


def test_a_plan_reads_well(plan):
    lines = plan(generations=("8.9",), max_context=100).lines(10**9)
    text = "\n".join(lines)
    assert "tensorrt-rtx, compute capability 8.9" in text
    assert "100 tokens, caches of 112 slots" in text
    assert "kv 64..112 (tuned for 112)" in text
    assert "target.tensorrt-rtx" in text
    assert "1000 MB free" in text
    assert all(len(line) < 110 for line in lines)


def test_planning_loads_no_library(half):
    code = (
        "import sys; from pathlib import Path;"
        "from dflash_deploy.bundle.manifest import manifest_from_bundle;"
        "from dflash_deploy.exporter.engines import options, plan;"
        "bundle = Path(sys.argv[1]);"
        "plan.plan_engines(bundle, manifest_from_bundle(bundle), 'tensorrt', (), (), options.BuildOptions());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'polygraphy', 'tensorrt', 'tensorrt_rtx')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(half)], check=False).returncode == 0
