"""From a layer's own graph to a function that takes the place of the layer's calls."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .modules.layer_calls import DOMAIN


def function_from_graph(
    kind: str, graph: ir.Graph, inputs: Sequence[ir.Value], parameters: Sequence[str]
) -> ir.Function:
    """Make a function of a traced layer.

    Args:
        kind: its name.
        graph: taken over.
        inputs: values of the graph in the order in which a call passes them.
        parameters: initialisers that a call passes behind them; the other ones become constants.
    """
    weights = [graph.initializers.pop(name) for name in parameters]
    first = graph[0]
    for value in list(graph.initializers.values()):
        constant = ir.node("Constant", [], {"value": value.const_value}, name=value.name)
        constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
        graph.insert_before(first, constant)
        value.replace_all_uses_with(constant.outputs[0])
    graph.initializers.clear()
    graph.inputs[:] = [*inputs, *weights]
    return ir.Function(DOMAIN, kind, graph=graph, attributes=[])


def without_reshape(value: ir.Value) -> ir.Value:
    """Take out the Reshape behind an input, so that the input is what it gave: see `LayerAlone`."""
    ((reshape, _),) = value.uses()
    assert reshape.op_type == "Reshape" and reshape.graph is not None, reshape
    flat = ir.Value(name=value.name, type=value.type, shape=reshape.outputs[0].shape)
    reshape.outputs[0].replace_all_uses_with(flat)
    reshape.graph.remove(reshape)
    return flat
