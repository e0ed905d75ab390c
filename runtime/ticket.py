"""A request in a service, seen from the one who asked: chunks as they come, the whole, a way to stop it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..bundle.errors import DflashError, RequestError
from .accept import FinishReason
from .decoder import Answer, Chunk, Generation
from .lane import Saved
from .loop import Job, Step
from .scheduler import Running
from .stats import GenerationStats


class Entry:
    """A request's state, shared by its `Ticket` and the service's thread: `scheduler.Sink`.

    Attributes:
        job: what runs.
        session: key of what its lane holds at the end; None keeps nothing.
        expires: when its time is over, `monotonic`; None if it has no limit.
        submitted: when it was submitted, `perf_counter`.
        running: where it runs; None before and behind that. The service's thread alone touches it.
    """

    def __init__(
        self,
        job: Job,
        session: int | None,
        expires: float | None,
        on_end: Callable[[Entry, GenerationStats, Saved | None], None],
    ):
        self.job = job
        self.session = session
        self.expires = expires
        self.submitted = perf_counter()
        self.running: Running | None = None
        self.cancelled = False  # a mark for the service's thread, which ends it before the next round
        self.result: Generation | None = None
        self.error: Exception | None = None
        self.changed = threading.Condition()
        self._on_end = on_end
        self._steps: list[Step] = []
        self._unread: deque[Chunk] = deque()
        self._read = 0
        self._watched = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def over(self, now: float) -> FinishReason | None:
        """Why it is to end before its time, if it is. `now` is `monotonic`."""
        if self.cancelled:
            return FinishReason.CANCELLED
        return FinishReason.DEADLINE if self.expires is not None and now >= self.expires else None

    # The service's thread.

    def step(self, step: Step) -> None:
        """See `scheduler.Sink`."""
        with self.changed:
            if not self._steps:
                self.job.recorder.first_token_ms = (perf_counter() - self.submitted) * 1000.0
            self._steps.append(step)
            self._unread.append(Chunk(step.ids, step.text, step.logprobs))
            self._tell()

    def end(self, finish: FinishReason, stats: GenerationStats, kept: Saved | None) -> None:
        """See `scheduler.Sink`."""
        with self.changed:
            if finish is FinishReason.CANCELLED and self._watched:
                # Nobody reads what was not read by now: it does not exist.
                del self._steps[self._read :]
                self._unread.clear()
            answer = Answer()
            for step in self._steps:
                answer.add(step)
            delivered = sum(len(step.ids) for step in self._steps)
            self.result = answer.generation(finish, replace(stats, new_tokens=delivered))
            self._end(stats, kept)

    def fail(self, error: Exception, stats: GenerationStats) -> None:
        """See `scheduler.Sink`."""
        with self.changed:
            self.error = error
            self._end(stats, None)

    def _end(self, stats: GenerationStats, kept: Saved | None) -> None:
        self.running = None
        try:
            self._on_end(self, stats, kept)
        finally:
            self._tell()

    def _tell(self) -> None:
        self.changed.notify_all()
        for loop, event in self._waiters:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # its event loop is closed: nobody waits there any more
                continue
        self._waiters.clear()

    # Readers.

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""
        return self.result is not None or self.error is not None

    def poll(self) -> Chunk | None:
        """The next chunk, if there is one; raises what the request ended in. Holds the lock."""
        self._watched = True
        if self._unread:
            self._read += 1
            return self._unread.popleft()
        if self.error is not None:
            raise self.own_error()
        return None

    def own_error(self) -> Exception:
        """What it ended in, for one raise: others ended in the same, and tracebacks hold on to memory."""
        error = self.error
        assert error is not None
        return type(error)(*error.args) if isinstance(error, DflashError) else error

    def wait_in(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """An event that is set in `loop` when something changes. Holds the lock."""
        event = asyncio.Event()
        self._waiters.append((loop, event))
        return event


class Ticket(Iterator[Chunk]):
    """A submitted request. Iterate over it, or over it in asyncio, or wait for the whole.

    Dropping it or leaving its context cancels the request. One reader at a time.
    """

    def __init__(self, entry: Entry, cancel: Callable[[Entry], None]):
        self._entry = entry
        self._cancel = cancel

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._entry.ended

    def cancel(self) -> None:
        """Stop it within a round. What was not read by now does not exist. Harmless at any time."""
        self._cancel(self._entry)

    def __next__(self) -> Chunk:
        entry = self._entry
        with entry.changed:
            while True:
                chunk = entry.poll()
                if chunk is not None:
                    return chunk
                if entry.ended:
                    raise StopIteration
                entry.changed.wait()

    def result(self, timeout_s: float | None = None) -> Generation:
        """Wait for the end; give the whole answer.

        Raises:
            TimeoutError: it has not ended by then. It goes on.
            EngineError: the engine failed.
        """
        entry = self._entry
        with entry.changed:
            if not entry.changed.wait_for(
                lambda: entry.ended, None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX / 2)
            ):
                raise TimeoutError(f"the request has not ended within {timeout_s} s")
            return self._ended()

    def _ended(self) -> Generation:
        if self._entry.error is not None:
            raise self._entry.own_error()
        if self._entry.result is None:
            raise RequestError("result: the request has not ended")
        return self._entry.result

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come. Leaving the loop early, or a cancelled task, cancels the request."""
        entry = self._entry
        try:
            while True:
                with entry.changed:
                    chunk = entry.poll()
                    if chunk is None:
                        if entry.ended:
                            return
                        event = entry.wait_in(asyncio.get_running_loop())
                if chunk is not None:
                    yield chunk
                else:
                    await event.wait()
        finally:
            entry.cancelled = True  # a mark, as in `__del__`: a generator may be closed anywhere, too

    async def wait(self) -> Generation:
        """Wait for the end without blocking the event loop; a cancelled task cancels the request.

        Raises:
            EngineError: the engine failed.
        """
        entry = self._entry
        try:
            while True:
                with entry.changed:
                    if entry.ended:
                        return self._ended()
                    event = entry.wait_in(asyncio.get_running_loop())
                await event.wait()
        finally:
            entry.cancelled = True

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: Any) -> None:
        self.cancel()

    def __del__(self) -> None:
        # May run anywhere, also where a lock is held: it only leaves a mark for the service's thread.
        self._entry.cancelled = True
