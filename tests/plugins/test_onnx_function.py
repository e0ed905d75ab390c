"""The function body: plain ONNX Runtime runs the op from it, with no registration of any kind."""

from __future__ import annotations

import functools
import threading

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from dflash_deploy.bundle.errors import OpError
from dflash_deploy.plugins.onnx_function import add_function, function_proto, op_schema
from dflash_deploy.plugins.torch_op import grouped_dynamic_conv_op, translation_table

from .conv_cases import ISOLATION_CASES, Case, assert_close, assert_isolated, cases

ELEMENTS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


def model_proto(case: Case, rank: int = 3, opset: int = 23, rows: int | str = "rows") -> onnx.ModelProto:
    """One node whose inputs all come from outside; leading axes are symbolic."""
    leading = [*(f"axis_{i}" for i in range(rank - 2)), rows]
    shapes = {
        "hidden": [*leading, case.channels],
        "delta": [*leading, case.kernel_size, case.groups],
        "base": [case.kernel_size, case.channels],
        "output": [*leading, case.channels],
    }
    values = {
        name: helper.make_tensor_value_info(name, ELEMENTS[case.dtype], shape)
        for name, shape in shapes.items()
    }
    node = helper.make_node(
        "GroupedDynamicConv",
        ["hidden", "delta", "base"],
        ["output"],
        domain="dflash",
        block_size=case.block_size,
        group_size=case.group_size,
    )
    graph = helper.make_graph([node], "conv", [values[n] for n in node.input], [values["output"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with_function = ir.from_proto(model)
    add_function(with_function, case.kernel_size, opset)
    return ir.to_proto(with_function)


def session_from(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.cache
def cached_session(kernel_size, block_size, channels, group_size, dtype):
    return session_from(model_proto(Case(block_size, kernel_size, channels, group_size, 1, 1, dtype, 0)))


def run_session(session, hidden, delta, base):
    feeds = dict(zip(("hidden", "delta", "base"), (hidden, delta, base), strict=True))
    if hidden.dtype != ml_dtypes.bfloat16:
        return session.run(None, feeds)[0]
    # NumPy has no bfloat16 of its own, so ONNX Runtime takes and gives the bits.
    binding = session.io_binding()
    for name, value in feeds.items():
        bits = np.ascontiguousarray(value).view(np.uint16)
        binding.bind_ortvalue_input(
            name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
        )
    got = np.empty(hidden.shape, np.uint16)
    binding.bind_output(
        "output", "cpu", 0, TensorProto.BFLOAT16, list(hidden.shape), got.__array_interface__["data"][0]
    )
    session.run_with_iobinding(binding)
    return got.view(ml_dtypes.bfloat16)


def run(hidden, delta, base, case):
    key = (case.kernel_size, case.block_size, case.channels, case.group_size, case.dtype)
    return run_session(cached_session(*key), hidden, delta, base)


def test_equals_the_reference():
    for case in cases():
        inputs = case.draw()
        assert_close("onnx", case, run(*inputs, case), inputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", ISOLATION_CASES)
def test_bad_rows_stay_in_their_block(case, bad):
    assert_isolated(run, case, bad)


@pytest.mark.parametrize("opset", [18, 23, 24])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_any_rank_and_opset(rank, opset):
    case = Case(4, 2, 12, 4, 3, 9, "float32", 7)
    hidden, delta, base = case.draw()
    if rank == 2:
        hidden, delta = hidden[1], delta[1]
    elif rank == 4:
        hidden, delta = hidden[:, None], delta[:, None]
    model = model_proto(case, rank, opset)
    onnx.checker.check_model(model)
    got = run_session(session_from(model), hidden, delta, base)
    assert_close("onnx", case, got, (hidden, delta, base))


def test_static_rows():
    case = Case(8, 2, 12, 4, 2, 8, "float32", 8)
    inputs = case.draw()
    got = run_session(session_from(model_proto(case, rows=8)), *inputs)
    assert_close("onnx", case, got, inputs)


class Twice(torch.nn.Module):
    """Two calls with different kernels, as before and after a sublayer."""

    def __init__(self, dtype):
        super().__init__()
        self.projection = torch.nn.Linear(12, 2 * 2 * 3, bias=False, dtype=dtype)
        self.base = torch.nn.Parameter(torch.randn(2, 2, 12, dtype=dtype))

    def forward(self, hidden):
        delta = self.projection(hidden).view(*hidden.shape[:-1], 2, 2, 3)
        prepared = grouped_dynamic_conv_op(hidden, delta[..., 0, :, :], self.base[0], 4, 4)
        return grouped_dynamic_conv_op(torch.sin(prepared), delta[..., 1, :, :], self.base[1], 4, 4)


def test_exported_module_runs_in_onnx_runtime():
    opset = 24
    torch.manual_seed(0)
    module = Twice(torch.float32).eval()
    program = torch.onnx.export(
        module,
        (torch.randn(3, 7, 12),),
        input_names=["hidden"],
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")},),
        custom_translation_table=translation_table(),
        opset_version=opset,
        verbose=False,
    )
    add_function(program.model, 2, opset)
    proto = ir.to_proto(program.model)
    onnx.checker.check_model(proto)
    assert [node.op_type for node in proto.graph.node].count("GroupedDynamicConv") == 2
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": opset, "dflash": 1}
    session = session_from(proto)
    for batch, rows in ((1, 1), (1, 8), (3, 13)):
        hidden = torch.randn(batch, rows, 12)
        with torch.no_grad():
            expected = module(hidden).numpy()
        got = session.run(None, {"hidden": hidden.numpy()})[0]
        # The projection is a matrix product, whose order of summation is each engine's own.
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_sessions_in_threads_do_not_disturb_each_other():
    case = Case(5, 2, 12, 4, 2, 11, "float32", 9)
    inputs = case.draw()
    data = model_proto(case)
    failures = []

    def work():
        try:
            for _ in range(5):
                assert_close("onnx", case, run_session(session_from(data), *inputs), inputs)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_without_the_function_the_op_is_unknown():
    model = model_proto(Case(5, 2, 12, 4, 2, 11, "float32", 9))
    del model.functions[:]
    with pytest.raises(Exception, match="GroupedDynamicConv"):
        session_from(model)


def test_adding_again_changes_nothing_and_another_kernel_size_is_refused():
    proto = model_proto(Case(5, 2, 12, 4, 1, 1, "float32", 0))
    model = ir.from_proto(proto)
    add_function(model, 2, 23)
    assert ir.to_proto(model) == proto
    with pytest.raises(OpError, match="kernel_size: got 4, expected that of the function"):
        add_function(model, 4, 23)
    with pytest.raises(OpError, match="opset: got 24, expected 23, the model's"):
        add_function(model, 2, 24)


def test_bad_sizes_are_refused():
    with pytest.raises(OpError, match="kernel_size: got 0"):
        function_proto(0, 23)
    with pytest.raises(OpError, match="opset: got 17, expected >= 18"):
        function_proto(2, 17)


def test_schema_and_function_agree():
    schema, function = op_schema(), function_proto(2, 23)
    assert [p.name for p in schema.inputs] == list(function.input)
    assert [p.name for p in schema.outputs] == list(function.output)
    assert sorted(schema.attributes) == sorted(function.attribute)
    assert (schema.domain, schema.name) == (function.domain, function.name)
    assert not onnx.defs.has("GroupedDynamicConv", "dflash")
