"""Sizes come from one place, and a Shape that asks for something else is left alone."""

from __future__ import annotations

import onnx_ir as ir

from dflash_deploy.exporter.passes import share_sizes


def shape_of(value: ir.Value, start: int, end: int) -> ir.Node:
    node = ir.node("Shape", [value], {"start": start, "end": end})
    node.outputs[0].name = f"{value.name}.{start}.{end}"
    return node


def asked(node: ir.Node) -> tuple[str | None, int, int]:
    (value,) = node.inputs
    assert value is not None
    return value.name, node.attributes["start"].as_int(), node.attributes["end"].as_int()


def test_the_first_source_that_has_the_axis_is_asked() -> None:
    ids = ir.val("ids", ir.DataType.INT64, ["batch", "rows"])
    cache = ir.val("cache", ir.DataType.FLOAT, ["batch", 8, "capacity", 4])
    inner = ir.node("Identity", [cache])
    inner.outputs[0].name, inner.outputs[0].shape = "inner", ir.Shape(["rows", 8, "batch*rows", "batch"])
    value = inner.outputs[0]
    nodes = [
        inner,
        shape_of(value, 0, 1),  # rows: the second axis of ids
        shape_of(value, 1, 2),  # fixed
        shape_of(value, 2, 3),  # no source has it
        shape_of(value, 3, 4),  # batch: ids and cache have it
        shape_of(value, 0, 2),  # two axes
        ir.node("Shape", [cache]),  # all of them
        shape_of(cache, 2, 3),  # is where it should be
    ]
    graph = ir.Graph([ids, cache], [n.outputs[0] for n in nodes], nodes=nodes, opset_imports={"": 24})
    share_sizes(ir.Model(graph, ir_version=11), graph.inputs)
    assert [asked(node) for node in nodes[1:6]] == [
        ("ids", 1, 2),
        ("inner", 1, 2),
        ("inner", 2, 3),
        ("ids", 0, 1),
        ("inner", 0, 2),
    ]
    assert [value.name for value in nodes[6].inputs if value is not None] == ["cache"]
    assert asked(nodes[7]) == ("cache", 2, 3)
