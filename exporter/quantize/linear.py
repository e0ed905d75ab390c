"""The matrix products of a graph that are worth quantising, and what stands before them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_KNOWN = re.compile(r"(\.layers\.\d+\.(self_attn|mlp)\.\w+_proj|(^|\.)lm_head)\.weight$")

Array = NDArray[np.float32]


@dataclass(eq=False)
class Group:
    """Products of one input, which are computed as one.

    Attributes:
        source: the input, [R, K].
        nodes: Gemm nodes over it, each with a weight [N, K].
        norm: the RMSNormalization that gives the input and nothing else; None if something else does.
    """

    source: ir.Value
    nodes: tuple[ir.Node, ...]
    norm: ir.Node | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights."""
        return tuple(weight_name(node) for node in self.nodes)

    def weights(self) -> list[Array]:
        """The weights, [N, K] each."""
        return [array_of(node.inputs[1]) for node in self.nodes]


def weight_name(node: ir.Node) -> str:
    """Name of a product's weight."""
    value = node.inputs[1]
    assert value is not None and value.name is not None
    return value.name


def array_of(value: ir.Value | None) -> Array:
    """An initialiser's numbers, mapped from its file where it has one."""
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def groups_of(model: ir.Model, head: str) -> list[Group]:
    """Find the products with the weights of attention, MLP and heads, in the order of the graph.

    Args:
        model: a target or draft graph.
        head: name of the target's head; a draft's own is known by its name.
    """
    by_source: dict[int, list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type != "Gemm" or node.domain or node.inputs[1] is None:
            continue
        if node.inputs[1].const_value is None or not node.attributes.get_int("transB", 0):
            continue
        if weight_name(node) == head or _KNOWN.search(weight_name(node)):
            by_source.setdefault(id(node.inputs[0]), []).append(node)
    groups = []
    for nodes in by_source.values():
        source = nodes[0].inputs[0]
        assert source is not None
        producer = source.producer()
        alone = {id(use.node) for use in source.uses()} == {id(node) for node in nodes}
        is_norm = producer is not None and producer.op_type == "RMSNormalization"
        groups.append(Group(source, tuple(nodes), producer if is_norm and alone else None))
    return groups
