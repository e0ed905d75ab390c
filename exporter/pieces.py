"""Tensors in pieces of some rows, so that the memory of an export does not depend on how large they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

# Small enough that a few copies in other dtypes are nothing, large enough that opening the file is nothing.
PIECE_BYTES = 1 << 25
_WIDEST_BYTES = 4  # of an element: what a piece is read as, or converted to


def row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cut a tensor's rows into ranges of at most `PIECE_BYTES`, or of one row."""
    if not shape:
        raise ValueError("a number has no rows")
    step = max(1, PIECE_BYTES // (_WIDEST_BYTES * max(1, math.prod(shape[1:]))))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    """Read a stored tensor piece by piece, in the order of its rows."""
    shape = checkpoint.tensors[name].shape
    if not shape:
        yield checkpoint.read(name)
        return
    for start, stop in row_ranges(shape):
        yield checkpoint.read_rows(name, start, stop)
