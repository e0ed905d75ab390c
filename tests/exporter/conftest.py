"""Tiny random pairs, exported once a session and only if a test asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
