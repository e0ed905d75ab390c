"""Many requests over one pair: their passes are computed together, a round of all of them a cycle.

A cycle is: the draft for all that ask for it; prefill for those that just came; the verify pass of all. A
request joins and leaves between cycles. Requests that run have the first lanes, so that a pass computes
nothing else. Knows nothing of threads, queues or time limits: see `service`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from ..bundle.errors import DflashError, EngineError
from ..bundle.manifest import DraftInfo
from .accept import FinishReason
from .lane import Lane, Saved
from .loop import Ask, Job, Loop, Reply, Step, request_loop
from .pair import Pair
from .passes import DraftPass, TargetPass
from .policy import RowPolicy
from .stats import GenerationStats, Phase

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Who a request belongs to. Called between passes, by the thread that runs the cycle."""

    def step(self, step: Step) -> None:
        """The request has more tokens."""

    def end(self, finish: FinishReason, stats: GenerationStats, kept: Saved | None) -> None:
        """The request ended; `kept` is what its lane held, if it was to be kept."""

    def fail(self, error: Exception, stats: GenerationStats) -> None:
        """The request ended in an error."""


@dataclass(eq=False)
class Running:
    """A request that has a lane.

    Attributes:
        job: what runs.
        sink: who is told.
        keep: keep what the lane holds when the request ends.
        began: when it got its lane, `perf_counter`.
        asked: the pass that it waits for; None when it has ended.
        served: the cycle in which a part of its prompt was computed last.
    """

    job: Job
    sink: Sink
    keep: bool
    lane: Lane
    loop: Loop
    began: float = field(default_factory=perf_counter)
    asked: Ask | None = None
    served: int = 0

    def stats(self) -> GenerationStats:
        """Figures so far."""
        self.job.recorder.total_ms = (perf_counter() - self.began) * 1000.0
        return self.job.recorder.stats(self.lane.target.committed, self.lane.draft.committed)


class Scheduler:
    """Runs requests over a pair. One thread at a time."""

    def __init__(
        self,
        pair: Pair,
        info: DraftInfo,
        prefill_rows: int,
        cycle_prefill_rows: int,
        policy: RowPolicy,
        rows: int,
    ):
        """Begin with no request.

        Args:
            pair: the models and lanes.
            info: the draft's part of the manifest.
            prefill_rows: most rows of a prompt in one pass.
            cycle_prefill_rows: most rows of prompts in one cycle, while other requests wait for their round.
            policy: rows to verify where the output does not depend on it.
            rows: rows to verify where it does: a draw depends on what was proposed, so that a request with a
                temperature gives the same for the same seed only if its rows do not depend on others.
        """
        self._pair = pair
        self._info = info
        self._prefill_rows = prefill_rows
        self._cycle_prefill_rows = cycle_prefill_rows
        self._policy = policy
        self._rows = rows
        self._cycles = 0
        self.running: list[Running] = []  # by lane: they have the first ones

    @property
    def free_lanes(self) -> int:
        """How many requests may be admitted now."""
        return len(self._pair.lanes) - len(self.running)

    def admit(
        self, job: Job, sink: Sink, keep: bool = False, saved: Saved | None = None, tokens: int = 0
    ) -> Running:
        """Give a request a lane; its prompt is computed from the next cycle on.

        Args:
            job: the request.
            sink: who is told.
            keep: keep what the lane holds at the end, for the next request that begins with the same tokens.
            saved: what was kept of an earlier one.
            tokens: how many of the first tokens of `saved` are those of the prompt; not all of the prompt.
        """
        lane = self._pair.lanes[len(self.running)]
        lane.recorder = job.recorder
        fixed = self._rows

        def rows_now() -> int:
            return self._policy.rows(len(self.running)) if job.rows_are_free else fixed

        loop = request_loop(job, lane, self._info, self._prefill_rows, rows_now)
        running = Running(job, sink, keep, lane, loop, served=self._cycles)
        self.running.append(running)
        if saved is not None and tokens:
            # The draft takes the target's features in order: both begin at the same token.
            tokens = min(tokens, saved.target_length, saved.draft_length if job.speculative else tokens)
            try:
                self._pair.load(lane, saved, tokens)
            except EngineError as error:
                self._fail(running, error)
                return running
            job.recorder.cached_tokens = tokens
        self._send(running, None)
        return running

    def stop(self, running: Running, finish: FinishReason) -> None:
        """End a request now. Harmless if it has ended."""
        if running.asked is not None:
            running.loop.close()
            self._end(running, finish)

    def abandon(self, error: Exception) -> None:
        """End all requests in an error, and clean all lanes: nobody knows what they hold.

        Raises:
            Exception: they cannot be cleaned. Nothing else may be called then but `close`.
        """
        for running in self.running:
            if running.asked is not None:
                self._fail(running, error)
        self.running = []
        for lane in self._pair.lanes:
            self._pair.free(lane)

    def close(self) -> None:
        """Free the caches. Nothing runs any more."""
        self._pair.close()

    def cycle(self) -> None:
        """Run one round of every request. An error of an engine ends requests, not the cycle.

        Raises:
            Exception: a bug, or the lanes cannot be cleaned: then nothing else can run.
        """
        self._cycles += 1
        self._draft(self._asking(lambda asked: isinstance(asked, DraftPass)))
        self._prefill()
        self._verify()
        self.settle()

    # Stages.

    def _asking(self, wanted: Callable[[Ask], bool]) -> list[Running]:
        return [r for r in self.running if r.asked is not None and wanted(r.asked)]

    def _draft(self, some: Sequence[Running]) -> None:
        work = [(r.lane, r.asked) for r in some if isinstance(r.asked, DraftPass)]
        if not work:
            return
        began = perf_counter()
        replies = self._pair.run_draft(work)
        if any(asked.phase is Phase.DRAFT for _, asked in work):
            self._policy.drafted(len(work), (perf_counter() - began) * 1000.0)
        for running, reply in zip(some, replies, strict=True):
            self._send(running, reply)

    def _prefill(self) -> None:
        """Compute a part of each prompt that waits, who waits longest first, as many as may be."""
        waiting = sorted(self._asking(_is_prefill), key=lambda running: running.served)
        left = self._cycle_prefill_rows if self._asking(_is_verify) else None
        first = True
        while waiting and (first or left is None or _rows(waiting[0]) <= left):
            group = self._prefill_group(waiting, left)
            waiting = [running for running in waiting if running not in group]
            first = False
            for running in group:
                running.served = self._cycles
            if left is not None:
                left -= sum(map(_rows, group))
            self._target(group)
            # Their features are still where the target left them.
            self._draft([running for running in group if isinstance(running.asked, DraftPass)])

    def _prefill_group(self, waiting: Sequence[Running], left: int | None) -> list[Running]:
        """The first one, and those in neighbouring lanes whose parts are about as long and have room."""
        group = [waiting[0]]
        by_lane = {running.lane.index: running for running in waiting}
        for step in (1, -1):
            index = group[0].lane.index + step
            while index in by_lane and self._joins(group, by_lane[index], left):
                group.append(by_lane[index])
                index += step
        return group

    def _joins(self, group: Sequence[Running], running: Running, left: int | None) -> bool:
        rows = [_rows(one) for one in [*group, running]]
        room = min(one.lane.target.capacity - one.lane.target.committed for one in [*group, running])
        padded = max(rows) * len(rows)
        return (
            padded <= _MAX_PADDING * sum(rows) and max(rows) <= room and (left is None or sum(rows) <= left)
        )

    def _verify(self) -> None:
        some = self._asking(_is_verify)
        if not some:
            return
        rows = max(_rows(running) for running in some)
        asked = {running: _rows(running) - 1 for running in some}
        before = {running: sum(running.job.recorder.accepted) for running in some}
        began = perf_counter()
        if self._target(some):
            self._policy.verified(len(some), rows, (perf_counter() - began) * 1000.0)
            for running, proposed in asked.items():
                self._policy.accepted(proposed, sum(running.job.recorder.accepted) - before[running])

    def _target(self, some: Sequence[Running]) -> bool:
        """Run a pass of the target and send what it gave; whether it did not fail."""
        work = [(r.lane, r.asked) for r in some if isinstance(r.asked, TargetPass)]
        try:
            replies = self._pair.run_target(work)
        except EngineError as error:
            first, last = min(lane.index for lane, _ in work), max(lane.index for lane, _ in work)
            for running in self.running[first : last + 1]:
                if running.asked is not None:
                    self._fail(running, error)
            return False
        for running, reply in zip(some, replies, strict=True):
            self._send(running, reply)
        return True

    # Requests.

    def _send(self, running: Running, reply: Reply) -> None:
        """Go on with a request until it asks for a pass, or ends."""
        try:
            asked = running.loop.send(reply)
            while isinstance(asked, Step):
                running.sink.step(asked)
                if asked.finish is not None:
                    self._end(running, asked.finish)
                    return
                asked = running.loop.send(None)
            running.asked = asked
        except DflashError as error:
            self._fail(running, error)
        except Exception as error:  # a bug; others go on
            logger.exception("a request failed")
            self._fail(running, error)

    def _end(self, running: Running, finish: FinishReason) -> None:
        running.asked = None
        kept = None
        if running.keep:
            try:
                self._pair.catch_up(running.lane)
                kept = self._pair.save(running.lane)
            except (EngineError, MemoryError) as error:  # the answer is there all the same
                logger.warning("a session's cache is lost: %s", error)
        running.sink.end(finish, running.stats(), kept)

    def _fail(self, running: Running, error: Exception) -> None:
        running.asked = None
        running.loop.close()
        running.sink.fail(error, running.stats())

    def settle(self) -> None:
        """Free the lanes of requests that ended, and let those that run have the first ones."""
        ended = [running for running in self.running if running.asked is None]
        for running in ended:
            self._pair.free(running.lane)
        self.running = [running for running in self.running if running.asked is not None]
        holes = [r.lane for r in ended if r.lane.index < len(self.running)]
        for running in self.running:
            if running.lane.index >= len(self.running):
                self._pair.swap(running.lane, holes.pop())
        self.running.sort(key=lambda running: running.lane.index)


_MAX_PADDING = 1.5


def _is_prefill(asked: Ask) -> bool:
    return isinstance(asked, TargetPass) and asked.phase is Phase.PREFILL


def _is_verify(asked: Ask) -> bool:
    return isinstance(asked, TargetPass) and asked.phase is Phase.VERIFY


def _rows(running: Running) -> int:
    return len(running.asked.ids) if isinstance(running.asked, TargetPass) else 0
