"""Start the builder process, listen to it, and turn what goes wrong into our errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ...bundle.errors import EngineBuildError, ProviderError
from ...bundle.records import record_to_json
from . import worker
from .backends import TENSORRT_RTX
from .job import Done, Failed, Fault, Job, Note, Step, message_from_line
from .options import Verbosity

_START = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {worker.__name__} import main; main()"
)
_TAIL_LINES = 12


def engine_from_job(name: str, job: Job, log: Path, listen: Callable[[Step | Note], None]) -> Done:
    """Build an engine in a process of its own.

    Args:
        name: the engine's name, for messages.
        job: what to build.
        log: file for what libraries print, unless it is shown.
        listen: is told what the builder does.

    Raises:
        ProviderError: the machine lacks something.
        EngineBuildError: the graph does not build, or the process died.
    """
    step = "starting"
    outcome: Done | Failed | None = None
    # Where this process finds its modules, whatever directory either of them works in.
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    environment = {**os.environ, worker.RTX_VARIABLE: "1" if job.backend == TENSORRT_RTX else "0"}
    quiet = job.verbosity is Verbosity.QUIET
    with open(log, "w", encoding="utf-8") as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed if quiet else None,
            env=environment,
            encoding="utf-8",
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(record_to_json(job))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at once; its exit code says so below
            for line in process.stdout:
                message = message_from_line(line)
                if isinstance(message, Done | Failed):
                    outcome = message
                    continue
                if isinstance(message, Step):
                    step = message.text
                listen(message)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code == 0 and isinstance(outcome, Done):
        return outcome
    if isinstance(outcome, Failed):
        reasons = "\n  ".join(outcome.reasons)
        if outcome.fault is Fault.MACHINE:
            raise ProviderError(f"engine {name}: {reasons}")
        raise EngineBuildError(f"engine {name}: {job.backend} cannot build it:\n  {reasons}")
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    raise EngineBuildError(
        f"engine {name}: the builder process died ({_ending(code)}) at {step!r}"
        + (f"; it last printed:\n  {tail}" if tail else "")
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
