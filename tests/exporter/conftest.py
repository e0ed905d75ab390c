"""Tiny random pairs, exported once a session and only if a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tiny_bundles import TinyBundle, exported


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyBundle]:
    """Give the bundle of a name in `tiny_bundles.NAMES`; the first call exports it."""
    made: dict[str, TinyBundle] = {}

    def give(name: str) -> TinyBundle:
        if name not in made:
            made[name] = exported(name, tmp_path_factory.mktemp(name))
        return made[name]

    return give


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: tiny models are slower on two, and many times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
