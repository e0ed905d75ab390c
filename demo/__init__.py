"""The whole path on a real pair. The draft's weights and the prompts are data of this package."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

DRAFT = _HERE / "draft"


def demo_prompts() -> list[str]:
    """The demo's prompts."""
    return (_HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()


def demo_reference() -> Path:
    """What the originals computed for these prompts, as JSON: token ids and acceptance lengths."""
    return _HERE / "reference.json"
