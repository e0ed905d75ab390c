"""Compute attention with the operators it is made of.

ONNX Runtime's `Attention` on the CPU makes numbers of the boolean mask in every layer, and sorts keys and
values anew for each query head. Here the mask becomes numbers once. Grouped attention has several query heads
for each key head; in a pass of few rows these are the rows of one product, as `group_heads` says, so that
keys and values are sorted and read once. In one of many rows, where the products themselves take the time,
each head is a product of its own, since there are more of them to divide among threads.

Products and softmax run in the kernels that `Attention` takes for several rows, so their bits are the same.

Shapes: B batch, N query heads, G key heads, M = N / G, P products for each key head (1 or M), R rows, K
slots, D head size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..nodes import Chain, constant, numbers

_DOMAIN = "com.microsoft"  # of FusedMatMul, a product that transposes and scales

MANY_ROWS = 16
"""Rows of a pass from which on each head is a product of its own. Measured: 8 rows are faster together by a
tenth, 32 slower by a sixth, with three key heads and two threads."""


def open_attention(model: ir.Model) -> bool:
    """Change the model in place, if all its attention is float32 and has a mask; whether it was."""
    graph = model.graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    if not attentions or not all(map(_can, attentions)):
        return False
    known: dict[tuple[ir.Value, int], _Pass] = {}
    for node in attentions:
        query, keys, mask = node.inputs[0], node.inputs[1], node.inputs[3]
        assert query is not None and keys is not None and mask is not None
        many = _heads(query) // _heads(keys)
        if (mask, many) not in known:
            known[mask, many] = _Pass(graph, node, mask, many)
        known[mask, many].open(node)
    model.opset_imports.setdefault(_DOMAIN, 1)
    return True


def _can(node: ir.Node) -> bool:
    query, keys, values, mask = [*node.inputs, None, None, None][:4]
    if query is None or keys is None or values is None or mask is None or mask.shape is None:
        return False
    if len(node.inputs) > 4 or set(node.attributes) != {"scale"} or mask.dtype != ir.DataType.BOOL:
        return False
    floats = all(value.dtype == ir.DataType.FLOAT for value in (query, keys, values))
    if not floats or mask.shape[1] != 1 or values.shape is None or query.shape is None:
        return False
    alike = _heads(values) == _heads(keys) and values.shape[3] == query.shape[3]
    return alike and _heads(query) % _heads(keys) == 0


def _heads(value: ir.Value) -> int:
    assert value.shape is not None and isinstance(value.shape[1], int), value
    return value.shape[1]


class _Pass:
    """What the layers of one mask share: the mask as numbers, and how the heads are divided."""

    def __init__(self, graph: ir.Graph, first: ir.Node, mask: ir.Value, many: int) -> None:
        """Compute it before the first of the layers.

        Args:
            graph: changed in place.
            first: the layer's Attention.
            mask: bool [B, 1, R, K].
            many: M.
        """
        self._graph, self._many = graph, many
        do = Chain(graph, first)
        seen = constant(graph, "tuned.seen", np.array(0.0, np.float32))
        unseen = constant(graph, "tuned.unseen", np.array(np.finfo(np.float32).min))
        self._mask = do("Where", mask, seen, unseen)
        if many == 1:
            return
        one, all_heads = numbers(self._graph, 1), numbers(self._graph, many)
        rows = do("Shape", mask, start=2, end=3)
        slots = do("Shape", mask, start=3, end=4)
        is_many = do("GreaterOrEqual", rows, numbers(self._graph, MANY_ROWS))
        self._products = do("Where", is_many, all_heads, one)  # P
        below = do("Where", is_many, one, all_heads)  # M / P
        self._mask = do("Expand", self._mask, do("Concat", one, below, one, one, axis=0))
        flat = do("Concat", numbers(self._graph, 0), numbers(self._graph, 1, 1, -1), slots, axis=0)
        self._mask = do("Reshape", self._mask, flat)  # [B, 1, 1, M / P * R, K]

    def open(self, node: ir.Node) -> None:
        """Replace a layer's Attention."""
        query, keys, values = node.inputs[:3]
        assert query is not None and query.shape is not None and keys is not None
        heads, groups, size = _heads(query), _heads(keys), query.shape[3]
        assert isinstance(size, int), query
        do = Chain(self._graph, node)
        if self._many > 1:
            ends = numbers(self._graph, 0, groups), numbers(self._graph, -1, size)
            query = do("Reshape", query, do("Concat", ends[0], self._products, ends[1], axis=0))
            keys, values = (do("Unsqueeze", part, numbers(self._graph, 2)) for part in (keys, values))
        scale = node.attributes["scale"].as_float()
        scores = do("FusedMatMul", query, keys, domain=_DOMAIN, alpha=scale, transB=1)
        weights = do("Softmax", do("Add", scores, self._mask), axis=-1)  # [B, G, P, M / P * R, K]
        result = do("MatMul", weights, values)  # [B, G, P, M / P * R, D]
        if self._many > 1:
            result = do("Reshape", result, numbers(self._graph, 0, heads, -1, size))
        old = node.outputs[0]
        result.shape, result.type = old.shape, old.type
        old.replace_all_uses_with(result)
        self._graph.remove(node, safe=True)
