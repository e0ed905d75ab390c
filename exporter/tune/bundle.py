"""`tuned_graphs`: the tuned graphs of a bundle that is being written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from ...bundle.manifest import GraphInfo
from ...bundle.tensors import CacheShape, DType
from ...bundle.tuned import ALONE, GROUP_HEADS, MERGE_HEADS, TOGETHER, WHOLE_CACHE
from .group_heads import group_heads
from .merge_heads import merge_heads
from .whole_cache import whole_cache

_DTYPES = (DType.FLOAT32, DType.FLOAT16)  # what ONNX Runtime computes on the CPU


def tuned_graphs(directory: Path, target: GraphInfo, cache: CacheShape) -> dict[str, GraphInfo]:
    """Write the tuned graphs beside the target's portable one, over the same weights.

    Args:
        directory: the bundle.
        target: its target graph.
        cache: the target's caches.

    Returns:
        By name what was written; nothing where no pass applies.
    """
    if cache.dtype not in _DTYPES:
        return {}
    return {
        name: info
        for name, group in ((ALONE, False), (TOGETHER, True))
        if (info := _tuned(directory, target, cache, name, group)) is not None
    }


def _tuned(directory: Path, target: GraphInfo, cache: CacheShape, name: str, group: bool) -> GraphInfo | None:
    model = ir.load(directory / target.file)
    done = [MERGE_HEADS] if merge_heads(model) else []
    done += [WHOLE_CACHE] if whole_cache(model, cache) else []
    grouped = group and group_heads(model)
    done += [GROUP_HEADS] if grouped else []
    if not done or group != grouped:
        return None
    common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.TopologicalSortPass()(model)
    for index, node in enumerate(model.graph):
        node.name = f"{node.op_type}.{index}"
    file = f"{name}.onnx"
    ir.save(model, directory / file)
    return replace(target, file=file, passes=(*target.passes, *done))
