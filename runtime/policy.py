"""How many rows the target verifies in a round.

More rows cost more and, if the draft is right, give more. The output is the same whatever is chosen, where
tokens are chosen greedily; with a temperature the law is the same, and the draws are others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..bundle.tuned import least_rows
from .pass_cost import PassCost

PROBE_ROUNDS = 64
"""A policy that decodes plainly asks the draft again after so many rounds, then after twice as many, ..."""

MOST_PROBE_ROUNDS = 256
"""... and never less often than this."""

_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0  # of so many observations
_MOST_WEIGHT = 40.0  # what was seen longer ago than about this counts less and less


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
class AdaptiveRows:
    """What promises the most tokens a millisecond, from the costs and the acceptance seen so far.

    Attributes:
        most: the largest count, anchor included.
        least: given how many requests are computed together, the least rows of each that are: see
            `bundle.tuned.least_rows`.
        verify_cost: of verify passes, by requests and rows.
        draft_cost: of draft passes, by requests.
        acceptance: for each place of a block the share of proposals that stood, if those before it did.
        weights: how many observations each of them stands for.
        patience: plain rounds after which the draft is asked again.
        plain_rounds: how many requests in a row were told to decode plainly.
        counts: what to choose from beside plain decoding; None is every count to `most`. An engine compiles
            and captures passes by their shapes, and likes few.
    """

    most: int
    least: Callable[[int], int] = field(default=partial(least_rows, ()))
    counts: tuple[int, ...] | None = None
    verify_cost: PassCost = field(default_factory=PassCost)
    draft_cost: PassCost = field(default_factory=PassCost)
    acceptance: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    plain_rounds: int = 0
    patience: int = PROBE_ROUNDS

    def __post_init__(self) -> None:
        """Begin with a guess that lets the draft show what it can."""
        self.acceptance = [_PRIOR_ACCEPTANCE] * (self.most - 1)
        self.weights = [_PRIOR_WEIGHT] * (self.most - 1)

    def rows(self, requests: int) -> int:
        """See `RowPolicy`."""
        counts = tuple(range(2, self.most + 1)) if self.counts is None else self.counts
        chosen = max((1, *counts), key=lambda rows: self._rate(requests, rows))
        if chosen > 1:
            self.plain_rounds, self.patience = 0, PROBE_ROUNDS
            return chosen
        self.plain_rounds += 1
        if self.plain_rounds < self.patience * requests:  # each of them asks once a round
            return 1
        self.plain_rounds = 0
        self.patience = min(2 * self.patience, MOST_PROBE_ROUNDS)
        return counts[0]

    def _rate(self, requests: int, rows: int) -> float:
        """Tokens a millisecond that a round of so many rows promises."""
        tokens, stands = 1.0, 1.0
        for share in self.acceptance[: rows - 1]:
            stands *= share
            tokens += stands
        verify = self.verify_cost.estimate(requests, max(rows, self.least(requests)))
        draft = self.draft_cost.estimate(requests, 1) if rows > 1 else 0.0
        if verify is None or draft is None:
            return float(rows)  # nothing is known yet: draft, and learn
        return tokens / (verify + draft)

    def verified(self, requests: int, rows: int, took_ms: float) -> None:
        """See `RowPolicy`."""
        self.verify_cost.observe(requests, max(rows, self.least(requests)), took_ms)

    def drafted(self, requests: int, took_ms: float) -> None:
        """See `RowPolicy`."""
        self.draft_cost.observe(requests, 1, took_ms)

    def accepted(self, proposed: int, accepted: int) -> None:
        """See `RowPolicy`."""
        for place in range(min(proposed, accepted + 1)):
            seen = 1.0 if place < accepted else 0.0
            self.weights[place] = min(self.weights[place] + 1.0, _MOST_WEIGHT)
            self.acceptance[place] += (seen - self.acceptance[place]) / self.weights[place]
