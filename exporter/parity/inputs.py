"""Inputs that mean something: real prompts, the target's own continuation, and rounds of uneven acceptance.

Shapes: S sequence, F features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .originals import Array, Question, TargetOriginal, TargetRun


@dataclass(frozen=True)
class Sample:
    """One prompt with the original target's greedy continuation and everything it computed on both.

    Attributes:
        name: for messages.
        prompt: token ids.
        ids: prompt and continuation, [S].
        run: the original's pass over `ids`.
        features: the tapped outputs, [S, F].
    """

    name: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    run: TargetRun
    features: Array

    @property
    def continuation(self) -> list[int]:
        """The greedy continuation; a stop id in it does not end it."""
        return list(self.ids[len(self.prompt) :])


@dataclass(frozen=True)
class Pass:
    """One pass of the target: rows at ``start..``, of which the first `committed` stay.

    The other rows are rejected proposals: they are computed, and overwritten by the next pass.
    """

    start: int
    rows: int
    committed: int

    @property
    def end(self) -> int:
        """Committed length behind it: the anchor's position."""
        return self.start + self.committed

    def ids(self, sample: Sample, vocab_size: int) -> Array:
        """The rows' tokens, [1, R]: the sample's, then wrong ones."""
        rows = np.array(sample.ids[self.start : self.start + self.rows], np.int64)
        rows[self.committed :] = (rows[self.committed :] + 1) % vocab_size
        return rows[None]

    def features(self, sample: Sample, padded: bool) -> Array:
        """The rows' features for the draft, [1, T, F]: the committed ones, then, if `padded`, wrong ones."""
        rows = sample.features[self.start : self.end]
        extra = self.rows - self.committed
        if padded and extra:
            rows = np.concatenate([rows, np.resize(-sample.features, (extra, rows.shape[1]))])
        return rows[None]

    def question(self, sample: Sample, block_size: int, shortest: int) -> Question | None:
        """What the draft is asked behind this pass; None at the end. Near it, the block gets shorter."""
        left = len(sample.ids) - self.end
        if left < 1:
            return None
        return Question(self.end, sample.ids[self.end], max(min(block_size, left), shortest))


def sample_from_prompt(
    name: str, prompt: Sequence[int], new_tokens: int, target: TargetOriginal, taps: Sequence[int]
) -> Sample:
    """Let the original target continue a prompt."""
    ids = (*prompt, *target.greedy(prompt, new_tokens))
    run = target.run(ids)
    return Sample(name, tuple(prompt), ids, run, run.features(taps))


def passes(prompt: int, total: int, verify_rows: int) -> Iterator[Pass]:
    """The prompt, then verify passes of which 1, all but one, all, 3, 1, ... rows stay.

    Args:
        prompt: rows of the prompt.
        total: rows of prompt and continuation.
        verify_rows: rows of a verify pass.
    """
    yield Pass(0, prompt, prompt)
    kept = itertools.cycle((1, verify_rows - 1, verify_rows, 3))
    start = prompt
    while start < total:
        rows = min(verify_rows, total - start)
        committed = max(1, min(next(kept), rows))
        yield Pass(start, rows, committed)
        start += committed
