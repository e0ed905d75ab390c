"""The graph an engine is built from: the bundle's own, with axes fixed and functions inlined.

Its weights stay where they are: initialisers name the bundle's weight file, and the parser is told the
path of the graph that they stand beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ...bundle.errors import BundleError
from .. import passes


@dataclass(frozen=True)
class BuildGraph:
    """What the parser reads.

    Attributes:
        data: the serialised model, without weights.
        weights_bytes: weights that it names, each counted once.
        nodes: nodes that compute something.
    """

    data: bytes
    weights_bytes: int
    nodes: int


def graph_from_bundle(path: Path, sizes: Mapping[str, int]) -> BuildGraph:
    """Read a bundle's graph and make it ready for an engine.

    Args:
        path: the .onnx file.
        sizes: axes that get one size.

    Raises:
        BundleError: it cannot be read.
    """
    try:
        model = ir.load(path)
    except Exception as cause:  # protobuf and onnx_ir raise what they like
        raise BundleError(f"{path.name}: not readable as ONNX ({cause}); export again") from cause
    passes.fix_axes(model, sizes)
    passes.inline_functions(model)
    places: set[tuple[str, int | None, int | None]] = set()
    inside = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            places.add((str(tensor.location), tensor.offset, tensor.length))
        elif tensor is not None:
            inside += tensor.nbytes
    nodes = sum(node.op_type != "Constant" for node in ir.traversal.RecursiveGraphIterator(model.graph))
    weights = inside + sum(length or 0 for _, _, length in places)
    return BuildGraph(ir.to_proto(model).SerializeToString(), weights, nodes)
