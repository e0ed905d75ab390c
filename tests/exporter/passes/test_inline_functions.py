"""`inline_functions`: no function is left, every node has its own name, and the result is the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser

from dflash_deploy.exporter.passes import inline_functions

MODEL = """
<ir_version: 11, opset_import: ["" : 23, "dflash" : 1]>
main (float[rows, 4] x) => (float[rows, 4] y)
{
    a = dflash.Twice <factor = 2.0> (x)
    y = dflash.Twice <factor = 3.0> (a)
}
<domain: "dflash", opset_import: ["" : 23]>
Twice <factor> (x) => (y)
{
    scale = Constant <value_float: float = @factor> ()
    scaled = Mul (x, scale)
    y = Add (scaled, x)
}
"""


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_calls_become_bodies_with_names_of_their_own():
    proto = parser.parse_model(MODEL)
    model = ir.from_proto(proto)
    inline_functions(model)
    assert not model.functions
    assert set(model.opset_imports) == {""}
    names = [node.name or "" for node in model.graph]
    assert len(set(names)) == len(names) == 6
    assert sum(name.startswith("Twice.Mul") for name in names) == 2
    inlined = ir.to_proto(model)
    onnx.checker.check_model(inlined)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(inlined, x), run(proto, x))


def test_a_model_without_functions_stays():
    text = (
        '<ir_version: 11, opset_import: ["" : 23]> main (float[4] x) => (float[4] y) {a = Relu(x) y = Neg(a)}'
    )
    model = ir.from_proto(parser.parse_model(text))
    before = ir.to_proto(model).SerializeToString()
    inline_functions(model)
    assert ir.to_proto(model).SerializeToString() == before
