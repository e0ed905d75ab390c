"""Compute a draft's convolutions with as few operators as they need.

The op's function body takes any number of rows in any number of blocks, and finds by computed indices which
row lies before which. In the draft's graph a block is an axis, so an earlier row is the block moved along.
Both convolutions around a sublayer have their coefficients from one product, and they are computed at once.

The products and sums are those of `plugins.onnx_function`, in the same order, so the bits are the same.

Shapes: B batch, Q block rows, H channels, K taps, G groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from ...plugins.grouped_dynamic_conv import BLOCK_SIZE, DOMAIN, GROUP_SIZE, OP_TYPE
from ..nodes import Chain, constant, from_op, numbers

_PAIR = 2  # convolutions around a sublayer


@dataclass(frozen=True)
class _Conv:
    """One convolution: `which` of the two whose coefficients are `deltas` and `bases`."""

    node: ir.Node
    deltas: ir.Value  # [B, Q, 2, K, G]
    bases: ir.Value  # [2, K, H]
    which: int


def open_conv(model: ir.Model) -> bool:
    """Change the model in place, if all its convolutions are of the expected form; whether it was."""
    graph = model.graph
    nodes = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)]
    convs = [conv for conv in map(_conv, nodes) if conv is not None]
    if not convs or len(convs) < len(nodes):
        return False
    pairs: dict[tuple[ir.Value, ir.Value], list[_Conv]] = defaultdict(list)
    for conv in convs:
        pairs[conv.deltas, conv.bases].append(conv)
    for pair in pairs.values():
        coefficients = _coefficients(graph, pair[0])
        taps = len(coefficients) // _PAIR
        for conv in pair:
            _open(graph, conv.node, coefficients[conv.which * taps : (conv.which + 1) * taps])
    for function in [key for key in model.functions if key[:2] == (DOMAIN, OP_TYPE)]:
        del model.functions[function]
    del model.opset_imports[DOMAIN]
    return True


def _conv(node: ir.Node) -> _Conv | None:
    hidden, delta, base = node.inputs
    deltas, bases = _picked(delta, axis=2), _picked(base, axis=0)
    if hidden is None or hidden.shape is None or deltas is None or bases is None or deltas[1] != bases[1]:
        return None
    block = node.attributes[BLOCK_SIZE].as_int()
    shape, taken = hidden.shape, (deltas[0].shape, bases[0].shape)
    if len(shape) != 3 or shape[1] != block or taken[0] is None or taken[1] is None:
        return None
    if from_op(deltas[0], "Reshape") is None or len(taken[0]) != 5 or taken[1][0] != _PAIR:
        return None
    taps, floats = taken[1][1], all(x is not None and x.dtype == ir.DataType.FLOAT for x in node.inputs)
    if not isinstance(taps, int) or taps > block or not floats:
        return None
    return _Conv(node, deltas[0], bases[0], deltas[1])


def _picked(value: ir.Value | None, axis: int) -> tuple[ir.Value, int] | None:
    """From what, and which, if the value is one picked along an axis."""
    pick = from_op(value, "Gather")
    if pick is None or pick.attributes["axis"].as_int() != axis:
        return None
    source, which = pick.inputs
    index = None if which is None else get_const_tensor(which)
    if source is None or index is None or index.size != 1:
        return None
    return source, int(index.numpy())


def _coefficients(graph: ir.Graph, conv: _Conv) -> Sequence[ir.Value]:
    """Those of every tap of the first convolution, then of the second, [B, Q, H] each."""
    group, block = (conv.node.attributes[name].as_int() for name in (GROUP_SIZE, BLOCK_SIZE))
    shape = conv.bases.shape
    assert shape is not None and isinstance(shape[1], int) and isinstance(shape[2], int)
    taps, hidden = shape[1], shape[2]
    all_taps = _PAIR * taps
    groups = all_taps * hidden // group
    reshape = from_op(conv.deltas, "Reshape")
    assert reshape is not None
    do = Chain(graph, reshape)
    deltas = do("Reshape", reshape.inputs[0], numbers(graph, -1, groups, 1))
    bases = do("Reshape", conv.bases, numbers(graph, groups, group))
    both = do("Reshape", do("Add", bases, deltas), numbers(graph, -1, block, all_taps * hidden))
    widths = numbers(graph, *[hidden] * all_taps)
    return do.all("Split", both, widths, outputs=all_taps, axis=2)


def _open(graph: ir.Graph, node: ir.Node, coefficients: Sequence[ir.Value]) -> None:
    hidden, do = node.inputs[0], Chain(graph, node)
    total = do("Mul", hidden, coefficients[0])
    nothing, rows = constant(graph, "tuned.zero", np.array(0.0, np.float32)), numbers(graph, 1)
    for tap, coefficient in enumerate(coefficients[1:], start=1):
        earlier = do("Pad", hidden, numbers(graph, tap, -tap), nothing, rows)
        total = do("Add", total, do("Mul", earlier, coefficient))
    old = node.outputs[0]
    total.shape, total.type = old.shape, old.type
    old.replace_all_uses_with(total)
    graph.remove(node, safe=True)
