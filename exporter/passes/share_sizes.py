"""Take the size of a named axis from one place."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def share_sizes(model: ir.Model, sources: Sequence[ir.Value]) -> None:
    """Let each Shape node that asks for one axis ask the first of `sources` that has an axis of the name.

    The tracer asks whatever tensor is at hand. Asked of one place, sizes are computed once for all layers.
    """
    first: dict[str, tuple[ir.Value, int]] = {}
    for source in sources:
        for axis, name in enumerate(_names(source)):
            if name is not None:
                first.setdefault(name, (source, axis))
    for node in model.graph:
        if node.op_type != "Shape" or "end" not in node.attributes:
            continue
        start, end = (node.attributes[name].as_int() for name in ("start", "end"))
        (asked,) = node.inputs
        assert asked is not None
        name = _names(asked)[start] if end == start + 1 else None
        if name in first:
            source, axis = first[name]
            node.replace_input_with(0, source)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


def _names(value: ir.Value) -> list[str | None]:
    """Name of each axis, None for a fixed one."""
    assert value.shape is not None, value
    return [None if isinstance(axis, int) else axis.value for axis in value.shape]
