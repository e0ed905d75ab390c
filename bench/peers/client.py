"""Starts other programs and speaks with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from time import perf_counter
from typing import Any

from ...bundle.errors import EngineError
from ..measure import Sample, Task
from . import PEERS
from .protocol import ERROR, Answer, Opened, OpenRequest

_STOP_S = 10.0
_ERROR_LINES = 5
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class PeerPlace:
    """What programs read and where they keep things.

    Attributes:
        target: checkpoint of the target.
        cache: folder for models they build, None if none does.
    """

    target: Path
    cache: Path | None = None


class PeerProcess:
    """A program in a process of its own. Closing it ends the process."""

    def __init__(self, name: str, module: str, request: OpenRequest):
        """Start and open it.

        Args:
            name: for messages.
            module: see `serve`.
            request: how to open it.

        Raises:
            EngineError: it cannot be opened.
        """
        self.name = name
        # Open as long as the process is.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        threads = dict.fromkeys(_THREAD_VARIABLES, str(request.threads))
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            env={**os.environ, **threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            told = self._ask(request.to_json())
            try:
                self.opened = Opened(**told)
            except TypeError as cause:
                raise self._nonsense(told, cause) from cause
        except BaseException:
            self.close()
            raise

    def generate(self, ids: Sequence[int], new_tokens: int) -> Answer:
        """Decode; see `Peer.generate`.

        Raises:
            EngineError: it failed, ended, or answered nonsense.
        """
        told = self._ask({"ids": list(ids), "new_tokens": new_tokens})
        try:
            return Answer.from_json(told)
        except (KeyError, TypeError, ValueError) as cause:
            raise self._nonsense(told, cause) from cause

    def close(self) -> None:
        """End the process. Harmless twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._process.wait()
            code = self._process.returncode
            raise EngineError(f"peer {self.name}: ended with exit status {code}{self._last_words()}")
        try:
            told = json.loads(line)
        except ValueError as cause:
            raise self._nonsense(line, cause) from cause
        if not isinstance(told, dict):
            raise self._nonsense(told, None)
        if ERROR in told:
            raise EngineError(f"peer {self.name}: {told[ERROR]}")
        return told

    def _nonsense(self, told: object, cause: Exception | None) -> EngineError:
        why = f" ({cause})" if cause else ""
        return EngineError(f"peer {self.name}: answered {str(told)[:200]!r}, which is no answer{why}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.rstrip() for line in self._errors if line.strip()]
        return "".join(f"\n  {line}" for line in lines[-_ERROR_LINES:])


@dataclass(frozen=True)
class PeerWay:
    """A program as a way of decoding.

    Attributes:
        name: its key in `PEERS`.
        process: where it runs.
        open_ms: how long opening took, the start of its process included.
    """

    name: str
    process: PeerProcess
    open_ms: float

    @property
    def opened(self) -> Opened:
        """What it says of itself."""
        return self.process.opened

    def run(self, task: Task) -> Sample:
        """See `Way`."""
        answer = self.process.generate(task.ids, task.new_tokens)
        return Sample(answer.ids, answer.first_tokens, answer.first_token_ms, answer.total_ms)


def open_peers(
    stack: ExitStack, names: Sequence[str], place: PeerPlace | None, threads: int
) -> list[PeerWay]:
    """Start programs that `choose_peers` chose; the stack ends them.

    Raises:
        EngineError: one cannot be opened.
    """
    opened = []
    for name in names:
        assert place is not None, "programs need a target"
        kind = PEERS[name]
        began = perf_counter()
        request = OpenRequest(place.target, threads, place.cache, kind.variant)
        process = PeerProcess(name, resolve_name(kind.module, __package__), request)
        stack.callback(process.close)
        opened.append(PeerWay(name, process, (perf_counter() - began) * 1000.0))
    return opened
