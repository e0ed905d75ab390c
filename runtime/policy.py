"""How many rows the target verifies in a round.

More rows cost more and, if the draft is right, give more. The output is the same whatever is chosen, where
tokens are chosen greedily; with a temperature the law is the same, and the draws are others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..bundle.limits import EXACT_ROWS

PROBE_ROUNDS = 64
"""A policy that decodes plainly asks the draft again after so many rounds."""

_MEMORY = 0.95  # of what was learnt, a new observation leaves this much
_PRIOR_ACCEPTANCE = 0.7
_ACCEPTANCE_MEMORY = 0.98


class RowPolicy(Protocol):
    """Decides, and is told what happened."""

    def rows(self, requests: int) -> int:
        """Most rows to verify for each of so many requests in the round that begins; 1 decodes plainly."""

    def verified(self, requests: int, rows: int, took_ms: float) -> None:
        """A verify pass of so many requests and rows each took so long."""

    def drafted(self, requests: int, took_ms: float) -> None:
        """A draft pass for so many requests took so long."""

    def accepted(self, proposed: int, accepted: int) -> None:
        """Of so many proposals so many stood."""


@dataclass
class FixedRows:
    """Always the same."""

    count: int

    def rows(self, requests: int) -> int:
        """See `RowPolicy`."""
        del requests
        return self.count

    def verified(self, requests: int, rows: int, took_ms: float) -> None:
        """See `RowPolicy`."""

    def drafted(self, requests: int, took_ms: float) -> None:
        """See `RowPolicy`."""

    def accepted(self, proposed: int, accepted: int) -> None:
        """See `RowPolicy`."""


def few_counts(most: int) -> tuple[int, ...]:
    """Counts that are far enough apart to be worth a shape each."""
    return tuple(sorted({2, -(-most // 2), most} - {1}))


@dataclass
class LinearCost:
    """Time of a pass as ``base + slope * size``, by least squares over what was seen, the latest most."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, size: float, took_ms: float) -> None:
        """Learn from a pass."""
        self.weight = self.weight * _MEMORY + 1.0
        self.x = self.x * _MEMORY + size
        self.y = self.y * _MEMORY + took_ms
        self.xx = self.xx * _MEMORY + size * size
        self.xy = self.xy * _MEMORY + size * took_ms

    def estimate(self, size: float) -> float | None:
        """Expected time in milliseconds; None if nothing was seen."""
        if self.weight == 0.0:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        if variance <= 1e-9:
            return mean_y * max(size / mean_x, 1.0) if mean_x > 0 else mean_y
        slope = max((self.xy / self.weight - mean_x * mean_y) / variance, 0.0)
        return max(mean_y + slope * (size - mean_x), 0.1 * mean_y)


@dataclass
class AdaptiveRows:
    """What promises the most tokens a millisecond, from the costs and the acceptance seen so far.

    Attributes:
        most: the largest count, anchor included.
        exact: whether a lone row is computed as two.
        counts: what to choose from beside plain decoding; None is every count to `most`. An engine compiles
            and captures passes by their shapes, and likes few.
    """

    most: int
    exact: bool = True
    counts: tuple[int, ...] | None = None
    verify_cost: LinearCost = field(default_factory=LinearCost)
    draft_cost: LinearCost = field(default_factory=LinearCost)
    acceptance: list[float] = field(default_factory=list)
    plain_rounds: int = 0

    def __post_init__(self) -> None:
        """Begin with a guess that lets the draft show what it can."""
        self.acceptance = [_PRIOR_ACCEPTANCE] * (self.most - 1)

    def rows(self, requests: int) -> int:
        """See `RowPolicy`."""
        counts = tuple(range(2, self.most + 1)) if self.counts is None else self.counts
        chosen = max((1, *counts), key=lambda rows: self._rate(requests, rows))
        if chosen > 1:
            self.plain_rounds = 0
            return chosen
        self.plain_rounds += 1
        if self.plain_rounds < PROBE_ROUNDS:
            return 1
        self.plain_rounds = 0
        return counts[0]

    def _rate(self, requests: int, rows: int) -> float:
        """Tokens a millisecond that a round of so many rows promises."""
        tokens, stands = 1.0, 1.0
        for share in self.acceptance[: rows - 1]:
            stands *= share
            tokens += stands
        computed = max(rows, EXACT_ROWS) if self.exact else rows
        verify = self.verify_cost.estimate(requests * computed)
        draft = self.draft_cost.estimate(requests) if rows > 1 else 0.0
        if verify is None or draft is None:
            return float(rows)  # nothing is known yet: draft, and learn
        return tokens / (verify + draft)

    def verified(self, requests: int, rows: int, took_ms: float) -> None:
        """See `RowPolicy`."""
        computed = max(rows, EXACT_ROWS) if self.exact else rows
        self.verify_cost.observe(requests * computed, took_ms)

    def drafted(self, requests: int, took_ms: float) -> None:
        """See `RowPolicy`."""
        self.draft_cost.observe(requests, took_ms)

    def accepted(self, proposed: int, accepted: int) -> None:
        """See `RowPolicy`."""
        for place in range(min(proposed, accepted + 1)):
            seen = 1.0 if place < accepted else 0.0
            self.acceptance[place] += (1.0 - _ACCEPTANCE_MEMORY) * (seen - self.acceptance[place])
