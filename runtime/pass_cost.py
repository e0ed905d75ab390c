"""What a pass costs, by how many requests and rows it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.95  # of the pace, a new observation leaves this much
_MOST_PACE = 4.0  # one pass that took longer than this says that the machine was busy, not how busy


@dataclass
class PassCost:
    """A table that is measured once, times the pace at which passes go now.

    What is decided from it is a matter of ratios, so the table's shape is kept: from rounds that are all
    alike, nothing could be learnt about others. Between the measured sizes it is a line.

    Attributes:
        table: milliseconds by (requests, rows).
        pace: how much longer passes take than in the table.
    """

    table: dict[tuple[int, int], float] = field(default_factory=dict)
    pace: float = 1.0
    _known: dict[tuple[int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # of the table; asked for every round

    def measure(self, requests: int, rows: int, took_ms: float) -> None:
        """Put a pass into the table; of the same size the fastest counts."""
        size = requests, rows
        self.table[size] = min(took_ms, self.table.get(size, took_ms))
        self._known.clear()

    def observe(self, requests: int, rows: int, took_ms: float) -> None:
        """Learn from a pass how fast they go now. The first of all becomes the table."""
        tabled = self._tabled(requests, rows)
        if tabled is None:
            self.measure(requests, rows, took_ms)
        elif tabled > 0.0:
            self.pace += (1.0 - _MEMORY) * (min(took_ms / tabled, _MOST_PACE * self.pace) - self.pace)

    def estimate(self, requests: int, rows: int) -> float | None:
        """Expected time in milliseconds; None if nothing was seen."""
        tabled = self._tabled(requests, rows)
        return None if tabled is None else tabled * self.pace

    def _tabled(self, requests: int, rows: int) -> float | None:
        if not self.table:
            return None
        size = requests, rows
        if size not in self._known:
            counts = sorted({count for count, _ in self.table})
            curves = {c: [(r, ms) for (n, r), ms in sorted(self.table.items()) if n == c] for c in counts}
            self._known[size] = _line([(c, _line(curve, rows)) for c, curve in curves.items()], requests)
        return self._known[size]


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    """Through the neighbouring points, or the last two; never falling. One point alone: in proportion."""
    if len(points) == 1:
        ((only, y),) = points
        return y * max(x / only, 1.0)
    index = next((i for i in range(1, len(points) - 1) if x <= points[i][0]), len(points) - 1)
    (left, low), (right, high) = points[index - 1 : index + 1]
    return low + max(high - low, 0.0) / (right - left) * (x - left) if x > left else low
