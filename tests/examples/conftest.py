"""The examples as modules, and a bundle small enough to run them in a moment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from text_bundle import write_text_bundle

EMBED = Path(__file__).parents[2] / "examples" / "embed"


@pytest.fixture(scope="session", autouse=True)
def embed() -> Path:
    """The folder of the examples, where a script finds its neighbours."""
    sys.path.append(str(EMBED))
    return EMBED


@pytest.fixture(scope="session")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with a tokenizer. Tests must not change it."""
    directory = tmp_path_factory.mktemp("text") / "bundle"
    write_text_bundle(directory)
    return directory
