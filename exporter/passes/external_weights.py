"""Point the graph's initialisers at their places in the bundle's weight file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from ..weights import Placed


def external_weights(model: ir.Model, places: Mapping[str, Placed]) -> None:
    """Replace each initialiser named in `places` by a reference into the weight file.

    The initialiser is renamed to the weight's key, so that graphs that share a weight agree on its name.
    Initialisers that are not named stay inside the graph (small constants of the trace).
    """
    graph = model.graph
    for name in list(graph.initializers):
        placed = places.get(name)
        if placed is None:
            continue
        value = graph.initializers.pop(name)
        value.name = placed.key
        value.const_value = ir.ExternalTensor(
            placed.file,
            placed.offset,
            placed.bytes,
            ir.DataType[placed.ir_dtype],
            shape=ir.Shape(placed.shape),
            name=placed.key,
        )
        graph.register_initializer(value)
