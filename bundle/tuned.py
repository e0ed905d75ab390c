"""Graphs that ONNX Runtime runs faster on the CPU than the portable one: their names, and what was done.

A tuned graph is the portable one behind some passes (`exporter.tune`). It has the same interface and the same
weights, and gives the same bits. The portable graph stays: it is what TensorRT, GPUs and parity read.
"""

from __future__ import annotations

from collections.abc import Sequence

from .limits import EXACT_ROWS

ALONE = "target.cpu"
TOGETHER = "target.cpu-batch"
DRAFT_ALONE = "draft.cpu"
PURPOSES = {
    ALONE: "the target on the CPU, for one request at a time",
    TOGETHER: "the target on the CPU, for several requests in a pass",
    DRAFT_ALONE: "the draft on the CPU",
}
NAMES = tuple(PURPOSES)

MERGE_HEADS = "merge-heads"
"""Queries, keys and values are put into heads as one tensor, not as three."""

WHOLE_CACHE = "whole-cache"
"""Every slot of the caches is looked at, so they have to be as short as `slots`; no part is copied out."""

OPEN_CONV = "open-conv"
"""The draft's convolutions are as few standard operators as they need, not the op's general body."""

OPEN_ATTENTION = "open-attention"
"""Attention is products and a softmax; in a pass of few rows, keys are read once for all their heads."""

GROUP_HEADS = "group-heads"
"""The queries that share keys are the rows of one product. Then a lone row of a request is not alone."""

PASSES = (OPEN_CONV, MERGE_HEADS, WHOLE_CACHE, OPEN_ATTENTION, GROUP_HEADS)


def portable(name: str) -> str:
    """Name of the graph that a tuned one was made from.

    Args:
        name: one of `NAMES`.
    """
    return name.partition(".")[0]


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
