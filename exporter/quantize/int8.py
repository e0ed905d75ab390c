"""Products of int8 weights and rows that are rounded each by itself.

A weight [N, K] has a scale for each output; a row of activations has its own: its largest absolute value. So
what a row gives depends on that row alone, and is the same bits in any company: the products are of integers.
(ONNX's DynamicQuantizeLinear has one scale for all rows, the proposals of a draft among them, and a token
then depends on what was proposed behind it.)

Shapes: N outputs, K channels, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .linear import Array, Group, array_of, weight_name

STEPS = 127
"""Activations are rounded to this many steps on either side of zero, as weights are."""

_ZERO = 128  # of the activations: the fast kernels take unsigned times signed
DOMAIN = "com.microsoft"

Place = Callable[[str, NDArray[np.generic]], ir.Value]
"""Stores an array under a name, once, and gives the graph's value for it."""


def quantised(weight: Array) -> tuple[NDArray[np.int8], Array]:
    """Round a weight [N, K]; gives [K, N] int8 and the scales [N]."""
    scales = np.abs(weight).max(axis=1) / np.float32(STEPS)
    scales[scales == 0] = 1.0
    steps = np.rint(weight / scales[:, None])
    return np.ascontiguousarray(steps.T.astype(np.int8)), scales.astype(np.float32)


def replace_group(graph: ir.Graph, group: Group, weights: Sequence[Array], place: Place) -> None:
    """Put an integer product in the place of a group's products.

    Args:
        graph: changed in place.
        group: found in it.
        weights: [N, K] each, what to round.
        place: stores the rounded ones.
    """
    parts = [quantised(weight) for weight in weights]
    name = "+".join(group.names)
    weight = place(f"{name}.int8", np.concatenate([steps for steps, _ in parts], axis=1))
    scales = place(f"{name}.scale", np.concatenate([scale for _, scale in parts]))
    new: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value, domain: str = "", **attributes: int) -> ir.Node:
        made = ir.node(op, inputs, attributes, domain=domain)
        made.name = f"{name}.{op}.{len(new)}"
        new.append(made)
        return made

    size = node("Abs", group.source).outputs[0]
    size = node("ReduceMax", size, place("int8.last_axis", np.array([-1], np.int64)), keepdims=1).outputs[0]
    step = place("int8.step", np.array(1.0 / STEPS, np.float32))
    zero = place("int8.zero", np.array(_ZERO, np.uint8))
    # A row of zeros becomes some integers, whose product times a size of zero is zero.
    rows = node("QuantizeLinear", node("Div", group.source, size).outputs[0], step, zero).outputs[0]
    product = node("MatMulIntegerToFloat", rows, weight, step, scales, zero, domain=DOMAIN).outputs[0]
    result = node("Mul", product, size).outputs[0]  # [R, sum of N]
    replace_products(graph, group, new, result, [len(scale) for _, scale in parts], place)


def replace_products(
    graph: ir.Graph, group: Group, new: list[ir.Node], result: ir.Value, widths: Sequence[int], place: Place
) -> None:
    """Let the parts of one product stand where a group's products stood, biases added.

    Args:
        graph: changed in place.
        group: found in it.
        new: the nodes that compute the product.
        result: what they give, [R, sum of N].
        widths: N of each part.
        place: stores them.
    """
    name = "+".join(group.names)
    outputs: Sequence[ir.Value] = (result,)
    if len(group.nodes) > 1:
        split = ir.node(
            "Split",
            [result, place(f"{name}.widths", np.array(widths, np.int64))],
            {"axis": 1},
            num_outputs=len(widths),
            name=f"{name}.Split",
        )
        new, outputs = [*new, split], split.outputs
    for old, output in zip(group.nodes, outputs, strict=True):
        if len(old.inputs) > 2 and old.inputs[2] is not None:
            added = ir.node("Add", [output, old.inputs[2]], name=f"{weight_name(old)}.Add")
            new, output = [*new, added], added.outputs[0]
        _rename(old.outputs[0], output)
    graph.insert_before(group.nodes[0], new)
    graph.remove(group.nodes, safe=True)


def replace_embedding(graph: ir.Graph, gather: ir.Node, head: str, factors: Array, place: Place) -> None:
    """Read embedding rows from the columns of the head's int8 weight, which is the same matrix.

    Args:
        graph: changed in place.
        gather: the lookup; its ids are [R].
        head: name of the head's weight.
        factors: [K], what the head's weight was multiplied by.
        place: finds the head's int8 weight, and stores what undoes the factors.
    """
    ids = gather.inputs[1]
    assert ids is not None
    weight, scales = array_of(gather.inputs[0]), None
    steps, scales = quantised(weight * factors)
    new: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value, **attributes: int | Sequence[int]) -> ir.Value:
        made = ir.node(op, inputs, attributes)
        made.name = f"{head}.embedding.{op}.{len(new)}"
        new.append(made)
        return made.outputs[0]

    columns = node("Gather", place(f"{head}.int8", steps), ids, axis=1)  # [K, R]
    rows = node("Cast", node("Transpose", columns, perm=[1, 0]), to=ir.DataType.FLOAT.value)
    scale = node("Gather", place(f"{head}.scale", scales), ids, axis=0)  # [R]
    scale = node("Unsqueeze", scale, place("int8.last_axis", np.array([-1], np.int64)))
    rows = node("Mul", rows, scale)
    rows = node("Mul", rows, place(f"{head}.unsmooth", (1.0 / factors).astype(np.float32)))
    _rename(gather.outputs[0], rows)
    graph.insert_before(gather, new)
    graph.remove(gather, safe=True)


def _rename(old: ir.Value, new: ir.Value) -> None:
    """Let `new` be what `old` was: its name, its uses, and its place among the graph's outputs."""
    name, old.name = old.name, f"{old.name}.float"
    new.name, new.shape, new.type = name, old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
