"""Put queries, keys and values into heads as one tensor.

Where the three come out of one product, the portable graph splits its rows, and reshapes and transposes each
part. The parts lie side by side, heads too, so the whole can be reshaped and transposed, and split then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..nodes import constant, from_op

_HEADS_AXIS = 1  # of [B, heads, rows, D]


@dataclass(frozen=True)
class _Part:
    """What makes heads of one part: reshape [B * rows, heads * D] -> [B, rows, heads, D], then transpose."""

    shape: ir.Value
    result: ir.Value
    heads: int
    head_dim: int


def merge_heads(model: ir.Model) -> bool:
    """Change the model in place, wherever the pattern is met; whether it was."""
    found = False
    for split in [node for node in model.graph if node.op_type == "Split"]:
        parts = [_part(output) for output in split.outputs]
        if len(parts) < 2 or any(part is None for part in parts):
            continue
        _merge(model.graph, split, [part for part in parts if part is not None])
        found = True
    return found


def _part(rows: ir.Value) -> _Part | None:
    uses = list(rows.uses())
    if len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return None
    reshape = uses[0].node
    behind = list(reshape.outputs[0].uses())
    if len(behind) != 1 or behind[0].node.op_type != "Transpose" or reshape.inputs[1] is None:
        return None
    transpose = behind[0].node
    shape = transpose.outputs[0].shape
    if transpose.attributes["perm"].as_ints() != (0, 2, 1, 3) or shape is None:
        return None
    heads, head_dim = shape[1], shape[3]
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return None
    return _Part(reshape.inputs[1], transpose.outputs[0], heads, head_dim)


def _merge(graph: ir.Graph, split: ir.Node, parts: list[_Part]) -> None:
    head_dim = parts[0].head_dim
    assert all(part.head_dim == head_dim for part in parts), [part.head_dim for part in parts]
    sizes = from_op(parts[0].shape, "Concat")  # batch, rows, heads, head size
    assert sizes is not None and len(sizes.inputs) == 4, parts[0].shape
    heads = sum(part.heads for part in parts)
    counts = [part.heads for part in parts]
    shape = ir.node(
        "Concat",
        [*sizes.inputs[:2], constant(graph, f"tuned.heads.{heads}", np.array([heads])), sizes.inputs[3]],
        {"axis": 0},
    )
    whole = ir.node("Reshape", [split.inputs[0], shape.outputs[0]], {"allowzero": 1})
    turned = ir.node("Transpose", whole.outputs, {"perm": [0, 2, 1, 3]})
    widths = constant(graph, "tuned.heads." + ".".join(map(str, counts)), np.array(counts))
    apart = ir.node("Split", [*turned.outputs, widths], {"axis": _HEADS_AXIS}, num_outputs=len(parts))
    for part, output in zip(parts, apart.outputs, strict=True):
        output.shape, output.type = part.result.shape, part.result.type
        part.result.replace_all_uses_with(output)
    graph.insert_before(split, [shape, whole, turned, apart])
