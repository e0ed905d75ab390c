"""Compute the queries that share keys and values as the rows of one product.

Grouped attention has several query heads for each key head. Their rows, put below each other, are one product
with these keys: G heads of R rows become one head of G * R rows, [B, N, R, D] -> [B, N / G, G * R, D], which
is the same memory. Keys are read once, and a lone row (R = 1) is computed by the kernel for several rows,
whose bits do not depend on how many they are.

It pays where there are enough key heads for all threads, as there are with several requests in a pass. Where
attention can be opened (`open_attention`), that groups them, and this is for float16 caches.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..nodes import constant


def group_heads(model: ir.Model) -> bool:
    """Change the model in place, if all its attention can be grouped; whether it could."""
    graph = model.graph
    if not can_group(model):
        return False
    attentions = [node for node in graph if node.op_type == "Attention"]
    masks: dict[ir.Value, ir.Value] = {}
    for node in attentions:
        query, keys, values, mask = node.inputs[:4]
        assert query is not None and keys is not None and values is not None and mask is not None
        heads, groups = _heads(query), _heads(keys)
        many = heads // groups
        if mask not in masks:
            below = ir.node("Concat", [mask] * many, {"axis": 2})
            graph.insert_before(node, below)
            masks[mask] = below.outputs[0]
        apart, together = _shape(graph, query, heads), _shape(graph, query, groups)
        rows = ir.node("Reshape", [query, together])
        grouped = ir.node("Attention", [rows.outputs[0], keys, values, masks[mask]], node.attributes)
        result = ir.node("Reshape", [grouped.outputs[0], apart])
        old, new = node.outputs[0], result.outputs[0]
        new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new)
        graph.insert_before(node, [rows, grouped, result])
    return True


def can_group(model: ir.Model) -> bool:
    """Whether there is attention in the model, and in all of it several queries share keys."""
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    return bool(attentions) and all(map(_can, attentions))


def _can(node: ir.Node) -> bool:
    query, keys, mask = node.inputs[0], node.inputs[1], node.inputs[3] if len(node.inputs) > 3 else None
    if query is None or keys is None or mask is None or mask.shape is None or len(node.inputs) > 4:
        return False
    return mask.shape[1] == 1 and _heads(query) > _heads(keys) and _heads(query) % _heads(keys) == 0


def _heads(value: ir.Value) -> int:
    assert value.shape is not None and isinstance(value.shape[1], int), value
    return value.shape[1]


def _shape(graph: ir.Graph, query: ir.Value, heads: int) -> ir.Value:
    """The batch as it is, so many heads, and rows as many as there are."""
    assert query.shape is not None
    size = query.shape[3]
    return constant(graph, f"tuned.group.{heads}.{size}", np.array([0, heads, -1, size]))
