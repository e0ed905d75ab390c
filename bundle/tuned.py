"""Graphs that ONNX Runtime runs faster on the CPU than the portable one: their names, and what was done.

A tuned graph is the portable one behind some passes (`exporter.tune`). It has the same interface and the same
weights, and gives the same bits. The portable graph stays: it is what TensorRT, GPUs and parity read.
"""

from __future__ import annotations

from collections.abc import Sequence

from .limits import EXACT_ROWS

ALONE = "target.cpu"
"""The target, for one request at a time."""

TOGETHER = "target.cpu-batch"
"""The target, for several requests in a pass."""

NAMES = (ALONE, TOGETHER)

MERGE_HEADS = "merge-heads"
"""Queries, keys and values are put into heads as one tensor, not as three."""

WHOLE_CACHE = "whole-cache"
"""Every slot of the caches is looked at, so they have to be as short as `slots`; no part is copied out."""

GROUP_HEADS = "group-heads"
"""The queries that share keys are the rows of one product. Then a lone row of a request is not alone."""

PASSES = (MERGE_HEADS, WHOLE_CACHE, GROUP_HEADS)


def least_rows(passes: Sequence[str], lanes: int, exact: bool = True) -> int:
    """Rows of each request that a pass needs so that the bits of a row do not depend on its company.

    Args:
        passes: what was done to the target's graph.
        lanes: requests in the pass.
        exact: False if bits may depend on it.
    """
    if not exact or (GROUP_HEADS in passes and lanes >= EXACT_ROWS):
        return 1
    return EXACT_ROWS
