"""A bundle behind a queue: requests come and go from any thread, and run together over one set of weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Unpack

from ..bundle.errors import DflashError, EngineError, RequestError, field_error
from .accept import FinishReason
from .checks import check_number
from .decoder import Decoder, Generation
from .kept import Kept, KeptStore
from .lane import Saved
from .options import check_options
from .request import MAX_NEW_TOKENS, Prompt, Request, RequestOptions, job_from_request, request_from_call
from .request_queue import RequestQueue
from .service_settings import ServiceSettings as ServiceSettings  # callers look for it here
from .service_settings import scheduler_from_settings
from .service_stats import ServiceBooks, ServiceStats
from .session import Session
from .stats import GenerationStats
from .ticket import Entry, Ticket

logger = logging.getLogger(__name__)

_OPEN_OPTIONS = ("provider", "threads", "exact", "max_length", "verify", "backend")
_CLOSED = "service: is closed; open the bundle again"


class Service:
    """Runs requests of a bundle together. Every method may be called from any thread.

    Close it, or use it as a context manager: its thread keeps it alive.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: ServiceSettings | None = None,
        own: bool = False,
        start: bool = True,
    ):
        """Start a service over the engines of a decoder.

        Args:
            decoder: open. It may be used beside the service, but not by a thread that minds waiting.
            settings: None takes the defaults.
            own: close the decoder with the service.
            start: begin at once, in a thread. Without it nothing runs but what a test does by `_round`.

        Raises:
            RequestError: a setting is out of range, or the caches do not fit into the budget.
            EngineError: there is no memory for the caches.
        """
        settings = _checked(settings)
        self.decoder = (
            decoder if settings.max_length is None else decoder.with_settings(max_length=settings.max_length)
        )
        self.settings = settings
        self.max_length = self.decoder.settings.max_length
        self._own = own
        self._scheduler, self._lanes_bytes, kept_bytes = scheduler_from_settings(self.decoder, settings)
        self._queue = RequestQueue(settings.max_requests, settings.max_waiting)
        self._books = ServiceBooks()
        self._kept = KeptStore(kept_bytes)
        self._sessions: set[int] = set()
        self._session_keys = itertools.count()
        self._sessions_lock = threading.Lock()  # of these three; no other lock is taken inside
        self._dropped: deque[int] = deque()  # sessions that were dropped and not closed
        self._broken: DflashError | None = None
        self._finished = threading.Lock()
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._work, name="dflash-service", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, bundle: str | Path, settings: ServiceSettings | None = None, **options: Any) -> Service:
        """Open a bundle and start a service over it.

        Args:
            bundle: the directory.
            settings: None takes the defaults.
            options: of `Decoder.open`: provider, threads, exact, max_length, verify, backend.

        Raises:
            BundleError, ProviderError, RequestError, EngineError: see `Decoder.open` and the constructor.
        """
        settings = _checked(settings)
        if "verify_rows" in options:
            raise RequestError("verify_rows: a service has its own; set ServiceSettings.verify_rows")
        check_options(Service.open, options, _OPEN_OPTIONS)
        decoder = Decoder.open(bundle, together=settings.max_requests > 1, **options)
        try:
            return cls(decoder, settings, own=True)
        except BaseException:
            decoder.close()
            raise

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        wait_s: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Ticket:
        """Put a request into the queue.

        Args:
            prompt: see `Request.prompt`.
            max_new_tokens: see `Request`.
            deadline_s: seconds from now after which it ends where it is, with `FinishReason.DEADLINE`. The
                clock is read before each round, and a round that has begun is finished: what it gave is
                part of the answer, and a request that was late before its first one has no tokens.
            wait_s: seconds to wait for room in the queue, in the order in which callers came; no longer than
                `deadline_s`.
            options: the other fields of `Request`.

        Raises:
            RequestError: it cannot be served, or the service is closed.
            BusyError: there is no room in the queue, until `wait_s` or `deadline_s` was over.
            TypeError: an option has no such name.
            EngineError: the service has stopped, because its engines cannot be used any more.
        """
        request = request_from_call(Service.submit, prompt, max_new_tokens, options)
        return self._submit(request, deadline_s, wait_s)

    def _submit(self, request: Request, deadline_s: float | None, wait_s: float) -> Ticket:
        entry = self._entry(request, None, deadline_s, wait_s)
        self._queue.join(entry, wait_s)
        return Ticket(entry, self._cancel)

    async def submit_async(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        wait_s: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Ticket:
        """`submit`, without blocking the event loop while the prompt is tokenised or the queue is full."""
        request = request_from_call(Service.submit_async, prompt, max_new_tokens, options)
        entry = await asyncio.to_thread(self._entry, request, None, deadline_s, wait_s)
        await self._queue.join_async(entry, wait_s)
        return Ticket(entry, self._cancel)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Submit and wait for the whole answer; waits as long as it takes for room in the queue.

        If `deadline_s` is over before there is room, the answer has no tokens, and `FinishReason.DEADLINE`.

        Raises:
            RequestError, TypeError, EngineError: see `submit`, or the request failed.
        """
        request = request_from_call(Service.generate, prompt, max_new_tokens, options)
        entry = self._entry(request, None, deadline_s, math.inf)
        if not self._queue.join_in_time(entry):
            self._never_ran(entry, FinishReason.DEADLINE)
        return Ticket(entry, self._cancel).result()

    def session(self) -> Session:
        """Begin a conversation whose requests reuse what they have in common with the one before."""
        self._forget_dropped()
        with self._sessions_lock:
            key = next(self._session_keys)
            self._sessions.add(key)
        return Session(self, key)

    # What `Session` and `Ticket` need.

    def _entry(self, request: Request, session: int | None, deadline_s: float | None, wait_s: float) -> Entry:
        """Make a request ready for the queue."""
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, "> 0", lambda x: x > 0.0)
        if wait_s != math.inf:
            check_number("wait_s", wait_s, ">= 0", lambda x: x >= 0.0)
        expires = None if deadline_s is None else monotonic() + deadline_s  # reading the prompt counts
        decoder = self.decoder
        job = job_from_request(request, decoder.manifest, decoder.codec, self.max_length)
        return Entry(job, session, expires, self._ended)

    def _cancel(self, entry: Entry) -> None:
        entry.cancelled = True  # if it runs, the thread sees the mark before the next round
        if self._queue.leave(entry):
            self._never_ran(entry)

    def _wait_for_end(self, entry: Entry) -> None:
        """Wait until a cancelled request has ended: a round at most."""
        if self._thread is None:
            self._round()
            return
        with entry.changed:
            entry.changed.wait_for(lambda: entry.ended)

    def _forget(self, key: int) -> None:
        """Free what a session has kept."""
        with self._sessions_lock:
            self._sessions.discard(key)
            self._kept.drop(key)

    def _forget_dropped(self) -> None:
        with contextlib.suppress(IndexError):  # several threads may do this
            while True:
                self._forget(self._dropped.popleft())

    # The thread.

    def _work(self) -> None:
        try:
            while self._queue.wait_for_work():
                self._round()
        finally:
            self._queue.close(RequestError(_CLOSED))
            self._finish()

    def _round(self) -> None:
        """Let requests leave and join, and run one round of all. Errors end requests, not the thread."""
        try:
            self._turn()
        except Exception as error:  # a bug: nobody knows what the lanes hold
            logger.exception("a round failed, all requests in it end")
            try:
                self._scheduler.abandon(error)
                for entry in [*self._queue.running]:  # was about to get a lane
                    entry.fail(error, entry.job.recorder.stats(0, 0))
            except Exception as worse:
                logger.exception("the service stops")
                self._broken = EngineError(
                    f"service: has stopped, its engines failed ({worse}); open another"
                )
                self._queue.close(self._broken)

    def _turn(self) -> None:
        now = monotonic()
        for entry in [*self._queue.running]:
            finish = entry.over(now)
            if finish is not None and entry.running is not None:
                self._scheduler.stop(entry.running, finish)
        for entry in self._queue.leave_over(now):
            self._never_ran(entry, entry.over(now))
        self._forget_dropped()
        self._scheduler.settle()
        self._admit()
        requests = len(self._queue.running)
        if requests:
            began = perf_counter()
            self._scheduler.cycle()
            self._books.cycle(requests, (perf_counter() - began) * 1000.0)

    def _admit(self) -> None:
        while self._scheduler.free_lanes and (entry := self._queue.take()) is not None:
            if (finish := entry.over(monotonic())) is not None:  # since the turn began
                self._never_ran(entry, finish)
                continue
            job, kept = entry.job, None
            job.recorder.queue_ms = (perf_counter() - entry.submitted) * 1000.0
            if entry.session is not None:
                with self._sessions_lock:
                    kept = self._kept.get(entry.session)
            running = self._scheduler.admit(
                job,
                entry,
                keep=entry.session is not None,
                saved=None if kept is None else kept.saved,
                tokens=0 if kept is None else kept.common(job.prompt),
            )
            if not entry.ended:
                entry.running = running

    def _never_ran(self, entry: Entry, finish: FinishReason | None = None) -> None:
        stats = entry.job.recorder.stats(0, 0)
        if self._broken is not None:
            entry.fail(self._broken, stats)
        else:
            entry.end(finish or FinishReason.CANCELLED, stats, None)

    def _ended(self, entry: Entry, stats: GenerationStats, kept: Saved | None) -> None:
        """A request ended: in the thread, or where one was cancelled that never ran."""
        with self._queue.changed:
            self._queue.ended(entry)
            self._books.ended(entry.result, stats)
        if kept is not None and entry.result is not None and entry.session is not None:
            with self._sessions_lock:
                if entry.session in self._sessions:
                    self._kept.put(entry.session, Kept((*entry.job.prompt, *entry.result.ids), kept))

    def _finish(self) -> None:
        """End what is left, and free the caches. Nobody comes any more."""
        for entry in [*self._queue.running]:
            if entry.running is not None and self._broken is None:
                entry.running.keep = False
                self._scheduler.stop(entry.running, FinishReason.CANCELLED)
            else:
                self._never_ran(entry)
        while (waiting := self._queue.take()) is not None:
            self._never_ran(waiting)
        with self._sessions_lock:
            self._sessions.clear()
            self._kept.clear()
        self._scheduler.close()

    # Figures, and the end.

    def stats(self) -> ServiceStats:
        """Figures since the start."""
        with self._queue.changed, self._sessions_lock:
            return self._books.stats(
                submitted=self._queue.entered,
                refused=self._queue.refused,
                running=len(self._queue.running),
                waiting=len(self._queue.waiting),
                lanes_bytes=self._lanes_bytes,
                kept_bytes=self._kept.bytes,
                kept_sessions=len(self._kept),
                evictions=self._kept.evictions,
            )

    @property
    def effective(self) -> Mapping[str, object]:
        """What is really in use; see `Decoder.effective`."""
        return {
            **self.decoder.effective,
            "verify_rows": "adaptive" if self.settings.verify_rows is None else self.settings.verify_rows,
            "max_requests": self.settings.max_requests,
            "max_waiting": self.settings.max_waiting,
            "kv_lanes_bytes": self._lanes_bytes,
            "kv_sessions_bytes": self._kept.budget_bytes,
        }

    def close(self) -> None:
        """End all requests and free the caches. Harmless twice, and while streams are read."""
        self._queue.close(RequestError(_CLOSED))
        if self._thread is None:
            if self._finished.acquire(blocking=False):
                self._finish()
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        if self._own:
            self.decoder.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(settings: ServiceSettings | None) -> ServiceSettings:
    if settings is None:
        return ServiceSettings()
    if not isinstance(settings, ServiceSettings):
        raise field_error(RequestError, "settings", settings, "a ServiceSettings")
    return settings
