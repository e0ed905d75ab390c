"""What sessions leave in memory between their requests, within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .lane import Saved


@dataclass(frozen=True)
class Kept:
    """Tokens, and the keys and values of both models for the first of them."""

    ids: tuple[int, ...]
    saved: Saved

    def common(self, prompt: Sequence[int]) -> int:
        """How many first tokens of a prompt are here, its last one never: something has to be computed."""
        most = min(len(self.ids), self.saved.target_length, len(prompt) - 1)
        for index in range(most):
            if self.ids[index] != prompt[index]:
                return index
        return most


class KeptStore:
    """One `Kept` a key. What was not used for longest goes first when there is too much. Not thread-safe."""

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.evictions = 0
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: int, kept: Kept) -> None:
        """Keep something, in place of what the key had; what alone is too much is not kept."""
        self.drop(key)
        if kept.saved.bytes > self.budget_bytes:
            self.evictions += 1
            return
        self._kept[key] = kept
        self.bytes += kept.saved.bytes
        while self.bytes > self.budget_bytes:
            self.drop(next(iter(self._kept)))
            self.evictions += 1

    def get(self, key: int) -> Kept | None:
        """What the key has, if it is still there."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.bytes = 0

    def drop(self, key: int) -> None:
        """Forget a key's. Harmless if there is none."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= kept.saved.bytes
