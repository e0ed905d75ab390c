"""Bundles that a test may build into, and what it looks at afterwards."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.bundle.manifest import Manifest
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.engines.backends import TENSORRT_RTX
from dflash_deploy.exporter.engines.build import build_engines
from dflash_deploy.exporter.export import export_bundle
from originals import tiny_target, zlab_draft

if importlib.util.find_spec("tensorrt_rtx") is None:
    collect_ignore = ["test_build.py", "test_failures.py", "test_kernels.py", "test_demo_engines.py"]

TARGET_LAYERS = 2


@pytest.fixture(scope="session")
def engine_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[DType], Path]:
    """Give a tiny pair, exported once in each dtype that is asked for. Tests must not change it.

    In float16 its draft is of DFlash2, with convolutions and a selector; in bfloat16 of DFlash, which is
    exported in half the time. Head sizes are multiples of 8: TensorRT-RTX has no half-precision attention of
    other sizes.
    """
    folder = tmp_path_factory.mktemp("engines")
    made: dict[DType, Path] = {}

    def give(dtype: DType) -> Path:
        if dtype in made:
            return made[dtype]
        target, draft, made[dtype] = (
            folder / f"{name}-{dtype.value}" for name in ("target", "draft", "bundle")
        )
        model = tiny_target(
            31,
            target,
            num_hidden_layers=TARGET_LAYERS,
            hidden_size=32,
            vocab_size=160,
            max_position_embeddings=128,
            head_dim=16,
        )
        dflash2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
        half = dtype is DType.FLOAT16
        zlab_draft(
            31,
            draft,
            target=model.config,
            dflash2=half,
            num_hidden_layers=1,
            target_layer_ids=[0],
            block_size=8,
            head_dim=16,
            layer_types=["full_attention"],
            use_sliding_window=False,
            **(dflash2 if half else {}),
        )
        export_bundle(str(target), str(draft), made[dtype], dtype)
        return made[dtype]

    return give


@pytest.fixture
def bundle_of(engine_pair, tiny_bundle, tmp_path: Path) -> Callable[[DType], Path]:
    """A copy of a tiny pair, under a name with a space and other letters."""

    def give(dtype: DType) -> Path:
        copy = tmp_path / "a bündel"
        # In float32 another pair does as well, and other tests have it exported.
        pair = tiny_bundle("dflash2").bundle if dtype is DType.FLOAT32 else engine_pair(dtype)
        shutil.copytree(pair, copy)
        return copy

    return give


@pytest.fixture
def half(bundle_of) -> Path:
    """A copy of the tiny pair in float16."""
    return bundle_of(DType.FLOAT16)


def build(
    bundle: Path, graphs: tuple[str, ...] = ("target",), generations: tuple[str, ...] = (), **more: Any
) -> Manifest:
    """Build with TensorRT-RTX; the target alone unless said otherwise, it is the quickest."""
    return build_engines(bundle, TENSORRT_RTX, generations, graphs, **more)


def content(bundle: Path) -> dict[str, bytes]:
    """Every file of a bundle, and the directories in it."""
    return {
        path.relative_to(bundle).as_posix(): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(bundle.rglob("*"))
    }
