"""Replace calls of model-local functions by their bodies, under names that tell them apart."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass


def inline_functions(model: ir.Model) -> None:
    """Inline all functions, in place.

    An engine's parser would do it too, but would give the nodes of every call the same names, so that a
    message or a layer listing could not say which one is meant. A node is called after its function here,
    with a number behind: ``GroupedDynamicConv.Mul_3``.
    """
    for function in model.functions.values():
        for node in function:
            node.name = f"{function.name}.{node.op_type}"
    InlinePass()(model)
    domains = {node.domain for node in ir.traversal.RecursiveGraphIterator(model.graph)}
    for domain in set(model.opset_imports) - domains - {""}:
        del model.opset_imports[domain]
