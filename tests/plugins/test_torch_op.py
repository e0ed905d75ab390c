"""The PyTorch op against the reference, against both originals, and through `torch.onnx.export`."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_deploy.bundle.errors import OpError
from dflash_deploy.plugins.torch_op import (
    grouped_dynamic_conv,
    grouped_dynamic_conv_op,
    translation_table,
)

from .conv_cases import ISOLATION_CASES, NUMPY_DTYPES, Case, assert_close, assert_isolated, cases


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == NUMPY_DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(NUMPY_DTYPES["bfloat16"])
    return x.numpy()


def run(hidden, delta, base, case):
    return array(
        grouped_dynamic_conv_op(*map(tensor, (hidden, delta, base)), case.block_size, case.group_size)
    )


def test_equals_the_reference():
    count = 0
    for case in cases():
        inputs = case.draw()
        assert_close("torch", case, run(*inputs, case), inputs)
        count += 1
    assert count > 300


@settings(max_examples=60, deadline=None)
@given(
    block=st.integers(1, 9),
    taps=st.integers(1, 9),
    groups=st.integers(1, 5),
    width=st.integers(1, 5),
    batch=st.integers(1, 3),
    rows=st.integers(1, 30),
    dtype=st.sampled_from(list(NUMPY_DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_reference_on_any_sizes(block, taps, groups, width, batch, rows, dtype, seed):
    case = Case(block, min(taps, block), groups * width, width, batch, rows, dtype, seed)
    inputs = case.draw()
    assert_close("torch", case, run(*inputs, case), inputs)


def test_strided_inputs_and_any_rank():
    case = Case(5, 4, 12, 4, 3, 13, "float32", 0)
    hidden, delta, base = map(tensor, case.draw())
    expected = grouped_dynamic_conv_op(hidden, delta, base, 5, 4)
    wide = torch.zeros(3, 13, 20)
    wide[..., 5:17] = hidden
    both = torch.stack([torch.zeros_like(delta), delta], dim=2)  # as kernel_projection lays them out
    turned = base.T.contiguous().T
    assert torch.equal(grouped_dynamic_conv_op(wide[..., 5:17], both[:, :, 1], turned, 5, 4), expected)
    swapped = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(grouped_dynamic_conv_op(swapped, delta, base, 5, 4), expected)
    assert torch.equal(grouped_dynamic_conv_op(hidden[1], delta[1], base, 5, 4), expected[1])
    assert torch.equal(grouped_dynamic_conv_op(hidden[:, None], delta[:, None], base, 5, 4)[:, 0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", ISOLATION_CASES)
def test_bad_rows_stay_in_their_block(case, bad):
    assert_isolated(run, case, bad)


def test_flattened_form_equals_speculators():
    definitions = pytest.importorskip("speculators.models.dflash2.model_definitions")
    for case in cases():
        if case.batch * case.rows < case.kernel_size:
            continue  # the original pads past the end there, and fails
        inputs = case.draw()
        sizes = {"block_size": case.block_size, "group_size": case.group_size}
        original = definitions.grouped_dynamic_conv(*map(tensor, inputs), **sizes)
        ours = grouped_dynamic_conv(*map(tensor, inputs), **sizes)
        # Flattening is the original's way to count rows: [1, B * L] is the same run of blocks.
        flat = tuple(x.reshape(1, -1, *x.shape[2:]) for x in inputs[:2]) + inputs[2:]
        assert_close("torch", case, array(ours).reshape(flat[0].shape), flat)
        assert_close("speculators", case, array(original).reshape(flat[0].shape), flat)


def test_flattened_form_refuses_what_speculators_refuses():
    definitions = pytest.importorskip("speculators.models.dflash2.model_definitions")
    hidden, delta, base = torch.ones(2, 8, 12), torch.ones(2, 8, 2, 3), torch.ones(2, 12)
    bad = [
        (hidden, delta, base, {"block_size": 8, "group_size": 5}),
        (hidden, delta, base, {"block_size": 1, "group_size": 4}),
        (hidden, delta, torch.ones(2, 13), {"block_size": 8, "group_size": 4}),
        (hidden, torch.ones(2, 8, 3, 2), base, {"block_size": 8, "group_size": 4}),
    ]
    for *tensors, sizes in bad:
        with pytest.raises(ValueError, match=r"must|cannot"):
            definitions.grouped_dynamic_conv(*tensors, **sizes)
        with pytest.raises(ValueError, match=r": got .*, expected .*; "):
            grouped_dynamic_conv(*tensors, **sizes)


def test_equals_zlab():
    original = pytest.importorskip("dflash.model")._grouped_dynamic_convolve
    for case in cases():
        if not case.kernel_size <= case.rows <= case.block_size:
            continue  # z-lab runs one block at a time, and only pads where rows are left
        inputs = case.draw()
        got = original(*map(tensor, inputs), case.group_size)
        assert_close("z-lab", case, array(got), inputs)
        assert_close("torch", case, run(*inputs, case), inputs)


def test_op_refuses_misfits():
    hidden, delta, base = torch.ones(2, 8, 12), torch.ones(2, 8, 2, 3), torch.ones(2, 12)
    with pytest.raises(OpError, match="rank 1"):
        grouped_dynamic_conv_op(hidden[0, 0], delta[0, 0], base, 8, 4)
    with pytest.raises(OpError, match="delta dtype"):
        grouped_dynamic_conv_op(hidden, delta.half(), base, 8, 4)
    with pytest.raises(OpError, match="kernel_size"):
        grouped_dynamic_conv_op(hidden, delta, base, 1, 4)


def test_pytorch_accepts_the_registration():
    inputs = tuple(map(tensor, Case(4, 2, 12, 4, 2, 8, "float32", 0).draw()))
    torch.library.opcheck(
        grouped_dynamic_conv_op, (*inputs, 4, 4), test_utils=("test_schema", "test_faketensor")
    )


class Conv(torch.nn.Module):
    """Kernel from a projection of the rows, as in the draft."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(12, 2 * 3, bias=False)
        self.base = torch.nn.Parameter(torch.randn(2, 12))

    def forward(self, hidden):
        delta = self.projection(hidden).view(*hidden.shape[:-1], 2, 3)
        return grouped_dynamic_conv_op(hidden, delta, self.base, 4, 4)


@pytest.mark.parametrize("fake", [False, True])
def test_export_keeps_one_node(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        program = torch.onnx.export(
            Conv().eval(),
            (torch.randn(3, 8, 12),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")},),
            custom_translation_table=translation_table(),
            opset_version=23,
            optimize=not fake,  # the optimizer would fold weights that are not there
            verbose=False,
        )
    nodes = [node for node in program.model.graph if node.domain == "dflash"]
    assert [node.op_type for node in nodes] == ["GroupedDynamicConv"]
    attributes = {name: attribute.value for name, attribute in nodes[0].attributes.items()}
    assert attributes == {"block_size": 4, "group_size": 4}
    assert program.model.opset_imports["dflash"] == 1
    axes = [list(value.shape) for value in itertools.chain(program.model.graph.inputs, nodes[0].outputs)]
    assert [[str(axis) for axis in shape] for shape in axes] == [["batch", "rows", "12"]] * 2
