"""SHA-256 in a thread of its own."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundHash:
    """SHA-256 of bytes as they come, computed in a thread beside whoever makes them."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def update(self, data: memoryview | bytes) -> None:
        """Take the next bytes, which must stay as they are until the next call of a method returns."""
        self._wait()
        self._last = self._thread.submit(self._digest.update, data)

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        self._wait()
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
