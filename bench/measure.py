"""Several ways of decoding over the same tasks, run in turn so that a slow minute hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..runtime.stats import GenerationStats

WARM_UP_TOKENS = 8
SETTLE_S = 0.05
"""Pause before a run where several engines are open, in which idle threads of the last one go to sleep."""

Progress = Callable[[int, int], None]
"""Is told how many runs of how many are done."""


@dataclass(frozen=True)
class Task:
    """One prompt.

    Attributes:
        ids: the prompt's token ids.
        new_tokens: tokens to produce, not more and not fewer; no token ends the answer.
    """

    ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Sample:
    """What one run gave. Times are wall clock in milliseconds.

    Attributes:
        ids: the tokens produced.
        first_tokens: how many of them came at once as the first.
        first_token_ms: until these were there.
        total_ms: until all were there.
        stats: what the runtime booked; None of another program.
    """

    ids: tuple[int, ...]
    first_tokens: int
    first_token_ms: float
    total_ms: float
    stats: GenerationStats | None = None

    @property
    def decode_ms(self) -> float:
        """All but the prompt; of our own ways all but the prompt's engine calls, which is a little more."""
        return self.total_ms - self.first_token_ms if self.stats is None else self.stats.decode_ms

    @property
    def decoded(self) -> int:
        """Tokens that `decode_ms` was spent on."""
        return len(self.ids) - self.first_tokens


class Way(Protocol):
    """One way of decoding that is timed."""

    @property
    def name(self) -> str:
        """Unique among the ways of a run."""

    def run(self, task: Task) -> Sample:
        """Decode greedily.

        Raises:
            DflashError: it cannot.
        """


Samples = dict[str, list[list[Sample]]]
"""Of each way, of each task, of each repeat."""


def interleave(
    ways: Sequence[Way],
    tasks: Sequence[Task],
    repeats: int,
    progress: Progress | None = None,
    settle_s: float = 0.0,
) -> Samples:
    """Warm up, then run every way on every task, task by task; who comes first changes from task to task.

    Args:
        ways: what is compared.
        tasks: what each decodes.
        repeats: runs of each way and task.
        progress: is told after each run.
        settle_s: pause before each run in seconds.
    """
    found: Samples = {way.name: [[] for _ in tasks] for way in ways}
    first = tasks[0]
    for way in ways:
        way.run(Task(first.ids, min(WARM_UP_TOKENS, first.new_tokens)))
    total, done = len(tasks) * repeats * len(ways), 0
    for repeat in range(repeats):
        for index, task in enumerate(tasks):
            turn = (index + repeat) % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                time.sleep(settle_s)
                found[way.name][index].append(way.run(task))
                done += 1
                if progress is not None:
                    progress(done, total)
    return found


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The run whose time is the median; the faster of the two in the middle."""
    return sorted(samples, key=lambda sample: sample.total_ms)[(len(samples) - 1) // 2]
