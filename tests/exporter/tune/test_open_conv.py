"""`open_conv`: what it leaves alone. That it keeps the bits is in `test_tuned.py`."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, shape_inference

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT
from dflash_deploy.exporter.tune.open_conv import open_conv
from dflash_deploy.plugins.grouped_dynamic_conv import BLOCK_SIZE, DOMAIN, GROUP_SIZE, OP_TYPE
from dflash_deploy.plugins.onnx_function import add_function


def _model(bundle) -> ir.Model:
    return ir.load(bundle / manifest_from_bundle(bundle).graphs[DRAFT].file)


def _count(model: ir.Model) -> int:
    return sum(node.op_type == OP_TYPE for node in model.graph)


def test_a_draft_without_convolutions_is_left_alone(tiny_bundle):
    assert not open_conv(_model(tiny_bundle("dflash").bundle))


def test_blocks_that_are_no_axis_are_left_alone(tiny_bundle):
    model = _model(tiny_bundle("dflash2").bundle)
    before = _count(model)
    node = next(node for node in model.graph if node.op_type == OP_TYPE)
    node.attributes[BLOCK_SIZE] = ir.AttrInt64(BLOCK_SIZE, node.attributes[BLOCK_SIZE].as_int() - 1)
    assert not open_conv(model)
    assert _count(model) == before > 0


def test_convolutions_that_share_deltas_alone_keep_their_own_bases():
    block, taps, groups, size = 4, 2, 2, 4
    random, hidden = np.random.default_rng(5), groups * size
    bases = {name: random.standard_normal((2, taps, hidden), np.float32) for name in ("first", "second")}
    numbers = {
        **bases,
        "shape": np.array([-1, block, 2, taps, groups]),
        "0": np.array(0),
        "1": np.array(1),
    }
    nodes = [helper.make_node("Reshape", ["raw", "shape"], ["deltas"])]
    for name, which in (("first", "0"), ("second", "1")):
        delta, base = f"{name}.delta", f"{name}.base"
        nodes += [
            helper.make_node("Gather", ["deltas", which], [delta], axis=2),
            helper.make_node("Gather", [name, which], [base], axis=0),
            helper.make_node(
                OP_TYPE,
                ["hidden", delta, base],
                [f"{name}.rows"],
                domain=DOMAIN,
                **{BLOCK_SIZE: block, GROUP_SIZE: size},
            ),
            helper.make_node("Identity", [f"{name}.rows"], [f"{name}.output"]),
        ]
    shapes = {"hidden": ["b", block, hidden], "raw": ["b", block, 2 * taps * groups]}
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [
            helper.make_tensor_value_info(f"{name}.output", TensorProto.FLOAT, shapes["hidden"])
            for name in bases
        ],
        [numpy_helper.from_array(array, name) for name, array in numbers.items()],
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model = ir.from_proto(shape_inference.infer_shapes(proto))
    add_function(model, taps, 23)
    feeds = {
        "hidden": random.standard_normal((3, block, hidden), np.float32),
        "raw": random.standard_normal((3, block, 2 * taps * groups), np.float32),
    }
    expected = _outputs(model, feeds)
    assert open_conv(model)
    assert not _count(model)
    for got, output in zip(_outputs(model, feeds), expected, strict=True):
        np.testing.assert_array_equal(got, output)


def _outputs(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feeds)
