"""The bundle's weight file: every weight once, streamed piece by piece from the checkpoints.

Graphs refer to it by offset. Two graphs that use the same weight in the same dtype share its bytes; on
load they share the pages that the file is mapped to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..bundle.errors import CheckpointError

WEIGHT_FILE = "weights.bin"

_IR_DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.int64: "INT64",
}
_PAGE_BYTES = 4096
_SMALL_BYTES = 1 << 20


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
        bytes: size of the file so far.
    """

    def __init__(self) -> None:
        """Start with an empty file."""
        self._placed: dict[tuple[str, torch.dtype], Placed] = {}
        self.bytes = 0

    def add(
        self,
        key: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        pieces: Iterable[Tensor],
        progress: Callable[[int], None],
    ) -> Placed:
        """Place a weight.

        Args:
            key: its name across graphs.
            dtype: what it is stored as.
            shape: what it must be.
            pieces: its rows in order; read only to be written, and only if it was not placed before in this
                dtype.
            progress: is told the bytes of each piece that was written.

        Raises:
            CheckpointError: the tensor has another shape, or holds NaN or infinity, or does not fit the
                range of `dtype`.
        """
        known = self._placed.get((key, dtype))
        if known is not None:
            return known
        size = math.prod(shape) * dtype.itemsize
        align = _PAGE_BYTES if size >= _SMALL_BYTES else 64
        self._pad(-self.bytes % align)
        suffix = "" if not any(k == key for k, _ in self._placed) else f".{_IR_DTYPES[dtype].lower()}"
        placed = Placed(key + suffix, WEIGHT_FILE, self.bytes, size, shape, _IR_DTYPES[dtype])
        self._fill(key, dtype, placed, pieces, progress)
        self._placed[(key, dtype)] = placed
        return placed

    def _pad(self, count: int) -> None:
        self.bytes += count

    def _fill(
        self,
        key: str,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        placed: Placed,
        pieces: Iterable[Tensor],  # noqa: ARG002
        progress: Callable[[int], None],  # noqa: ARG002
    ) -> None:
        self.bytes += placed.bytes


class WeightWriter(WeightPlan):
    """Appends weights to one file, piece by piece. Use as a context manager."""

    def __init__(self, directory: Path):
        """Create `WEIGHT_FILE` in `directory`."""
        super().__init__()
        self._file = open(directory / WEIGHT_FILE, "wb")  # noqa: SIM115 - closed by __exit__
        self._digest = hashlib.sha256()
        # Hashing takes as long as all the rest: it goes on beside writing and reading the next piece.
        self._hasher = ThreadPoolExecutor(max_workers=1)
        self._hashed: Future[None] | None = None

    def __enter__(self) -> WeightWriter:
        """Give the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._hasher.shutdown()
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of the file as it is now."""
        if self._hashed is not None:
            self._hashed.result()
        return self._digest.hexdigest()

    def _pad(self, count: int) -> None:
        self._write(b"\0" * count)

    def _fill(
        self,
        key: str,
        dtype: torch.dtype,
        placed: Placed,
        pieces: Iterable[Tensor],
        progress: Callable[[int], None],
    ) -> None:
        shape, rows = placed.shape, 0
        for piece in pieces:
            if piece.shape[1:] != shape[1:] or piece.ndim != len(shape):
                raise CheckpointError(f"{key}: got rows of shape {tuple(piece.shape)}, expected {shape}")
            rows += piece.shape[0] if shape else 1
            before = self.bytes
            self._write(_bytes(_cast(key, piece, dtype)))
            del piece  # before the next one is read
            progress(self.bytes - before)
        if rows != (shape[0] if shape else 1):
            raise CheckpointError(f"{key}: got {rows} rows, expected shape {shape}")

    def _write(self, data: bytes | memoryview) -> None:
        if self._hashed is not None:
            self._hashed.result()
        self._hashed = self._hasher.submit(self._digest.update, data)
        self._file.write(data)
        self.bytes += len(data)


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to(dtype)
    if not _finite(tensor):
        raise CheckpointError(f"{key}: holds NaN or infinity; the checkpoint is damaged")
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not _finite(cast):
        raise CheckpointError(
            f"{key}: got values up to {tensor.abs().max().item():.4g}, which float16 cannot hold (65504); "
            "export with --dtype bfloat16 or float32"
        )
    return cast


def _finite(tensor: Tensor) -> bool:
    """The extremes are finite only if all numbers are; finding them is far faster than asking each number."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
