"""Drop what computes nothing: identities, repeated subexpressions, unused nodes; then number the names."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ...bundle.tensors import STAGE


def tidy(model: ir.Model) -> None:
    """Run the library's clean-up passes and give nodes and inner values short, stable names."""
    common.CommonSubexpressionEliminationPass()(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.TopologicalSortPass()(model)
    outputs = {id(value) for value in model.graph.outputs}
    count = 0
    for index, node in enumerate(model.graph):
        node.name = f"{node.op_type}.{index}"
        for value in node.outputs:
            if id(value) not in outputs and not (value.name or "").startswith(STAGE):
                value.name = f"v{count}"
                count += 1
