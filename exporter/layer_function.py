"""From the one node of all layers to their calls, and from a layer's own graph to what takes their place."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .modules.layer_calls import DOMAIN, Step


def calls_from_node(
    graph: ir.Graph,
    steps: Sequence[Step],
    caches: Sequence[ir.Value],
    parameters: Sequence[Sequence[ir.Value]],
) -> list[ir.Value]:
    """Put a call for each layer in the place of the node that stands for all of them.

    Args:
        graph: changed in place.
        steps: the layers.
        caches: of all layers in order, as many for each.
        parameters: of each layer.

    Returns:
        The updated caches, without names.
    """
    (node,) = (node for node in graph if node.domain == DOMAIN)
    each = len(caches) // len(steps)
    x, updated = node.inputs[0], []
    for index, step in enumerate(steps):
        own = caches[index * each : (index + 1) * each]
        shared = (node.inputs[place] for place in step.shared)
        call = ir.node(step.kind, [x, *own, *shared, *parameters[index]], domain=DOMAIN, num_outputs=1 + each)
        x = call.outputs[0]
        if step.output is not None:
            old = node.outputs[step.output]
            x.name, x.shape, x.type = old.name, old.shape, old.type
            old.replace_all_uses_with(x, replace_graph_outputs=True)
        for new, cache in zip(call.outputs[1:], own, strict=True):
            new.shape, new.type = cache.shape, cache.type
            updated.append(new)
        graph.insert_before(node, call)
    graph.remove(node, safe=True)
    return updated


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
