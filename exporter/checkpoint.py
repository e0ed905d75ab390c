"""Checkpoints as files: a config, named tensors read one at a time, and the hashes of what was read.

Three kinds: a Hugging Face folder (config.json, safetensors single or sharded), a hub id (resolved to
such a folder by huggingface_hub), and a GGUF file (see `gguf_checkpoint`). Pickled weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..bundle.errors import CheckpointError, UnsupportedError

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

    def files(self) -> tuple[Path, ...]:
        """The files that were used, for provenance."""

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
        self._owner: dict[str, Path] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for shard in self._shards:
            for entry in _entries(shard):
                if entry.name in self._owner:
                    raise CheckpointError(f"{self.name}: tensor {entry.name!r} is in two shards")
                self._owner[entry.name] = shard
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
            if tensor not in self._owner:
                raise CheckpointError(
                    f"{self.name}: the index places tensor {tensor!r} in {shard}, which lacks it; "
                    "download the missing shard"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype; memory-mapped until copied."""
        return self._get(name, lambda file: file.get_tensor(name))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read some rows. The file is opened anew: what was read counts as memory until it is closed."""
        return self._get(name, lambda file: file.get_slice(name)[start:stop])

    def _get(self, name: str, take: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        shard = self._owner[name]
        try:
            with safe_open(shard, framework="pt") as file:
                return take(file)
        except (SafetensorError, OSError) as cause:
            raise CheckpointError(f"{self.name}/{shard.name}: cannot read {name!r} ({cause})") from cause

    def files(self) -> tuple[Path, ...]:
        """config.json and the shards."""
        return (self.folder / "config.json", *self._shards)

    def tokenizer_folder(self) -> Path | None:
        """The folder itself if it has a tokenizer.json."""
        return self.folder if (self.folder / "tokenizer.json").is_file() else None


def _entries(shard: Path) -> Iterator[TensorEntry]:
    """Read a safetensors header and check that the file is as long as it says."""
    from safetensors import SafetensorError, safe_open

    try:
        with ExitStack() as stack:
            file = stack.enter_context(safe_open(shard, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(name)
                yield TensorEntry(
                    name, _DTYPES.get(piece.get_dtype(), piece.get_dtype()), tuple(piece.get_shape())
                )
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(
            f"{shard.name}: not a whole safetensors file ({cause}); download it again"
        ) from cause


_DTYPES = {
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
