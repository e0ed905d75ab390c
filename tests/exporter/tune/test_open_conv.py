"""`open_conv`: what it leaves alone. That it keeps the bits is in `test_tuned.py`."""

import onnx_ir as ir

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT
from dflash_deploy.exporter.tune.open_conv import open_conv
from dflash_deploy.plugins.grouped_dynamic_conv import BLOCK_SIZE, OP_TYPE


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
