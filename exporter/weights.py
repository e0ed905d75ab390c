"""The bundle's weight file: every weight once, streamed tensor by tensor from the checkpoints.

Graphs refer to it by offset. Two graphs that use the same weight in the same dtype share its bytes; on
load they share the pages that the file is mapped to.
"""

from __future__ import annotations

from collections.abc import Callable
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


class WeightWriter:
    """Appends weights to one file. Use as a context manager."""

    def __init__(self, directory: Path):
        """Create `WEIGHT_FILE` in `directory`."""
        self._file = open(directory / WEIGHT_FILE, "wb")  # noqa: SIM115 - closed by __exit__
        self._placed: dict[tuple[str, torch.dtype], Placed] = {}

    def __enter__(self) -> WeightWriter:
        """Give the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def add(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], Tensor]
    ) -> tuple[Placed, int]:
        """Place a weight; `load` is called only if it was not placed before in this dtype.

        Returns:
            Its place, and the bytes written for it now.

        Raises:
            CheckpointError: the tensor has another shape, or holds NaN or infinity, or does not fit the
                range of `dtype`.
        """
        known = self._placed.get((key, dtype))
        if known is not None:
            return known, 0
        tensor = load()
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{key}: got shape {tuple(tensor.shape)}, expected {shape}")
        tensor = _cast(key, tensor, dtype)
        data = (
            tensor.contiguous().view(torch.uint8).numpy()
            if tensor.ndim
            else tensor[None].view(torch.uint8).numpy()
        )
        align = _PAGE_BYTES if data.nbytes >= _SMALL_BYTES else 64
        start = self._file.tell()
        offset = -(-start // align) * align
        self._file.write(b"\0" * (offset - start))
        self._file.write(data.data)
        suffix = "" if not any(k == key for k, _ in self._placed) else f".{_IR_DTYPES[dtype].lower()}"
        placed = Placed(key + suffix, WEIGHT_FILE, offset, data.nbytes, shape, _IR_DTYPES[dtype])
        self._placed[(key, dtype)] = placed
        return placed, offset - start + data.nbytes


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{key}: holds NaN or infinity; the checkpoint is damaged")
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(cast).all():
        raise CheckpointError(
            f"{key}: got values up to {tensor.abs().max().item():.4g}, which float16 cannot hold (65504); "
            "export with --dtype bfloat16 or float32"
        )
    return cast
