"""A bundle in a service that has a queue of jobs: worker threads, a deadline for each job, a polite end.

A job is a line of JSON on standard input, an outcome a line on standard output:

    echo '{"id": "1", "prompt": "Why is the sky blue?"}' | python worker_thread.py BUNDLE

At the end of the input every job is finished. SIGTERM takes no further job, lets those that run go on for
some seconds, cancels the rest, and tells which jobs were not done.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

from dflash_deploy.bundle.errors import DflashError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.ticket import Ticket


@dataclass(frozen=True)
class Job:
    """What is to be done; `deadline_s` counts from when a worker takes it."""

    id: str
    prompt: str
    max_new_tokens: int = 128
    deadline_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `status` is a finish reason, "failed" or "not done"; the text may be a part."""

    id: str
    status: str
    text: str = ""
    error: str | None = None


class BadJobError(ValueError):
    """A line that is no job; `id` is what it says it is, as far as that can be read."""

    def __init__(self, line: str, reason: str, job_id: Any = "") -> None:
        super().__init__(f"no job: {line.strip()!r} ({reason})")
        self.id = job_id


def job_from_line(line: str) -> Job:
    """Read a job.

    Raises:
        BadJobError: it is none.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadJobError(line, f"no JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadJobError(line, f"got {type(data).__name__}, expected an object")
    known = [field.name for field in fields(Job)]
    missing = [name for name in ("id", "prompt") if name not in data]
    unknown = [name for name in data if name not in known]
    if missing or unknown:
        reasons = [f"{name} is missing" for name in missing]
        reasons += [f"{name!r} is none of {', '.join(known)}" for name in unknown]
        raise BadJobError(line, "; ".join(reasons), data.get("id", ""))
    return Job(**data)


class Workers:
    """Threads that take jobs and put outcomes. What they have in hand runs together, as one batch."""

    def __init__(self, service: Service, report: Callable[[Outcome], None]) -> None:
        """`report` gets each job's outcome, once, from any thread."""
        self._service = service
        self._report = report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: set[Ticket] = set()
        self._over = False  # no grace is left
        count = service.settings.max_requests
        self._threads = [threading.Thread(target=self._work, name=f"worker-{n}") for n in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Take a job."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Do everything that was put, then end."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def stop(self, grace_s: float) -> None:
        """Begin nothing more, let what runs go on for some seconds, cancel what is left, and end."""
        self._stopping.set()
        for _ in self._threads:
            self._jobs.put(None)  # wakes those that wait for a job
        until = monotonic() + grace_s
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        with self._lock:
            self._over = True
            for ticket in self._running:
                ticket.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._stopping.is_set():
                self._report(Outcome(job.id, "not done"))
                continue
            try:
                self._report(self._do(job))
            except Exception as error:  # of this job alone: the next one may be fine
                self._report(Outcome(job.id, "failed", error=str(error)))

    def _do(self, job: Job) -> Outcome:
        ticket = self._service.submit(
            job.prompt, job.max_new_tokens, deadline_s=job.deadline_s, wait_s=job.deadline_s
        )
        with self._lock:
            self._running.add(ticket)
            if self._over:
                ticket.cancel()
        try:
            result = ticket.result()
        finally:
            with self._lock:
                self._running.discard(ticket)
        status = "not done" if result.finish_reason is FinishReason.CANCELLED else result.finish_reason.value
        return Outcome(job.id, status, result.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--max-requests", type=int, default=4)
    parser.add_argument("--grace-s", type=float, default=10.0)
    arguments = parser.parse_args()
    # This unwinds the main thread out of its wait for the next line.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    writing = threading.Lock()

    def report(outcome: Outcome) -> None:
        with writing:
            print(json.dumps(asdict(outcome)), flush=True)

    with Service.open(arguments.bundle, ServiceSettings(max_requests=arguments.max_requests)) as service:
        workers = Workers(service, report)
        try:
            for line in sys.stdin:
                try:
                    workers.put(job_from_line(line))
                except BadJobError as error:
                    report(Outcome(error.id, "failed", error=str(error)))
            workers.finish()
        except BaseException:
            workers.stop(arguments.grace_s)
            raise


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:  # says what to do; a bug keeps its traceback
        sys.exit(f"{Path(__file__).name}: {error}")
