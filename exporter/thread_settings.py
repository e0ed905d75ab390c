"""Settings of the whole process while weights are written in threads beside a tracer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# How long a thread that runs Python may keep the others waiting. A block of weights takes twenty turns;
# at Python's own 5 ms they get hardly anywhere beside a tracer.
_TURN_S = 0.0005


class ThreadSettings:
    """Short turns of Python's threads, for as long as someone wants them; then everything is as before.

    Several exports may run at once: the first one changes what is there, the last one restores it.
    """

    def __init__(self) -> None:
        """Change nothing yet."""
        self._lock = threading.Lock()
        self._users = 0
        self._turn_s, self._torch_threads = 0.0, 0

    @contextmanager
    def short_turns(self) -> Iterator[None]:
        """Take short turns meanwhile. Threads that call `one_torch_thread` must have ended before."""
        with self._lock:
            if not self._users:
                self._turn_s, self._torch_threads = sys.getswitchinterval(), torch.get_num_threads()
                sys.setswitchinterval(min(_TURN_S, self._turn_s))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    sys.setswitchinterval(self._turn_s)
                    torch.set_num_threads(self._torch_threads)


def one_torch_thread() -> None:
    """Let torch compute in the calling thread alone. Threads that are made later inherit it."""
    torch.set_num_threads(1)


SETTINGS = ThreadSettings()
"""Those of this process."""
