"""The definition: its checks say what, got, expected and what to do, and cost no import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_deploy.bundle.errors import DflashError, OpError
from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec, check_dtypes, check_rank


def spec_from(hidden=(2, 8, 12), delta=(2, 8, 2, 3), base=(2, 12), block_size=8, group_size=4):
    return ConvSpec.from_shapes(hidden, delta, base, block_size=block_size, group_size=group_size)


def test_fitting_shapes_give_the_sizes():
    spec = spec_from()
    assert spec == ConvSpec(hidden_size=12, kernel_size=2, block_size=8, group_size=4)
    assert spec.groups == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 5}, "hidden_size: got 12, expected a multiple of group_size 5; "),
        ({"block_size": 1}, "kernel_size: got 2, expected <= block_size 1; "),
        ({"base": (2, 13)}, r"base: got \(2, 13\), expected shape \[kernel_size, 12\]; "),
        ({"base": (12,)}, r"base: got \(12,\), expected shape \[kernel_size, 12\]; "),
        ({"delta": (2, 8, 3, 2)}, r"delta: got \(2, 8, 3, 2\), expected shape \(2, 8, 2, 3\); "),
        ({"delta": (8, 2, 3)}, r"delta: got \(8, 2, 3\), expected shape \(2, 8, 2, 3\); "),
        ({"hidden": ()}, r"hidden: got \(\), expected shape \[..., L, H\]; "),
        ({"group_size": 0}, "group_size: got 0, expected >= 1; "),
        ({"block_size": 0}, "block_size: got 0, expected >= 1; "),
    ],
)
def test_misfits_are_named(change, message):
    with pytest.raises(OpError, match=message) as caught:
        spec_from(**change)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DflashError)


@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 16])
def test_kernel_longer_than_a_block_is_refused(block_size):
    with pytest.raises(OpError, match="kernel_size"):
        ConvSpec(hidden_size=4, kernel_size=block_size + 1, block_size=block_size, group_size=1)


def test_rank_and_dtypes_are_checked():
    with pytest.raises(OpError, match="hidden: got 'rank 1', expected rank >= 2"):
        check_rank(1)
    with pytest.raises(OpError, match="hidden dtype: got 'float64', expected one of float32"):
        check_dtypes("float64", "float64", "float64")
    with pytest.raises(OpError, match="delta dtype: got 'float16', expected float32; cast delta"):
        check_dtypes("float32", "float16", "float32")


def test_definition_imports_no_engine():
    code = (
        "import sys, dflash_deploy.plugins, dflash_deploy.plugins.grouped_dynamic_conv\n"
        "print([m for m in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
