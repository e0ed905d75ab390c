"""The target for programs that read Hugging Face folders. Runs in a program's process."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_gguf(target: Path) -> bool:
    """Whether a checkpoint is a single GGUF file."""
    return target.suffix.lower() == ".gguf"


def from_pretrained(loader: Any, target: Path, **options: Any) -> Any:
    """Load a model or tokenizer with transformers; a GGUF file's weights are dequantised."""
    if is_gguf(target):
        return loader.from_pretrained(str(target.parent), gguf_file=target.name, **options)
    return loader.from_pretrained(str(target), **options)


def dense_folder(target: Path, cache: Path) -> Path:
    """A Hugging Face folder with the target's weights in float32: itself, or one made in the cache."""
    if not is_gguf(target):
        return target

    def make(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from_pretrained(AutoModelForCausalLM, target, dtype=torch.float32).save_pretrained(folder)
        from_pretrained(AutoTokenizer, target).save_pretrained(folder)

    return made_once(cache / f"{target.stem}-{fingerprint(target)}-float32", make)


def fingerprint(target: Path) -> str:
    """Eight letters that change when the checkpoint does: its place, sizes and times."""
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    seen = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:8]


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills if it is not there yet; whole or not at all."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(work)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
