"""The bundle's weight file: every weight once, streamed piece by piece from the checkpoints.

Graphs refer to it by offset. Two graphs that use the same weight in the same dtype share its bytes; on
load they share the pages that the file is mapped to.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..bundle.errors import CheckpointError
from ..bundle.manifest import WEIGHT_FILE
from .block_file import BlockFile
from .read_ahead import ReadAhead
from .thread_settings import SETTINGS, one_torch_thread

_IR_DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.int64: "INT64",
}
_PAGE_BYTES = 4096
_SMALL_BYTES = 1 << 20
# Numbers converted at once. From one of these dtypes to the other, torch is faster by way of float32, as long
# as that stays in the processor's cache; with fewer numbers, more turns would be needed.
_AT_ONCE = 1 << 20
_HALVES = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Placed:
    """Where a weight lies. `key` names it across graphs, e.g. ``target.embed_tokens.weight``."""

    key: str
    file: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    ir_dtype: str


class WeightPlan:
    """Gives weights their places in a file that nobody writes; `WeightWriter` writes it.

    Attributes:
        bytes: size of the file with all weights that have a place.
    """

    def __init__(self) -> None:
        """Start with an empty file."""
        self._placed: dict[tuple[str, torch.dtype], Placed] = {}
        self.bytes = 0

    def add(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[Tensor], source: str
    ) -> Placed:
        """Place a weight.

        Args:
            key: its name across graphs.
            dtype: what it is stored as.
            shape: what it must be.
            pieces: its rows in order; read only to be written, and only if it was not placed before in this
                dtype.
            source: where they come from, for messages.
        """
        known = self._placed.get((key, dtype))
        if known is not None:
            return known
        size = math.prod(shape) * dtype.itemsize
        align = _PAGE_BYTES if size >= _SMALL_BYTES else 64
        offset = self.bytes + -self.bytes % align
        suffix = "" if not any(k == key for k, _ in self._placed) else f".{_IR_DTYPES[dtype].lower()}"
        placed = Placed(key + suffix, WEIGHT_FILE, offset, size, shape, _IR_DTYPES[dtype])
        self._placed[(key, dtype)] = placed
        self.bytes = offset + size
        self._fill(placed, dtype, pieces, source)
        return placed

    def check(self) -> None:
        """Raise what is known to be wrong with a weight; here, nothing is read."""

    def _fill(self, placed: Placed, dtype: torch.dtype, pieces: Iterable[Tensor], source: str) -> None:
        """Write the weight to its place; here, nothing is written."""


class WeightWriter(WeightPlan):
    """Writes weights to one file, piece by piece, in threads of its own. Use as a context manager.

    Places are known as soon as a weight was added, so that graphs are traced while weights are read, checked,
    converted, hashed and written, in the order in which they were added. Leaving the context without an error
    waits for all of them.
    """

    def __init__(self, directory: Path):
        """Create `WEIGHT_FILE` in `directory`."""
        super().__init__()
        self._file = BlockFile(directory / WEIGHT_FILE)
        self._written = 0
        self._sha256 = ""
        # One thread of torch's is fast enough for a disk; more would take the cores from the tracer.
        self._reader: ReadAhead[Tensor] = ReadAhead(one_torch_thread)
        self._thread = ThreadPoolExecutor(1, initializer=one_torch_thread)
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._given_up = threading.Event()
        self._wide = torch.empty(_AT_ONCE, dtype=torch.float32)
        self._ends = ExitStack()
        self._ends.callback(self._file.close)

    def __enter__(self) -> WeightWriter:
        """Give the writer."""
        self._ends.enter_context(SETTINGS.short_turns())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the weights, or give them up after an error, and close the file."""
        with self._ends:  # after the threads: one that began later would change the settings again
            try:
                if error is None:
                    _ = self.sha256
            finally:
                self._given_up.set()
                self._reader.close()
                self._thread.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Raise what `finish` would, if it has happened already."""
        for job, _ in self._jobs:
            if job.done():
                job.result()

    def finish(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Wait until all weights so far are written.

        Args:
            progress: is told the bytes of each weight.

        Raises:
            CheckpointError: a tensor has another shape than it must, or holds NaN or infinity, or does not
                fit the range of its dtype.
            OSError: it cannot be written.
        """
        while self._jobs:
            job, size = self._jobs[0]
            job.result()
            self._jobs.popleft()
            progress(size)

    @property
    def sha256(self) -> str:
        """Of the file, when all weights are written; none can be added then."""
        self.finish()
        if not self._sha256:
            self._sha256 = self._file.finish()
        return self._sha256

    def _fill(self, placed: Placed, dtype: torch.dtype, pieces: Iterable[Tensor], source: str) -> None:
        ahead = self._reader.start(pieces)
        job = self._thread.submit(self._write_weight, placed, dtype, ahead, source)
        self._jobs.append((job, placed.bytes))

    def _write_weight(
        self, placed: Placed, dtype: torch.dtype, pieces: Iterator[Tensor], source: str
    ) -> None:
        if self._given_up.is_set():
            return
        try:
            self._write(torch.zeros(placed.offset - self._written, dtype=torch.uint8), torch.uint8, "")
            rows = 0
            for piece in pieces:
                if self._given_up.is_set():
                    return
                rows += self._write_piece(piece, placed.shape, dtype, source)
                del piece  # before the next one is read
            if rows != (placed.shape[0] if placed.shape else 1):
                raise CheckpointError(f"{source}: got {rows} rows, expected shape {placed.shape}")
        except BaseException:
            self._given_up.set()  # the file is lost: nothing more need be written
            raise

    def _write_piece(self, piece: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: str) -> int:
        """Write some rows and say how many."""
        if piece.shape[1:] != shape[1:] or piece.ndim != len(shape):
            raise CheckpointError(f"{source}: got rows of shape {tuple(piece.shape)}, expected {shape}")
        self._write(piece, dtype, source)
        return piece.shape[0] if shape else 1

    def _write(self, numbers: Tensor, dtype: torch.dtype, source: str) -> None:
        """Write numbers in another dtype, or the same."""
        left = numbers.reshape(-1)
        while left.numel():
            room = self._file.room()
            count = min(left.numel(), room.numel() // dtype.itemsize, _AT_ONCE)
            size = count * dtype.itemsize
            result = self._converted(left[:count], room[:size].view(dtype))
            if not _finite(result):  # neither NaN nor infinity becomes finite by conversion
                raise _not_finite(numbers, dtype, source)
            self._file.advance(size)
            self._written += size
            left = left[count:]

    def _converted(self, numbers: Tensor, result: Tensor) -> Tensor:
        """Fill `result` [N] with `numbers` [N], at most `_AT_ONCE`."""
        if numbers.dtype != result.dtype and {numbers.dtype, result.dtype} <= _HALVES:
            numbers = self._wide[: len(numbers)].copy_(numbers)
        return result.copy_(numbers)


def _not_finite(piece: Tensor, dtype: torch.dtype, source: str) -> CheckpointError:
    if not _finite(piece):
        return CheckpointError(f"{source}: holds NaN or infinity; the checkpoint is damaged")
    most, name = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    return CheckpointError(
        f"{source}: got values up to {piece.abs().max().item():.4g}, which {name} cannot hold ({most:.6g}); "
        "export with --dtype float32" + (" or bfloat16" if dtype is torch.float16 else "")
    )


def _finite(tensor: Tensor) -> bool:
    """The extremes are finite only if all numbers are; finding them is far faster than asking each number."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())
