"""The kernels in an engine. TensorRT-RTX carries their sources, so they can be read without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from dflash_deploy.bundle.tensors import DType

from .conftest import TARGET_LAYERS, build

# Each kernel's source stands in the engine once, and names the ONNX nodes that it computes.
KERNEL = re.compile(rb"function=\{ name=(\w+) ")
FUSED_ATTENTION = b"_gemm_mha_v2"


def kernels(engine: Path) -> Counter[bytes]:
    return Counter(KERNEL.findall(engine.read_bytes()))


def only_engine(bundle: Path) -> Path:
    (engine,) = (bundle / "engines").iterdir()
    return engine


def softmaxes(found: Counter[bytes]) -> int:
    """Kernels that subtract a maximum and take exponentials: attention that was taken apart."""
    return sum(count for name, count in found.items() if re.search(rb"Max.*SubExp", name))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_attention_is_fused_in_half_precision(bundle_of, dtype):
    bundle = bundle_of(dtype)
    build(bundle, generations=("8.9",))
    found = kernels(only_engine(bundle))
    assert found[FUSED_ATTENTION] == TARGET_LAYERS
    assert softmaxes(found) == 0


@pytest.mark.slow
def test_attention_is_taken_apart_in_float32(bundle_of):
    bundle = bundle_of(DType.FLOAT32)
    build(bundle, generations=("8.9",))
    found = kernels(only_engine(bundle))
    assert found[FUSED_ATTENTION] == 0
    assert softmaxes(found) > 0
