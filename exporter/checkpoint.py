"""Checkpoints as files: a config, named tensors read one at a time, and the hashes of what was read.

Three kinds: a Hugging Face folder (config.json, safetensors single or sharded), a hub id (resolved to
such a folder by huggingface_hub), and a GGUF file (see `gguf_checkpoint`). Pickled weights are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..bundle.errors import CheckpointError, UnsupportedError, field_error
from .source_files import SourceFiles

if TYPE_CHECKING:
    import torch

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype (torch's name, e.g. ``bfloat16``) and shape of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """A checkpoint that was opened; nothing is read before it is asked for."""

    @property
    def format(self) -> str:
        """``safetensors`` or ``gguf``."""

    @property
    def name(self) -> str:
        """Folder or file name, or hub id, for messages and provenance; never an absolute path."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json, or what a GGUF file's metadata says in the same words."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or {}."""

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Every stored tensor by name."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype (GGUF: dequantised to float32)."""

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows start..stop - 1 of a tensor as `read` gives them; no more than they stays in memory."""

    def position(self, name: str) -> tuple[Path, int]:
        """File and first byte of a tensor: who reads in this order goes through the files from end to end."""

    @property
    def source(self) -> SourceFiles:
        """The files that are used."""

    def files(self) -> tuple[Path, ...]:
        """Their paths, for provenance."""

    def tokenizer_folder(self) -> Path | None:
        """Folder with tokenizer.json and its companions, or None."""


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors."""

    format = "safetensors"

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Open `folder`.

        Raises:
            CheckpointError: config.json or the weights are missing, damaged or contradict the index.
            UnsupportedError: only pickled weights are there.
        """
        self.folder = Path(folder)
        self.name = name or self.folder.resolve().name
        self.config = self._json("config.json", needed=True)
        self.generation_config = self._json("generation_config.json", needed=False)
        self._shards = self._find_shards()
        self.source = SourceFiles((self.folder / "config.json", *self._shards))
        self._positions: dict[str, tuple[Path, int]] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for shard in self._shards:
            for entry, first_byte in _entries(shard):
                if entry.name in self.tensors:
                    raise CheckpointError(f"{self.name}: tensor {entry.name!r} is in two shards")
                self._positions[entry.name] = (shard, first_byte)
                self.tensors[entry.name] = entry
        self._check_index()

    def _json(self, file: str, needed: bool) -> dict[str, Any]:
        path = self.folder / file
        if not path.is_file():
            if needed:
                raise CheckpointError(
                    f"checkpoint: no {file} in {str(self.folder)!r}, expected a Hugging Face folder"
                )
            return {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as cause:
            raise CheckpointError(f"{self.name}/{file}: not valid JSON ({cause})") from cause
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.name}/{file}: got {type(data).__name__}, expected an object")
        return data

    def _find_shards(self) -> tuple[Path, ...]:
        shards = tuple(sorted(self.folder.glob("*.safetensors")))
        if shards:
            return shards
        for pattern in _PICKLES:
            if any(self.folder.glob(pattern)):
                raise UnsupportedError(
                    f"{self.name}: has pickled weights only ({pattern}), which can run code when loaded; "
                    "convert them to safetensors first"
                )
        raise CheckpointError(f"{self.name}: no *.safetensors, expected the weights beside config.json")

    def _check_index(self) -> None:
        index = self._json("model.safetensors.index.json", needed=False).get("weight_map", {})
        for tensor, shard in index.items():
            if tensor not in self.tensors:
                raise CheckpointError(
                    f"{self.name}: the index places tensor {tensor!r} in {shard}, which lacks it; "
                    "download the missing shard"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype; memory-mapped until copied."""
        from safetensors import SafetensorError, safe_open

        shard, _ = self._positions[name]
        try:
            with safe_open(shard, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as cause:
            raise CheckpointError(f"{self.name}/{shard.name}: cannot read {name!r} ({cause})") from cause
        return tensor

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read some rows.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
            UnsupportedError: they are of a dtype that needs more than a conversion.
        """
        import torch

        entry, (shard, first_byte) = self.tensors[name], self._positions[name]
        if entry.dtype not in _DTYPES.values():
            raise field_error(
                UnsupportedError,
                f"{self.name}: tensor {name!r} dtype",
                entry.dtype,
                "one of " + ", ".join(_DTYPES.values()),
            )
        dtype: torch.dtype = getattr(torch, entry.dtype)
        row_bytes = dtype.itemsize * math.prod(entry.shape[1:])
        data = self.source.read(shard, first_byte + start * row_bytes, (stop - start) * row_bytes)
        return data.view(dtype).reshape(stop - start, *entry.shape[1:])

    def position(self, name: str) -> tuple[Path, int]:
        """See `Checkpoint`."""
        return self._positions[name]

    def files(self) -> tuple[Path, ...]:
        """config.json and the shards."""
        return self.source.paths

    def tokenizer_folder(self) -> Path | None:
        """The folder itself if it has a tokenizer.json."""
        return self.folder if (self.folder / "tokenizer.json").is_file() else None


def _entries(shard: Path) -> Iterator[tuple[TensorEntry, int]]:
    """Read a safetensors header and check that the file is as long as it says.

    Returns:
        Tensors, each with its first byte in the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="pt"), open(shard, "rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(
            f"{shard.name}: not a whole safetensors file ({cause}); download it again"
        ) from cause
    for name, info in header.items():
        if name != "__metadata__":
            first_byte = _LENGTH_BYTES + header_bytes + info["data_offsets"][0]
            dtype = _DTYPES.get(info["dtype"], info["dtype"])
            yield TensorEntry(name, dtype, tuple(info["shape"])), first_byte


_LENGTH_BYTES = 8  # of the header's length, before the header
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "BOOL": "bool",
    "I32": "int32",
}


def checkpoint_from_source(source: str) -> Checkpoint:
    """Open a checkpoint from a folder, a GGUF file or a hub id (``owner/name``).

    Raises:
        CheckpointError: nothing there, or not a checkpoint.
    """
    path = Path(source)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"checkpoint: no file {source!r}; check the path")
        from .gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    if path.exists():
        raise CheckpointError(f"checkpoint: {source!r} is neither a folder, a .gguf file nor a hub id")
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return SafetensorsCheckpoint(_download(source), name=source)
    raise CheckpointError(f"checkpoint: {source!r} does not exist; give a folder, a .gguf file or a hub id")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            # mask_embedding.pt is never loaded; its presence has to be seen, so that it is refused by name.
            snapshot_download(
                hub_id,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*", "mask_embedding.pt"],
            )
        )
    except Exception as cause:  # the hub's client raises many kinds; all mean the same to the user
        raise CheckpointError(
            f"{hub_id}: no such folder here, and the hub did not give it ({cause})"
        ) from cause
