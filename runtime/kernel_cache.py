"""Kernels that TensorRT-RTX compiled while running, kept from one process to the next.

They are compiled for the shapes that come, which makes the first answers of a process slow. Where the
environment variable names a directory, they are read from there when an engine is opened and written back
when it is closed. A file belongs to one engine and one GPU generation; one that the library does not take is
replaced. Nothing depends on it: what goes wrong with it is logged, and kernels are compiled again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ..bundle.engines import engine_name
from ..bundle.files import atomic_file
from ..bundle.manifest import EngineInfo

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "DFLASH_KERNEL_CACHE"


def kernel_file(info: EngineInfo, compute_capability: str) -> Path | None:
    """Where the kernels of an engine are kept; None if they are not.

    Args:
        info: the engine. Its file is called after its content.
        compute_capability: of the GPU.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    content = Path(info.file).stem.rpartition(".")[2]
    name = f"{engine_name(info.graph, info.backend)}-{info.version}-{compute_capability}-{content}.kernels"
    return Path(directory) / name


def load_kernels(cache: Any, path: Path | None) -> None:
    """Fill a library's new runtime cache from a file, if there is one that it takes."""
    if path is None or not path.is_file():
        return
    try:
        taken = cache.deserialize(path.read_bytes())
    except Exception as cause:  # bindings raise what they like
        taken, reason = False, str(cause)
    else:
        reason = "the library does not take them"
    if not taken:
        logger.warning("%s: kept kernels are not used (%s); they are compiled again", path.name, reason)


def save_kernels(cache: Any, path: Path | None) -> None:
    """Write a library's runtime cache to a file, whole or not at all."""
    if path is None:
        return
    try:
        content = cache.serialize()
        if content is None:
            raise ValueError("the library gives none")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as new:
            new.write_bytes(bytes(content))
    except Exception as cause:  # bindings raise what they like; so does a full disk
        logger.warning("%s: compiled kernels are not kept (%s)", path.name, cause)
