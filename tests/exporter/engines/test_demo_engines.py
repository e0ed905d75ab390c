"""The demo's pair, at its real size."""

from __future__ import annotations

import resource
import time

import pytest

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.round_graph import ROUND
from dflash_deploy.bundle.tensors import DRAFT, TARGET, DType
from dflash_deploy.exporter.engines.backends import TENSORRT_RTX
from dflash_deploy.exporter.engines.options import BuildOptions
from dflash_deploy.exporter.engines.plan import plan_engines
from dflash_deploy.exporter.export import export_bundle

from .conftest import build
from .test_kernels import FUSED_ATTENTION, kernels, softmaxes

BUILD_SECONDS = 60


@pytest.mark.slow
def test_the_pair_builds_without_a_gpu_in_a_minute(demo_target, demo_draft, tmp_path):
    bundle = tmp_path / "bundle"
    export_bundle(str(demo_target), str(demo_draft), bundle, DType.FLOAT16, round_graph=True)
    graphs = TARGET, DRAFT, ROUND
    plan = plan_engines(bundle, manifest_from_bundle(bundle), TENSORRT_RTX, (), graphs, BuildOptions())

    began = time.monotonic()
    manifest = build(bundle, graphs)
    assert time.monotonic() - began < BUILD_SECONDS

    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak_bytes < 1.3 * max(engine.estimate.host_bytes for engine in plan.engines)
    for engine in plan.engines:
        info = manifest.engines[plan.names()[engine.graph]]
        ratio = manifest.files[info.file].bytes / engine.estimate.engine_bytes
        assert 0.9 < ratio < 1.1, (engine.graph, ratio)
        found = kernels(bundle / info.file)
        layers = {TARGET: manifest.target.num_layers, DRAFT: manifest.draft.num_layers}
        assert found[FUSED_ATTENTION] == layers.get(engine.graph, sum(layers.values()))
        assert softmaxes(found) == 0
