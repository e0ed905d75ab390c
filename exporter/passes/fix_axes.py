"""Give symbolic axes one size: what an engine is built for, and TensorRT's cache update asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx_ir as ir

_NAME = re.compile(r"[A-Za-z_]\w*")


def fix_axes(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replace the named axes of the interface and of inner values by sizes.

    A shape of an inner value that is computed from a fixed axis (``2*batch``) is dropped: engines infer it
    again. Names that do not occur are passed over.

    Args:
        model: changed in place.
        sizes: size by axis name.
    """
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = _fixed(value.shape, sizes)
    outputs = set(map(id, graph.outputs))
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for value in node.outputs:
            if value.shape is None or id(value) in outputs:
                continue
            shape = _fixed(value.shape, sizes)
            value.shape = None if any(_depends(dim, sizes) for dim in shape) else shape


def _fixed(shape: ir.Shape, sizes: Mapping[str, int]) -> ir.Shape:
    return ir.Shape([dim if isinstance(dim, int) else sizes.get(str(dim), dim) for dim in shape])


def _depends(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> bool:
    return not isinstance(dim, int) and any(name in sizes for name in _NAME.findall(str(dim)))
