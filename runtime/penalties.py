"""What is done to scores before the temperature: bias, penalties, and the ban of early stops.

It depends on the tokens before: those of the request, kept here, and in a block also the ones proposed or
accepted before the row, which the caller gives as `prefix`. The result for a row does not depend on which of
the two a token is in, to the last bit: plain and speculative decoding see the same scores.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from .law import Floats, Ids, Scores
from .sampling import Sampling


class Penalties:
    """The changes to one request's scores, and the counts they need."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        vocab_size: int,
        stop_ids: Collection[int],
        min_tokens: int,
    ) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        bias = sorted(sampling.logit_bias.items())
        self._bias_ids = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float64)
        self._repeats = sampling.repetition_penalty != 1.0
        self._slots: dict[int, int] = {}  # token: where `_ids` has it
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float64)  # times in the output
        if self._repeats:
            # A prompt may hold tokens behind the vocabulary, out of the padded embedding: none has a score.
            self._add([token for token in prompt_ids if token < vocab_size], 0.0)
        self._stop_ids = np.array(sorted(i for i in stop_ids if 0 <= i < vocab_size), np.int64)
        self._min_tokens = min_tokens

    def commit(self, ids: Sequence[int]) -> None:
        """Count tokens as part of the output."""
        if self._repeats or self._sampling.counts_output:
            self._add(ids, 1.0)

    def bans(self, position: int) -> bool:
        """Whether no stop token may be the output's token number `position` yet."""
        return position < self._min_tokens and len(self._stop_ids) > 0

    def apply(self, scores: Scores, ids: Ids | None, prefix: Sequence[int], position: int) -> Scores:
        """Give the changed scores, or the same array if there is nothing to change.

        Args:
            scores: [n], not changed.
            ids: [n], ascending, the tokens they belong to; None for all.
            prefix: tokens between the output so far and this row.
            position: index of the output token that the row is about.
        """
        if not (self._sampling.has_penalties or self.bans(position)):
            return scores
        changed: Floats = scores.astype(np.float64)
        at, found = _find(ids, self._bias_ids)
        changed[at] += self._bias[found]
        touched, counts = self._with(prefix)
        if self._repeats:
            at, _ = _find(ids, touched)
            old, penalty = changed[at], self._sampling.repetition_penalty
            changed[at] = np.where(old < 0.0, old * penalty, old / penalty)
        if self._sampling.counts_output:
            in_output = counts > 0.0
            at, found = _find(ids, touched[in_output])
            counts = counts[in_output][found]
            changed[at] -= self._sampling.presence_penalty + self._sampling.frequency_penalty * counts
        if self.bans(position):
            at, _ = _find(ids, self._stop_ids)
            changed[at] = -np.inf
        return changed

    def _with(self, prefix: Sequence[int]) -> tuple[Ids, Floats]:
        """Tokens seen and how often they are in the output, with those of a prefix added to it."""
        if not prefix or not (self._repeats or self._sampling.counts_output):
            return self._ids, self._counts
        new = list(dict.fromkeys(token for token in prefix if token not in self._slots))
        slots = {token: len(self._ids) + index for index, token in enumerate(new)}
        counts = np.concatenate((self._counts, np.zeros(len(new))))
        for token in prefix:
            counts[slots[token] if token in slots else self._slots[token]] += 1.0
        return np.concatenate((self._ids, np.array(new, np.int64))), counts

    def _add(self, ids: Sequence[int], count: float) -> None:
        outside = [token for token in ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(f"tokens {outside[:8]} are outside of the vocabulary of {self._vocab_size}")
        new = [token for token in dict.fromkeys(map(int, ids)) if token not in self._slots]
        self._slots.update({token: len(self._ids) + index for index, token in enumerate(new)})
        self._ids = np.concatenate((self._ids, np.array(new, np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(len(new))))
        for token in ids:
            self._counts[self._slots[int(token)]] += count


def _find(ids: Ids | None, tokens: Ids) -> tuple[Ids, Ids | slice]:
    """Where scores of these tokens are, and which of the tokens have one."""
    if ids is None:
        return tokens, slice(None)
    at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    found = np.flatnonzero(ids[at] == tokens)
    return at[found], found
