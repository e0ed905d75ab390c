"""The graph an engine is built from: the bundle's own, with axes fixed and functions inlined.

Its weights stay where they are: initialisers name the bundle's weight file, and the parser is told the
path of the graph that they stand beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ...bundle.engines import PLUGIN
from ...bundle.errors import BundleError
from ...plugins.grouped_dynamic_conv import DOMAIN, OP_TYPE
from ...plugins.tensorrt_plugin import NODE_ATTRIBUTES
from .. import passes
from .options import Conv


@dataclass(frozen=True)
class BuildGraph:
    """What the parser reads.

    Attributes:
        data: the serialised model, without weights.
        weights_bytes: weights that it names, each counted once.
        nodes: nodes that compute something.
        plugin: name and version of the plugin that it uses, as in `EngineInfo.plugin`.
    """

    data: bytes
    weights_bytes: int
    nodes: int
    plugin: str | None = None


def graph_from_bundle(path: Path, sizes: Mapping[str, int], conv: Conv = Conv.FUNCTION) -> BuildGraph:
    """Read a bundle's graph and make it ready for an engine.

    Args:
        path: the .onnx file.
        sizes: axes that get one size.
        conv: what the convolutions become.

    Raises:
        BundleError: it cannot be read.
    """
    try:
        model = ir.load(path)
    except Exception as cause:  # protobuf and onnx_ir raise what they like
        raise BundleError(f"{path.name}: not readable as ONNX ({cause}); export again") from cause
    passes.fix_axes(model, sizes)
    if conv is Conv.PLUGIN:
        # The parser takes a body before it takes a plugin.
        for identifier in [key for key in model.functions if key[:2] == (DOMAIN, OP_TYPE)]:
            del model.functions[identifier]
    passes.inline_functions(model)
    plugin = _call_plugin(model)
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
    data = ir.to_proto(model).SerializeToString()
    return BuildGraph(data, weights, nodes, PLUGIN if plugin else None)


def _call_plugin(model: ir.Model) -> bool:
    """Have the parser look for a plugin where ``dflash::GroupedDynamicConv`` is left; gives whether it is."""
    nodes = [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)
    ]
    for node in nodes:
        for name, value in NODE_ATTRIBUTES.items():
            node.attributes[name] = ir.convenience.convert_attribute(name, value)
    return bool(nodes)
