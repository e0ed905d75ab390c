"""Requests of a service that wait and that run, and callers in line for a place among those that wait."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from ..bundle.errors import BusyError, DflashError
from .ticket import Entry


@dataclass(frozen=True, eq=False)
class _Place:
    """A caller's place in the line."""

    wake: Callable[[], object] | None = None  # for who does not wait for the condition


class RequestQueue:
    """Bounded. Callers get in in the order in which they came. Thread-safe.

    Lock order: an `Entry`'s lock may be held when this one is taken, never the reverse.

    Attributes:
        changed: the lock of everything here; notified when a request comes, ends, or the queue closes.
        waiting: requests without a lane, the oldest first.
        running: requests that have one.
        closed: what whoever comes now is told; None while it is open.
        entered: requests that were let in.
        refused: requests for which there was no room.
    """

    def __init__(self, max_running: int, max_waiting: int):
        self.changed = threading.Condition()
        self.waiting: deque[Entry] = deque()
        self.running: list[Entry] = []
        self.closed: DflashError | None = None
        self.entered = 0
        self.refused = 0
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._line: deque[_Place] = deque()

    # Who comes.

    def join(self, entry: Entry, wait_s: float) -> None:
        """Put a request behind those that wait.

        Args:
            entry: the request.
            wait_s: seconds to wait for room; not longer than the request's own time.

        Raises:
            BusyError: there is no room.
            DflashError: the queue is closed.
        """
        with self._in_line(entry, wait_s) as place:
            self._enter(entry, place)

    def join_in_time(self, entry: Entry) -> bool:
        """`join`, for who waits for room as long as the request has time.

        Returns:
            Whether it is in. If not, its time is over: it counts as let in, and the caller has to end it.

        Raises:
            DflashError: the queue is closed.
        """
        with self._in_line(entry, math.inf) as place:
            if self.closed is None and not self._may_enter(place):
                self.entered += 1
                return False
            self._enter(entry, place)
            return True

    @contextmanager
    def _in_line(self, entry: Entry, wait_s: float) -> Iterator[_Place]:
        """Wait for room, a closed queue, or the end of the time; holds the lock inside."""
        timeout = _timeout(entry, wait_s)
        place = _Place()
        with self.changed:
            self._line.append(place)
            try:
                self.changed.wait_for(lambda: self.closed is not None or self._may_enter(place), timeout)
                yield place
            finally:
                self._line.remove(place)
                self.notify()

    async def join_async(self, entry: Entry, wait_s: float) -> None:
        """`join`, for a coroutine: no thread waits."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        place = _Place(lambda: loop.call_soon_threadsafe(event.set))
        with self.changed:
            self._line.append(place)
        try:
            try:
                async with asyncio.timeout(_timeout(entry, wait_s)):
                    while True:
                        with self.changed:
                            if self.closed is not None or self._may_enter(place):
                                break
                        await event.wait()
                        event.clear()
            except TimeoutError:
                pass  # then there is no room, as `_enter` tells
            with self.changed:
                self._enter(entry, place)
        finally:
            with self.changed:
                self._line.remove(place)
                self.notify()

    def _may_enter(self, place: _Place) -> bool:
        free = self._max_running - len(self.running)
        return self._line[0] is place and len(self.waiting) < free + self._max_waiting

    def _enter(self, entry: Entry, place: _Place) -> None:
        if self.closed is not None:
            raise type(self.closed)(*self.closed.args)
        if not self._may_enter(place):
            self.refused += 1
            raise BusyError(
                f"service: {len(self.running)} requests run, {len(self.waiting)} wait and "
                f"{len(self._line) - 1} callers are in line, which is all it takes; try again later, "
                "wait with wait_s, or raise max_requests or max_waiting"
            )
        self.waiting.append(entry)
        self.entered += 1

    # Who goes.

    def leave(self, entry: Entry) -> bool:
        """Take a request out that waits; whether it did. Who is told so has to end it."""
        with self.changed:
            if entry not in self.waiting:
                return False
            self.waiting.remove(entry)
            self.notify()
            return True

    def leave_over(self, now: float) -> list[Entry]:
        """Take out all that wait and were cancelled or are late; the caller has to end them."""
        with self.changed:
            over = [entry for entry in self.waiting if entry.over(now) is not None]
            for entry in over:
                self.waiting.remove(entry)
            if over:
                self.notify()
            return over

    def take(self) -> Entry | None:
        """Let the oldest that waits run."""
        with self.changed:
            if not self.waiting:
                return None
            entry = self.waiting.popleft()
            self.running.append(entry)
            return entry

    def ended(self, entry: Entry) -> None:
        """Note that a request runs no more. Harmless if it never did."""
        with self.changed:
            if entry in self.running:
                self.running.remove(entry)
                self.notify()

    def wait_for_work(self) -> bool:
        """Wait until there is a request, or the queue closes; whether it is open."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed is not None or self.waiting or self.running)
            return self.closed is None

    def close(self, error: DflashError) -> None:
        """Let nobody in any more; a second error is ignored."""
        with self.changed:
            self.closed = self.closed or error
            self.notify()

    def notify(self) -> None:
        """Tell everyone who waits for a change. Holds the lock."""
        self.changed.notify_all()
        for place in self._line:
            if place.wake is not None:
                try:
                    place.wake()
                except RuntimeError:  # its event loop is closed: nobody waits there any more
                    continue


def _timeout(entry: Entry, wait_s: float) -> float | None:
    if entry.expires is not None:
        wait_s = min(wait_s, max(entry.expires - monotonic(), 0.0))
    return None if wait_s > threading.TIMEOUT_MAX / 2 else wait_s
