"""Give the graph exactly the interface of the contract, and turn stage outputs into named inner values."""

from __future__ import annotations

import onnx_ir as ir

from ...bundle.tensors import STAGE, DType, GraphIO, TensorInfo

_IR_DTYPES = {
    DType.FLOAT32: ir.DataType.FLOAT,
    DType.FLOAT16: ir.DataType.FLOAT16,
    DType.BFLOAT16: ir.DataType.BFLOAT16,
    DType.INT64: ir.DataType.INT64,
}


def set_interface(model: ir.Model, interface: GraphIO, stages: int) -> None:
    """Check names, dtypes and ranks against `interface`, write its symbolic axes, drop `stages` outputs.

    The last `stages` outputs keep their names as values of the graph.
    """
    graph = model.graph
    if stages:
        for value in graph.outputs[-stages:]:
            assert value.name is not None and value.name.startswith(STAGE), value.name
        del graph.outputs[-stages:]
    for values, infos in ((graph.inputs, interface.inputs), (graph.outputs, interface.outputs)):
        assert len(values) == len(infos), (len(values), len(infos))
        for value, info in zip(values, infos, strict=True):
            _set(value, info)


def _set(value: ir.Value, info: TensorInfo) -> None:
    assert value.name == info.name, (value.name, info.name)
    assert value.dtype == _IR_DTYPES[info.dtype], (info.name, value.dtype, info.dtype)
    assert value.shape is not None and len(value.shape) == len(info.axes), (info.name, value.shape)
    for traced, promised in zip(value.shape, info.axes, strict=True):
        fixed = isinstance(traced, int)
        assert fixed == isinstance(promised, int) and (not fixed or traced == promised), (
            info.name,
            value.shape,
            info.axes,
        )
    value.shape = ir.Shape(info.axes)
