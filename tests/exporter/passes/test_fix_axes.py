"""`fix_axes`: sizes in the interface, nothing stale inside."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import parser

from dflash_deploy.exporter.passes import fix_axes

# [batch, rows] -> cumulative positions, through a shape that is computed from both axes.
MODEL = """
<ir_version: 11, opset_import: ["" : 23]>
main (int64[batch, rows] ids, int64[capacity, 3] table) => (int64[batch, rows, 3] y, int64[rows] count)
<int64[flat] flat, int64[flat, 3] picked>
{
    minus_one = Constant <value = int64[1] {-1}> ()
    flat = Reshape (ids, minus_one)
    picked = Gather (table, flat)
    ids_shape = Shape (ids)
    three = Constant <value = int64[1] {3}> ()
    shape = Concat <axis = 0> (ids_shape, three)
    y = Reshape (picked, shape)
    one = Constant <value = int64 {1}> ()
    zero = Constant <value = int64 {0}> ()
    rows_1d = Shape <start = 1, end = 2> (ids)
    end = Squeeze (rows_1d)
    count = Range (zero, end, one)
}
"""


def model() -> ir.Model:
    parsed = ir.from_proto(parser.parse_model(MODEL))
    values = {v.name: v for node in parsed.graph for v in node.outputs}
    values["flat"].shape = ir.Shape(["batch*rows"])
    values["picked"].shape = ir.Shape(["batch*rows", 3])
    return parsed


def shapes(parsed: ir.Model) -> dict[str, list]:
    values = [*parsed.graph.inputs, *(v for node in parsed.graph for v in node.outputs)]
    known = {v.name or "": v.shape for v in values if v.shape is not None}
    return {name: [d if isinstance(d, int) else str(d) for d in shape] for name, shape in known.items()}


def run(parsed: ir.Model, ids: np.ndarray, table: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        ir.to_proto(parsed).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"ids": ids, "table": table})


def test_sizes_replace_names_and_what_was_computed_from_them():
    fixed = model()
    fix_axes(fixed, {"batch": 2, "capacity": 5, "elsewhere": 9})
    found = shapes(fixed)
    assert found["ids"] == [2, "rows"]
    assert found["table"] == [5, 3]
    assert found["y"] == [2, "rows", 3]
    assert "flat" not in found
    assert "picked" not in found


def test_without_sizes_nothing_changes():
    fixed = model()
    fix_axes(fixed, {})
    assert shapes(fixed) == shapes(model())


def test_the_fixed_graph_computes_the_same():
    rng = np.random.default_rng(0)
    table, ids = rng.integers(0, 99, (5, 3)), rng.integers(0, 5, (2, 4))
    fixed = model()
    fix_axes(fixed, {"batch": 2, "rows": 4, "capacity": 5})
    assert shapes(fixed)["count"] == [4]
    for got, expected in zip(run(fixed, ids, table), run(model(), ids, table), strict=True):
        np.testing.assert_array_equal(got, expected)
