"""Bookkeeping of KV caches: how many slots are committed, and how many are looked at.

Rolling back is forgetting a number (see `bundle.tensors`), so this is all there is to cache management.
"""

from __future__ import annotations

from ..bundle.limits import KV_BUCKET, round_up


class CacheLength:
    """The committed length of one cache.

    Invariant: ``0 <= committed <= written <= capacity``, where slots below `committed` hold tokens that
    are part of the sequence for good, and slots up to `written` have been written by some pass.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.committed = 0
        self.written = 0

    def kv_for(self, rows: int) -> int:
        """Slots a pass of `rows` rows behind the committed ones has to look at, rounded up to a bucket."""
        if rows < 1 or self.committed + rows > self.capacity:
            raise ValueError(
                f"pass of {rows} rows at slot {self.committed}: does not fit into {self.capacity} slots"
            )
        return min(round_up(self.committed + rows, KV_BUCKET), self.capacity)

    def write(self, rows: int) -> None:
        """Note that a pass wrote `rows` rows behind the committed ones."""
        self.written = max(self.written, self.committed + rows)

    def commit(self, rows: int) -> None:
        """Keep the first `rows` of the rows written last; the others are forgotten."""
        if rows < 0 or self.committed + rows > self.written:
            raise ValueError(
                f"commit of {rows} rows at slot {self.committed}: only {self.written} are written"
            )
        self.committed += rows
        self.written = self.committed
