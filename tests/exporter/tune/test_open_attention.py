"""`open_attention`: what it leaves alone. That it keeps the bits is in `test_tuned.py`."""

import onnx_ir as ir
import pytest

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import TARGET
from dflash_deploy.exporter.tune.open_attention import open_attention


def _model(bundle) -> ir.Model:
    return ir.load(bundle / manifest_from_bundle(bundle).graphs[TARGET].file)


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def test_it_opens_all_or_none(tiny_bundle):
    model = _model(tiny_bundle("dflash2").bundle)
    assert _attentions(model)
    assert open_attention(model)
    assert not _attentions(model)


@pytest.mark.parametrize("axis", [1, 3])
def test_values_of_other_heads_or_another_size_are_left_alone(tiny_bundle, axis):
    model = _model(tiny_bundle("dflash2").bundle)
    before = _attentions(model)
    values = before[-1].inputs[2]
    shape = list(values.shape)
    shape[axis] += 1
    values.shape = ir.Shape(shape)
    assert not open_attention(model)
    assert _attentions(model) == before
