"""Tiny random pairs, exported once a run of all tests and only if a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tiny_bundles import TinyBundle, exported, in_folder


@pytest.fixture(scope="session")
def tiny_bundle(run_folder: Path) -> Callable[[str], TinyBundle]:
    """Give the bundle of a name in `tiny_bundles.NAMES`; the first call of any process exports it."""
    made: dict[str, TinyBundle] = {}

    def give(name: str) -> TinyBundle:
        if name not in made:
            folder = run_folder / "tiny" / name
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                pair = in_folder(folder)
                made[name] = pair if pair.bundle.exists() else exported(name, folder)
        return made[name]

    return give


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: tiny models are slower on two, and many times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
