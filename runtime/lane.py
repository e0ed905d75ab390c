"""A request's place in the caches of a `pair`.

Shapes: N lanes of a pass, R rows, F feature size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .engine import DeviceTensor, HostArray, SavedLane
from .kv import CacheLength
from .stats import Recorder


@dataclass
class Features:
    """Features of a lane's rows from position `start` on, still to be taken into the draft's context.

    Attributes:
        tensor: [N, R, F] where the target computed it, or [rows, F] in host memory.
        lanes: the lanes of that pass; None in host memory.
    """

    start: int
    tensor: DeviceTensor | HostArray
    lanes: range | None


class Lane:
    """A request's place in the caches.

    Attributes:
        index: which lane.
        recorder: told the times of the passes that this lane takes part in.
        target: committed length of the target's cache.
        draft: committed context length of the draft: positions whose features it has taken in.
        draft_lost: why nothing can be built on that context any more; None if it is sound.
        seen: features of the last pass of the target, if this lane was computed in it. Then what stands for
            it there is its own, also where it took no part.
    """

    def __init__(self, index: int, capacity: int):
        self.index = index
        self.recorder: Recorder | None = None
        self.target = CacheLength(capacity)
        self.draft = CacheLength(capacity)
        self.features: list[Features] = []
        self.draft_lost: str | None = None
        self.seen: DeviceTensor | None = None

    def reset(self) -> None:
        """Forget everything; the memory is the `Pair`'s to clean."""
        self.recorder = None
        self.target = CacheLength(self.target.capacity)
        self.draft = CacheLength(self.draft.capacity)
        self.features = []
        self.draft_lost = None
        self.seen = None


@dataclass(frozen=True)
class Saved:
    """A lane's content, outside of it.

    Attributes:
        target: committed slots of the target's cache.
        draft: committed slots of the draft's.
        target_length: how many these are.
        draft_length: how many these are.
    """

    target: SavedLane = field(repr=False)
    draft: SavedLane = field(repr=False)
    target_length: int
    draft_length: int

    @property
    def bytes(self) -> int:
        """Host memory it takes."""
        return sum(part.nbytes for part in (*self.target, *self.draft))
