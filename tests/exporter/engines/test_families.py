"""Targets of every family build, in float16: windows, softcaps, scaled embeddings, norms between."""

from pathlib import Path

import pytest

from dflash_deploy.bundle.manifest import Verify, check_files
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.engines.backends import TENSORRT_RTX
from dflash_deploy.exporter.engines.build import build_engines
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.targets.families import FAMILIES
from originals import tiny_target, zlab_draft
from target_cases import options


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_target_of_every_family_builds(tmp_path: Path, family: str) -> None:
    drawn = options(family, 1, layers=2) | {"max_position_embeddings": 128, "head_dim": 16}
    model = tiny_target(7, tmp_path / "target", family, **drawn)
    zlab_draft(
        7,
        tmp_path / "draft",
        target=model.config,
        dflash2=False,
        num_hidden_layers=1,
        target_layer_ids=[0],
        block_size=4,
        head_dim=16,
    )
    bundle = tmp_path / "bundle"
    export_bundle(str(tmp_path / "target"), str(tmp_path / "draft"), bundle, DType.FLOAT16)
    for capabilities in (["8.9"], ["8.0", "8.6", "12.0"]):
        manifest = build_engines(bundle, TENSORRT_RTX, capabilities)
        check_files(manifest, bundle, Verify.HASHES)
        for graph in ("target", "draft"):
            engine = manifest.engines[f"{graph}.tensorrt-rtx"]
            assert list(engine.compute_capabilities) == capabilities
