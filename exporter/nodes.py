"""Small steps over an onnx_ir graph that tuning and rounding share."""

from __future__ import annotations

from collections.abc import Sequence
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
    return graph.initializers.get(name) or stored(graph, name, ir.tensor(array, name=name))


def stored(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initialiser of the graph."""
    value = ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def numbers(graph: ir.Graph, *values: int) -> ir.Value:
    """A list of whole numbers, stored in the graph once."""
    return constant(graph, "numbers." + ".".join(map(str, values)), np.array(values, np.int64))


class Chain:
    """Puts nodes before a node of a graph, one behind the other."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        """Say where."""
        self._graph, self._before = graph, before

    def __call__(
        self, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: float | Sequence[int]
    ) -> ir.Value:
        """Put a node there; gives its first output."""
        return self.all(op, *inputs, outputs=1, domain=domain, **attributes)[0]

    def all(
        self,
        op: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        **attributes: float | Sequence[int],
    ) -> Sequence[ir.Value]:
        """Put a node with so many outputs there; gives them."""
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs)
        self._graph.insert_before(self._before, node)
        return node.outputs
