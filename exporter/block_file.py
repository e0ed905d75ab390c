"""A large file written once, from its start to its end, past the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .background_hash import BackgroundHash
from .page_cache import NOT_OFFERED

with contextlib.suppress(ImportError):  # not on every system
    import fcntl

_BLOCK_BYTES = 1 << 24


class BlockFile:
    """Collects bytes in blocks; a block is hashed and written in two threads while the next one is filled.

    Whole blocks go to the disk without a copy in the page cache: that copy would take more processor time
    than all else that is done to a weight, and would push out what other programs keep there. Where a file
    system does not offer it, they are written as usual.
    """

    def __init__(self, path: Path):
        """Create the file."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = self._set_direct(True)
        # Two in turn: one is hashed and written while the other is filled. A mapping begins at a page.
        self._blocks = [torch.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), dtype=torch.uint8) for _ in range(2)]
        self._used = 0
        self._hash = BackgroundHash()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def room(self) -> Tensor:
        """Where the next bytes go: uint8, as many as fit, at least one."""
        return self._blocks[0][self._used :]

    def advance(self, count: int) -> None:
        """Take the first `count` bytes of `room()`.

        Raises:
            OSError: an earlier block could not be written.
        """
        self._used += count
        if self._used == _BLOCK_BYTES:
            self._start_block()

    def finish(self) -> str:
        """Write what is left.

        Returns:
            The file's SHA-256.

        Raises:
            OSError: it cannot be written.
        """
        self._wait()
        if self._used:
            self._direct = self._set_direct(False)  # the last block is no multiple of the disk's
            self._start_block()
            self._wait()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file as it is."""
        self._thread.shutdown()
        self._hash.close()
        os.close(self._file)

    def _start_block(self) -> None:
        """Hand over the block that is full, once the other one is done with."""
        self._wait()
        block = self._blocks[0][: self._used].numpy().data
        self._hash.update(block)
        self._last = self._thread.submit(self._write, block)
        self._blocks.reverse()
        self._used = 0

    def _wait(self) -> None:
        """Until what was handed over is written."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _write(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as cause:
                if cause.errno not in NOT_OFFERED or not self._direct:
                    raise
                self._direct = self._set_direct(False)

    def _set_direct(self, on: bool) -> bool:
        """Turn writing past the page cache on or off; say whether it is on."""
        if not hasattr(os, "O_DIRECT"):  # not on every system, and where it is, so is fcntl
            return False
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        except OSError as cause:
            if cause.errno not in NOT_OFFERED:
                raise
            return False
        return on
