"""The files of a checkpoint: read piece by piece, and hashed on the way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.errors import CheckpointError
from ..bundle.manifest import FileInfo
from .background_hash import BackgroundHash
from .page_cache import NOT_OFFERED

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 23
_LARGE_BYTES = 1 << 20
_DISK_BLOCK_BYTES = 4096  # where and how much a file is read past the page cache: multiples of this
_WIDEST_ALIGNMENT = 8  # bytes, of a number


class SourceFiles:
    """Reads files anywhere. Once told to, it hashes what is read of a file from its start to its end.

    Parts that were skipped are read when something behind them is. So who goes through the files in order has
    them read once.
    """

    def __init__(self, paths: Sequence[Path]):
        """Open nothing yet."""
        self.paths = tuple(paths)
        self._hashes: dict[Path, BackgroundHash] = {}
        self._hashed_bytes: dict[Path, int] = {}

    def start_hashing(self) -> None:
        """Hash what is read from now on."""
        self._hashes = {path: BackgroundHash() for path in self.paths}
        self._hashed_bytes = dict.fromkeys(self.paths, 0)

    def read(self, path: Path, offset: int, size: int) -> torch.Tensor:
        """Read some bytes of a file: uint8 [size].

        Raises:
            CheckpointError: it cannot be read, or is shorter.
        """
        if path not in self._hashes:
            return _read(path, offset, size)
        self._hash_until(path, offset)
        data = _read(path, offset, size, last=True)
        self._hash(path, offset, data)
        return data

    def finish_hashing(self) -> dict[str, FileInfo]:
        """Read what was not read, and give size and hash of each file by its name.

        Raises:
            CheckpointError: one cannot be read, or is shorter than it was.
        """
        infos = {}
        for path, digest in self._hashes.items():
            size = _size(path)
            self._hash_until(path, size)
            infos[path.name] = FileInfo(size, digest.hexdigest())
            digest.close()
        self._hashes = {}
        return infos

    def _hash_until(self, path: Path, end: int) -> None:
        while (start := self._hashed_bytes[path]) < end:
            self._hash(path, start, _read(path, start, min(end - start, _CHUNK_BYTES), last=True))

    def _hash(self, path: Path, offset: int, data: torch.Tensor) -> None:
        """Hash bytes that come next; those that were there before are known."""
        if offset == self._hashed_bytes[path]:
            self._hashes[path].update(data.numpy().data)
            self._hashed_bytes[path] += data.numel()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as cause:
        raise _unreadable(path, cause) from cause


def _unreadable(path: Path, cause: OSError) -> CheckpointError:
    return CheckpointError(f"{path.name}: cannot be read ({cause})")


def _read(path: Path, offset: int, size: int, last: bool = False) -> torch.Tensor:
    """Read bytes, for the last time if so said: then past the page cache, where the system allows it.

    Filling the cache anew with every page of a large checkpoint takes more processor time than reading it.
    """
    try:
        data = _read_past_cache(path, offset, size) if last and size >= _LARGE_BYTES else None
        if data is None:
            data = _read_as_usual(path, offset, size, last)
    except OSError as cause:
        raise _unreadable(path, cause) from cause
    if data.numel() < size:
        raise CheckpointError(
            f"{path.name}: got {data.numel()} bytes from byte {offset} on, expected {size}; "
            "was it changed meanwhile?"
        )
    return data


def _read_as_usual(path: Path, offset: int, size: int, last: bool) -> torch.Tensor:
    """As many of the bytes as there are; after the last time the page cache need not keep them."""
    import torch

    data = torch.empty(size, dtype=torch.uint8)
    view, done = data.numpy().data, 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while done < size and (count := file.readinto(view[done:])):
            done += count
        if last and hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
    return data[:done]


def _read_past_cache(path: Path, offset: int, size: int) -> torch.Tensor | None:
    """As many of the bytes as there are, or None if this cannot be done here.

    The disk fills whole blocks of memory that begin at a block.
    """
    import torch

    if not hasattr(os, "O_DIRECT"):
        return None
    before = offset % _DISK_BLOCK_BYTES
    whole = before + size + -(before + size) % _DISK_BLOCK_BYTES
    memory = torch.empty(whole + _DISK_BLOCK_BYTES, dtype=torch.uint8)
    blocks = memory[-memory.data_ptr() % _DISK_BLOCK_BYTES :][:whole]
    view, done = blocks.numpy().data, 0
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            # A count that is no multiple of a block is the file's end.
            while done < whole and done % _DISK_BLOCK_BYTES == 0:
                done += (count := os.preadv(file, [view[done:]], offset - before + done))
                if not count:
                    break
        finally:
            os.close(file)
    except OSError as cause:
        if cause.errno in NOT_OFFERED:  # not on every file system
            return None
        raise
    data = blocks[:done][before : before + size]
    return data if data.data_ptr() % _WIDEST_ALIGNMENT == 0 else data.clone()
