"""`tuned_graphs`: the tuned graphs of a bundle that is being written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from ...bundle.manifest import GraphInfo
from ...bundle.tensors import CacheShape, DType
from ...bundle.tuned import (
    ALONE,
    DRAFT_ALONE,
    GROUP_HEADS,
    MERGE_HEADS,
    OPEN_ATTENTION,
    OPEN_CONV,
    TOGETHER,
    WHOLE_CACHE,
)
from ..save_graph import graph_to_file
from .group_heads import can_group, group_heads
from .merge_heads import merge_heads
from .open_attention import open_attention
from .open_conv import open_conv
from .whole_cache import whole_cache

_DTYPES = (DType.FLOAT32, DType.FLOAT16)  # what ONNX Runtime computes on the CPU


def tuned_graphs(
    directory: Path, target: GraphInfo, cache: CacheShape, draft: GraphInfo
) -> dict[str, GraphInfo]:
    """Write the tuned graphs beside the portable ones, over the same weights.

    Args:
        directory: the bundle.
        target: its target graph.
        cache: the target's caches.
        draft: its draft graph.

    Returns:
        By name what was written; nothing where no pass applies.
    """
    if cache.dtype not in _DTYPES:
        return {}
    made = {
        ALONE: _target(directory, target, cache, ALONE),
        TOGETHER: _target(directory, target, cache, TOGETHER),
        DRAFT_ALONE: _draft(directory, draft),
    }
    return {name: info for name, info in made.items() if info is not None}


def _target(directory: Path, portable: GraphInfo, cache: CacheShape, name: str) -> GraphInfo | None:
    model = ir.load(directory / portable.file)
    done = [MERGE_HEADS] if merge_heads(model) else []
    done += [WHOLE_CACHE] if whole_cache(model, cache) else []
    grouped = can_group(model)
    opened = open_attention(model)  # where heads can be grouped, it groups them
    done += [OPEN_ATTENTION] if opened else []
    if name == TOGETHER:
        if not (grouped if opened else group_heads(model)):
            return None
        done += [GROUP_HEADS]
    return _written(directory, model, portable, name, done)


def _draft(directory: Path, portable: GraphInfo) -> GraphInfo | None:
    model = ir.load(directory / portable.file)
    done = [OPEN_CONV] if open_conv(model) else []
    done += [MERGE_HEADS] if merge_heads(model) else []
    return _written(directory, model, portable, DRAFT_ALONE, done)


def _written(
    directory: Path, model: ir.Model, portable: GraphInfo, name: str, done: list[str]
) -> GraphInfo | None:
    if not done:
        return None
    common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.TopologicalSortPass()(model)
    for index, node in enumerate(model.graph):
        node.name = f"{node.op_type}.{index}"
    passes = (*portable.passes, *done)
    return replace(portable, file=graph_to_file(model, directory, name, passes), passes=passes)
