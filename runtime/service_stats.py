"""Figures of a service since its start."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .decoder import Generation
from .stats import GenerationStats


@dataclass(frozen=True)
class ServiceStats:
    """Counts since the start, but for what is said to be of now. Times are milliseconds.

    Attributes:
        submitted: requests taken into the queue.
        refused: requests refused because it was full.
        finished: requests that ended, by finish reason.
        failed: requests that ended in an error.
        running: requests that run now.
        waiting: requests that wait now.
        prompt_tokens: of all ended requests, as the sums and counts below.
        cached_tokens: of these, found in a session's cache.
        new_tokens: tokens produced, those that a cancelled request's reader never took included.
        rounds: verify passes, counted for each request in them.
        proposed: proposals verified, for each place of a block.
        accepted: proposals that stood, for each place of a block.
        draft_failures: requests that went on without their draft.
        last_draft_failure: why the last of them did.
        queue_ms: time in the queue, summed.
        first_token_ms: time to the first token, summed over requests that had one.
        prefill_ms: summed; as `draft_ms` and `verify_ms` a pass counts whole for every request in it.
        draft_ms: see `prefill_ms`.
        verify_ms: see `prefill_ms`.
        with_tokens: requests that had a first token.
        cycles: rounds of the service.
        cycle_requests: requests in them, summed: over `cycles` it is the mean batch.
        busy_ms: time in them.
        lanes_bytes: memory of the running requests' caches, used or not; the most of caches that grow.
        kept_bytes: memory that sessions between their requests take now.
        kept_sessions: how many these are.
        evictions: sessions whose cache was given up for want of room.
    """

    submitted: int
    refused: int
    finished: Mapping[str, int]
    failed: int
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    rounds: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_failures: int
    last_draft_failure: str | None
    queue_ms: float
    first_token_ms: float
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    with_tokens: int
    cycles: int
    cycle_requests: int
    busy_ms: float
    lanes_bytes: int
    kept_bytes: int
    kept_sessions: int
    evictions: int

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round; 0 if there was none. Each request's first token comes from its prefill."""
        return (self.new_tokens - self.with_tokens) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """For each place of a block, the share of its verified proposals that stood."""
        return tuple(a / p for a, p in zip(self.accepted, self.proposed, strict=True))


class ServiceBooks:
    """Adds up what requests report. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._ms: dict[str, float] = dict.fromkeys(_TIMES, 0.0)
        self._proposed: list[int] = []
        self._accepted: list[int] = []
        self._last_draft_failure: str | None = None

    def cycle(self, requests: int, took_ms: float) -> None:
        """A round of so many requests took so long."""
        with self._lock:
            self._sums["cycles"] += 1
            self._sums["cycle_requests"] += requests
            self._ms["busy_ms"] += took_ms

    def ended(self, result: Generation | None, stats: GenerationStats) -> None:
        """A request ended; without a result, in an error."""
        with self._lock:
            if result is None:
                self._sums["failed"] += 1
            else:
                self._finished[result.finish_reason.value] += 1
            for name in _COUNTS:
                self._sums[name] += getattr(stats, name)
            for name in _REQUEST_TIMES:
                self._ms[name] += getattr(stats, name)
            self._sums["with_tokens"] += stats.new_tokens > 0
            missing = [0] * (len(stats.proposed) - len(self._proposed))
            self._proposed += missing
            self._accepted += missing
            for place, (proposed, accepted) in enumerate(zip(stats.proposed, stats.accepted, strict=True)):
                self._proposed[place] += proposed
                self._accepted[place] += accepted
            self._last_draft_failure = stats.draft_failure or self._last_draft_failure

    def stats(
        self,
        *,
        submitted: int,
        refused: int,
        running: int,
        waiting: int,
        lanes_bytes: int,
        kept_bytes: int,
        kept_sessions: int,
        evictions: int,
    ) -> ServiceStats:
        """All figures, with those of now."""
        with self._lock:
            ms = self._ms
            return ServiceStats(
                finished=dict(self._finished),
                proposed=tuple(self._proposed),
                accepted=tuple(self._accepted),
                last_draft_failure=self._last_draft_failure,
                submitted=submitted,
                refused=refused,
                running=running,
                waiting=waiting,
                lanes_bytes=lanes_bytes,
                kept_bytes=kept_bytes,
                kept_sessions=kept_sessions,
                evictions=evictions,
                queue_ms=ms["queue_ms"],
                first_token_ms=ms["first_token_ms"],
                prefill_ms=ms["prefill_ms"],
                draft_ms=ms["draft_ms"],
                verify_ms=ms["verify_ms"],
                busy_ms=ms["busy_ms"],
                **{name: self._sums[name] for name in (*_COUNTS, *_OWN_COUNTS)},
            )


_COUNTS = ("prompt_tokens", "cached_tokens", "new_tokens", "rounds", "draft_failures")
_OWN_COUNTS = ("failed", "with_tokens", "cycles", "cycle_requests")
_REQUEST_TIMES = ("queue_ms", "first_token_ms", "prefill_ms", "draft_ms", "verify_ms")
_TIMES = (*_REQUEST_TIMES, "busy_ms")
