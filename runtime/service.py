"""A bundle behind a queue: requests come and go from any thread, and run together over one set of weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Unpack

from ..bundle.errors import BusyError, RequestError, field_error
from ..bundle.limits import ShapeLimits
from .accept import FinishReason
from .calibrate import calibrate
from .decoder import Decoder, Generation
from .kept import Kept, KeptStore
from .pair import Pair, Saved, prefill_rows
from .policy import AdaptiveRows, FixedRows, RowPolicy
from .request import MAX_NEW_TOKENS, Prompt, Request, RequestOptions, job_from_request
from .scheduler import Scheduler
from .service_stats import ServiceBooks, ServiceStats
from .stats import GenerationStats
from .text import Message
from .ticket import Entry, Ticket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceSettings:
    """How a service works.

    Attributes:
        max_requests: most requests that run at once; each has a part of the caches.
        max_waiting: most requests that wait; one more is refused with BusyError.
        max_length: longest sequence in tokens, prompt and output; None takes the bundle's. Caches are
            allocated for it, for each of `max_requests`.
        kv_budget_bytes: most memory for keys and values, of running requests and of sessions between their
            requests; None allows the sessions together as much as the running ones.
        verify_rows: rows the target verifies in a round; None chooses for each round what promises the most
            tokens. Requests with a temperature have a fixed number in any case: all proposals, or this.
        prefill_rows: most rows of prompts computed in one cycle while other requests wait for their round.
    """

    max_requests: int = 8
    max_waiting: int = 64
    max_length: int | None = None
    kv_budget_bytes: int | None = None
    verify_rows: int | None = None
    prefill_rows: int = 128


class Service:
    """Runs requests of a bundle together. Every method may be called from any thread.

    Close it, or use it as a context manager: its thread keeps it alive.
    """

    def __init__(self, decoder: Decoder, settings: ServiceSettings | None = None, own: bool = False):
        """Start a service over the engines of a decoder.

        Args:
            decoder: open. It may be used beside the service, but not by a thread that minds waiting.
            settings: None takes the defaults.
            own: close the decoder with the service.

        Raises:
            RequestError: a setting is out of range, or the caches do not fit into the budget.
            EngineError: there is no memory for the caches.
        """
        settings = settings or ServiceSettings()
        for name, least in (("max_requests", 1), ("max_waiting", 0), ("prefill_rows", 1)):
            if getattr(settings, name) < least:
                raise field_error(RequestError, name, getattr(settings, name), f">= {least}")
        self.decoder = (
            decoder if settings.max_length is None else decoder.with_settings(max_length=settings.max_length)
        )
        self.settings = settings
        self._own = own
        manifest, exact = self.decoder.manifest, self.decoder.settings.exact
        self.max_length = self.decoder.settings.max_length
        target, draft = self.decoder.runners
        fixed = target.limits
        if fixed is not None and settings.max_requests > fixed.batch:
            raise field_error(
                RequestError,
                "max_requests",
                settings.max_requests,
                f"at most {fixed.batch}, the batch that the engines were built for",
                "build them again with a larger --max-batch",
            )
        limits = ShapeLimits.from_manifest(manifest, self.max_length)
        capacity = limits.capacity if fixed is None else fixed.capacity
        lanes = settings.max_requests
        self._lanes_bytes = sum(m.cache.bytes(lanes, capacity) for m in (manifest.target, manifest.draft))
        budget = 2 * self._lanes_bytes if settings.kv_budget_bytes is None else settings.kv_budget_bytes
        if budget < self._lanes_bytes:
            raise field_error(
                RequestError,
                "kv_budget_bytes",
                budget,
                f">= {self._lanes_bytes}, for {lanes} requests of {self.max_length} tokens",
                "lower max_requests or max_length",
            )
        most = manifest.draft.proposals + 1
        rows = most if settings.verify_rows is None else settings.verify_rows
        if not 1 <= rows <= most:
            raise field_error(RequestError, "verify_rows", rows, f"1 to {most} (anchor and proposals)")
        policy: RowPolicy = AdaptiveRows(most, exact) if settings.verify_rows is None else FixedRows(rows)
        pair = Pair(manifest, target, draft, capacity, lanes, exact)
        if settings.verify_rows is None:
            calibrate(pair, manifest.draft, policy)
        self._scheduler = Scheduler(
            pair,
            manifest.draft,
            prefill_rows(fixed, settings.prefill_rows),
            settings.prefill_rows,
            policy,
            rows,
        )
        self._wake = threading.Condition()
        self._waiting: deque[Entry] = deque()
        self._entries: list[Entry] = []  # that run
        self._kept = KeptStore(budget - self._lanes_bytes)
        self._books = ServiceBooks()
        self._closing = False
        self._session_keys = itertools.count()
        self._sessions: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="dflash-service", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, bundle: str | Path, settings: ServiceSettings | None = None, **options: Any) -> Service:
        """Open a bundle and start a service over it.

        Args:
            bundle: the directory.
            settings: None takes the defaults.
            options: of `Decoder.open`: provider, threads, exact, verify, backend.

        Raises:
            BundleError, ProviderError, RequestError, EngineError: see `Decoder.open` and the constructor.
        """
        decoder = Decoder.open(bundle, **options)
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
            deadline_s: seconds from now after which it ends where it is, with `FinishReason.DEADLINE`.
            wait_s: seconds to wait for room in the queue.
            options: the other fields of `Request`.

        Raises:
            RequestError: it cannot be served.
            BusyError: there is no room in the queue.
        """
        return self._submit(Request(prompt, max_new_tokens, **options), None, deadline_s, wait_s)

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
        return await asyncio.to_thread(
            self.submit, prompt, max_new_tokens, deadline_s=deadline_s, wait_s=wait_s, **options
        )

    def generate(
        self, prompt: Prompt, max_new_tokens: int = MAX_NEW_TOKENS, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Submit and wait for the whole answer; waits as long as it takes for room in the queue."""
        return self.submit(prompt, max_new_tokens, wait_s=threading.TIMEOUT_MAX, **options).result()

    def session(self) -> Session:
        """Begin a conversation whose requests reuse what they have in common with the one before."""
        with self._wake:
            key = next(self._session_keys)
            self._sessions.add(key)
        return Session(self, key)

    def _forget(self, key: int) -> None:
        with self._wake:
            self._sessions.discard(key)
            self._kept.drop(key)

    def _submit(
        self, request: Request, session: int | None, deadline_s: float | None, wait_s: float
    ) -> Ticket:
        if deadline_s is not None and not deadline_s > 0:
            raise field_error(RequestError, "deadline_s", deadline_s, "> 0")
        decoder = self.decoder
        job = job_from_request(request, decoder.manifest, decoder.codec, self.max_length)
        entry = Entry(job, session, deadline_s, self._ended)
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._has_room(), wait_s)
            if self._closing:
                raise RequestError("service: is closed; open the bundle again")
            if not self._has_room():
                self._books.refused()
                raise BusyError(
                    f"service: {len(self._entries)} requests run and {len(self._waiting)} wait, which is all "
                    "it takes; try again later, wait with wait_s, or raise max_requests or max_waiting"
                )
            self._waiting.append(entry)
            self._books.submitted()
            self._wake.notify_all()
        return Ticket(entry, self._cancel)

    def _has_room(self) -> bool:
        free = self.settings.max_requests - len(self._entries)
        return len(self._waiting) < free + self.settings.max_waiting

    def _cancel(self, entry: Entry) -> None:
        if entry.ended:
            return
        with self._wake:
            entry.cancelled = True
            if entry not in self._waiting:
                return  # it runs: the thread sees the mark before the next round
            self._waiting.remove(entry)
            self._wake.notify_all()
        self._never_ran(entry, FinishReason.CANCELLED)

    def _never_ran(self, entry: Entry, finish: FinishReason) -> None:
        if not entry.ended:
            entry.end(finish, entry.job.recorder.stats(0, 0), None)

    # The thread.

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._waiting or self._entries)
                if self._closing:
                    break
            try:
                self._round()
            except Exception as error:  # a bug; the requests end, the service goes on
                logger.exception("a round failed")
                for entry in [*self._entries]:
                    if entry.running is not None:
                        self._scheduler.abandon(entry.running, error)
                self._scheduler.settle()
                self._after_round()
        for entry in [*self._entries]:
            if entry.running is not None:
                self._scheduler.stop(entry.running, FinishReason.CANCELLED)
        with self._wake:
            left, self._waiting = [*self._waiting], deque()
        for entry in left:
            self._never_ran(entry, FinishReason.CANCELLED)

    def _round(self) -> None:
        now = monotonic()
        for entry in self._entries:
            late = entry.expires is not None and now >= entry.expires
            if (entry.cancelled or late) and entry.running is not None:
                finish = FinishReason.CANCELLED if entry.cancelled else FinishReason.DEADLINE
                self._scheduler.stop(entry.running, finish)
        with self._wake:
            over = [e for e in self._waiting if e.cancelled or (e.expires is not None and now >= e.expires)]
            for entry in over:
                self._waiting.remove(entry)
        for entry in over:
            finish = FinishReason.CANCELLED if entry.cancelled else FinishReason.DEADLINE
            self._never_ran(entry, finish)
        self._scheduler.settle()
        self._after_round()
        self._admit()
        if self._entries:
            began = perf_counter()
            self._scheduler.cycle()
            self._books.cycle(len(self._entries), (perf_counter() - began) * 1000.0)
            self._after_round()

    def _admit(self) -> None:
        while self._scheduler.free_lanes:
            with self._wake:
                if not self._waiting:
                    return
                entry = self._waiting.popleft()
                self._entries.append(entry)
                self._wake.notify_all()
            job = entry.job
            job.recorder.queue_ms = (perf_counter() - entry.submitted) * 1000.0
            kept = None
            if entry.session is not None:
                with self._wake:
                    kept = self._kept.get(entry.session)
            entry.running = self._scheduler.admit(
                job,
                entry,
                keep=entry.session is not None,
                saved=None if kept is None else kept.saved,
                tokens=0 if kept is None else kept.common(job.prompt),
            )

    def _after_round(self) -> None:
        """Forget requests that ended, and let those who wait for room know."""
        with self._wake:
            going = [entry for entry in self._entries if not entry.ended]
            if len(going) != len(self._entries):
                self._entries = going
                self._wake.notify_all()

    def _ended(self, entry: Entry, stats: GenerationStats, kept: Saved | None) -> None:
        """A request ended; in the thread, or where one was cancelled that never ran."""
        entry.running = None
        self._books.ended(entry.result, stats)
        if kept is not None and entry.result is not None and entry.session is not None:
            with self._wake:
                if entry.session in self._sessions:
                    self._kept.put(entry.session, Kept((*entry.job.prompt, *entry.result.ids), kept))

    # Figures, and the end.

    def stats(self) -> ServiceStats:
        """Figures since the start."""
        with self._wake:
            return self._books.stats(
                running=len(self._entries),
                waiting=len(self._waiting),
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
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._own:
            self.decoder.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session:
    """A conversation: requests one after the other. What one has in common with the last is not computed.

    Attributes:
        messages: the conversation that `send` keeps. Edit it as you like between requests.
    """

    def __init__(self, service: Service, key: int):
        self._service = service
        self._key = key
        self._last: Ticket | None = None
        self._closed = False
        self.messages: list[Message] = []
        self._answers: Ticket | None = None

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        deadline_s: float | None = None,
        wait_s: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Ticket:
        """Submit the whole conversation so far; see `Service.submit`. `messages` are not touched.

        Raises:
            RequestError: the request before it has not ended, or the session is closed.
        """
        if self._closed:
            raise RequestError("session: is closed; begin another")
        if self._last is not None and not self._last.done:
            raise RequestError("session: its last request has not ended; read it to its end or cancel it")
        request = Request(prompt, max_new_tokens, **options)
        self._last = self._service._submit(request, self._key, deadline_s, wait_s)
        return self._last

    def send(
        self, text: str, max_new_tokens: int = MAX_NEW_TOKENS, **options: Unpack[RequestOptions]
    ) -> Ticket:
        """Add a user's message to the conversation and ask for the answer.

        What was delivered of the last answer is added to the conversation first.
        """
        messages = [*self.settled(), {"role": "user", "content": text}]
        ticket = self.submit(messages, max_new_tokens, **options)
        self.messages, self._answers = messages, ticket
        return ticket

    def settled(self) -> Sequence[Message]:
        """The conversation with the last answer in it, as far as it was delivered."""
        if self._answers is not None and self._answers.done:
            try:
                answer = self._answers.result()
            except Exception:  # it failed: nothing of it is part of the conversation
                self.messages = self.messages[:-1]
            else:
                self.messages = [*self.messages, {"role": "assistant", "content": answer.text}]
            self._answers = None
        return self.messages

    def close(self) -> None:
        """Cancel what runs, and free what is kept. Harmless twice."""
        self._closed = True
        if self._last is not None:
            self._last.cancel()
        self._service._forget(self._key)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
