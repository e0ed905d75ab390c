"""Laws of one token: temperature and filters turn scores into one, and a number draws from it.

Shapes: V the vocabulary, n the tokens a law is about. Everything is float64, whatever the logits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating[Any]]

_GROUP = 64  # scores whose maximum stands for them in `top_indices`
_STEP = 1.0 / 16.0  # of the threshold in `_nucleus`: one pass over the tokens each


@dataclass(frozen=True, eq=False)
class Law:
    """Probabilities of tokens.

    Attributes:
        ids: [n], ascending; None stands for 0 to V - 1, all tokens. Others have probability 0.
        probs: [n], their sum is 1 up to rounding.
    """

    ids: Ids | None
    probs: Floats

    @classmethod
    def point(cls, token: int) -> Law:
        """The law that always gives this token."""
        return cls(np.array([token], np.int64), np.ones(1))

    def prob(self, token: int) -> float:
        """Probability of a token."""
        if self.ids is None:
            return float(self.probs[token])
        index = int(self.ids.searchsorted(token))
        return float(self.probs[index]) if index < len(self.ids) and self.ids[index] == token else 0.0

    def draw(self, u: float) -> int:
        """The token that the number u, in [0, 1), stands for: never one of probability 0."""
        return self._token(_index_of(self.probs, u))

    def draw_beyond(self, other: Law, u: float) -> int:
        """Draw from what this law has more than another: max(this - other, 0), scaled to 1.

        It is what is left of the target's law when a token drawn from the draft's was rejected. If nothing
        is left, the laws are equal up to rounding, a rejection was rounding too, and this law is drawn from.
        """
        rest = self.probs - other._at(self.ids, len(self.probs))
        np.maximum(rest, 0.0, out=rest)
        return self._token(_index_of(rest if rest.any() else self.probs, u))

    def _token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def _at(self, ids: Ids | None, count: int) -> Floats:
        """Probabilities of these tokens, [count]; ids as in `ids`."""
        if self.ids is None:
            return self.probs if ids is None else self.probs[ids]
        if ids is None:
            dense = np.zeros(count)
            dense[self.ids] = self.probs
            return dense
        index = np.minimum(self.ids.searchsorted(ids), len(self.ids) - 1)
        return np.where(self.ids[index] == ids, self.probs[index], 0.0)


def law_from_scores(
    scores: Scores, ids: Ids | None, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> Law:
    """The law of softmax(scores / temperature) behind the filters; see `Sampling` for their order and ties.

    Args:
        scores: [n], with a finite maximum; -inf excludes a token. Not changed.
        ids: [n], ascending, the tokens they belong to; None for all.
        temperature: 0 gives a point mass on the best token, the lowest id if several are.
        top_k: see `Sampling`, as the others.
        top_p: over the law that `top_k` leaves.
        min_p: relative to the best token.
    """
    if temperature == 0.0:
        best = int(scores.argmax())
        return Law.point(best if ids is None else int(ids[best]))
    if top_k is not None and top_k < len(scores):
        best_k = top_indices(scores, top_k)
        scores, ids = scores[best_k], _subset(ids, best_k)
    # Relative to the best, so that a tiny temperature overflows to -inf and never to inf.
    weights = np.subtract(scores, scores.max(), dtype=np.float64)
    with np.errstate(over="ignore"):
        weights /= temperature
    np.exp(weights, out=weights)
    if top_p < 1.0:
        kept = _nucleus(weights, top_p)
        weights, ids = weights[kept], _subset(ids, kept)
    if min_p > 0.0:
        kept = np.flatnonzero(weights >= min_p)  # the best one weighs 1
        weights, ids = weights[kept], _subset(ids, kept)
    weights /= weights.sum()
    return Law(ids, weights)


def top_indices(scores: Scores, k: int) -> Ids:
    """Indices of the k largest, ascending; of those that tie with the last one, the first. 1 <= k <= n."""
    near, groups = np.arange(len(scores)), len(scores) // _GROUP
    if groups > k:
        # k groups have a maximum of at least `bound`, so what is below it is not among the k largest.
        maxima = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        bound = np.partition(maxima, groups - k)[groups - k]
        near = np.flatnonzero(scores >= bound)
        scores = scores[near]
    return near[_first(scores, np.partition(scores, len(scores) - k)[len(scores) - k], k)]


def _first(values: Scores, last: np.floating[Any], count: int) -> Ids:
    """Indices, ascending, of the values above `last`, and of the first that equal it: `count` in all."""
    chosen = values > last
    chosen[np.flatnonzero(values == last)[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that sum to `top_p` of all; the largest is 1.

    Sorts only what lies above a threshold that is lowered until enough lies above it.
    """
    wanted, threshold = top_p * float(weights.sum()), 1.0
    while True:
        threshold *= _STEP
        above = np.flatnonzero(weights >= threshold)
        heavy = weights[above]
        if threshold == 0.0 or heavy.sum() >= wanted:
            break
    falling = np.sort(heavy)[::-1]
    reached = int(np.searchsorted(np.cumsum(falling), wanted))  # by rounding, it may be short of all of them
    count = min(reached + 1, len(falling))
    return above[_first(heavy, falling[count - 1], count)]


def _subset(ids: Ids | None, indices: Ids) -> Ids:
    return indices if ids is None else ids[indices]


def _index_of(weights: Floats, u: float) -> int:
    """Inverse of the cumulated weights; weights need not sum to 1, and one of 0 is never given."""
    sums = weights.cumsum()
    index = int(sums.searchsorted(u * sums[-1], side="right"))
    # u < 1 keeps the product below the sum, except among subnormal numbers: then it is the last weight.
    return index if index < len(sums) else int(sums.searchsorted(sums[-1]))
