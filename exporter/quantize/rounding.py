"""What the weights of a bundle are rounded by, and the rounding of a graph.

Shapes: K channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...bundle.errors import UnsupportedError
from ...bundle.manifest import INT8, Manifest
from . import draft_vocabulary, int4
from .int8 import DOMAIN, replace_embedding, replace_group
from .linear import Array, Group, array_of, groups_of
from .measure import channel_powers, channel_sizes
from .smooth import smoothing_factors
from .store import Weights


@dataclass(frozen=True)
class Rounding:
    """What rounding goes by.

    Attributes:
        head: name of the target's head.
        of_head: [K], factors of the head's channels; None where the target keeps it as it is.
        factors: of the channels before other groups, by the names of their weights.
        powers: of the channels before groups whose weights get four bits, likewise.
    """

    head: str
    of_head: Array | None = None
    factors: Mapping[tuple[str, ...], Array] = field(default_factory=dict)
    powers: Mapping[tuple[str, ...], Array] = field(default_factory=dict)


def calibrated(
    bundle: Path, manifest: Manifest, groups: Sequence[Group], head: str, texts: list[list[int]], bits: int
) -> Rounding:
    """Find out over texts what rounding is to go by.

    Args:
        bundle: the float32 bundle.
        manifest: its manifest.
        groups: of the target's graph.
        head: name of the target's head.
        texts: token ids.
        bits: of the weights of the target's layers.
    """
    smoothed = [group for group in groups if group.norm is not None]
    sizes = channel_sizes(bundle, manifest, [_name(g.source) for g in smoothed], texts)
    factors = {g.names: smoothing_factors(sizes[_name(g.source)], g.weights()) for g in smoothed}
    of_head = next((found for names, found in factors.items() if head in names), None)
    if of_head is None:
        of_head = np.ones(manifest.target.hidden_size, np.float32)
    factors[(draft_vocabulary.HEAD,)] = of_head  # some of its rows
    powers: dict[tuple[str, ...], Array] = {}
    if bits == 4:
        layers = [group for group in groups if head not in group.names]
        found = channel_powers(bundle, manifest, [_name(g.source) for g in layers], texts)
        powers = {group.names: found[_name(group.source)] for group in layers}
    return Rounding(head, of_head, factors, powers)


def round_weights(model: ir.Model, rounding: Rounding, weights: Weights) -> tuple[str, ...]:
    """Round what is worth it; a target's groups in `powers` to four bits, all others to eight.

    Returns:
        What was done, as passes of the graph.

    Raises:
        UnsupportedError: no weight is known by its name.
    """
    head, of_head = rounding.head, rounding.of_head
    graph = model.graph
    place = weights.placer(graph)
    groups = groups_of(model, head)
    if not groups:
        raise UnsupportedError(
            "quantize: the draft has no attention, MLP or head weights known by name; only drafts of "
            "transformers are rounded, use the float32 bundle"
        )
    four = any(group.names in rounding.powers for group in groups)
    for group in groups:
        if group.names in rounding.powers:
            int4.replace_group(graph, group, group.weights(), rounding.powers[group.names], place)
            continue
        chosen = of_head if head in group.names else rounding.factors.get(group.names)
        if chosen is None:
            replace_group(graph, group, group.weights(), place)
            continue
        if group.norm is not None:
            value = group.norm.inputs[1]
            smoothed = place(f"{value.name}.smooth", array_of(value) / chosen)  # type: ignore[union-attr]
            group.norm.replace_input_with(1, smoothed)
        else:
            scale = place(f"{head}.unsmooth", (1.0 / chosen).astype(np.float32))
            divided = ir.node("Mul", [group.source, scale])
            graph.insert_before(group.nodes[0], divided)
            group = replace(group, source=divided.outputs[0])
        replace_group(graph, group, [weight * chosen for weight in group.weights()], place)
    if of_head is not None:
        for node in list(graph):
            value = node.inputs[0] if node.op_type == "Gather" and not node.domain else None
            if value is not None and value.name == head:
                replace_embedding(graph, node, head, of_head, place)
    model.opset_imports[DOMAIN] = 1
    return (*(["int4"] if four else []), *(["smooth"] if rounding.factors else []), INT8)


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name
