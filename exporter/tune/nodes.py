"""Small steps over an onnx_ir graph that the passes share."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


def from_op(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node that gives a value, if it is of a kind."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op else None


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """An initialiser of the graph, made if there is none of the name."""
    known = graph.initializers.get(name)
    if known is not None:
        return known
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(np.asarray(array).dtype)),
        const_value=ir.tensor(array, name=name),
    )
    graph.register_initializer(value)
    return value
