"""Several bundles at once, opened and named, with prompts that are the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from ..bundle.errors import RequestError
from ..runtime.backends import ONNXRUNTIME
from ..runtime.decoder import Decoder
from .measure import Task
from .own import encode, tasks_from_prompts
from .prompts import PromptSet, RandomPrompts
from .run import check_run


@dataclass(frozen=True)
class BenchSettings:
    """How a run is made.

    Attributes:
        max_new_tokens: most tokens produced for each prompt.
        repeats: runs of each prompt and way, of which the median counts.
        verify_rows: see `Decoder.open`.
        threads: of every bundle and every other program; None takes the physical cores.
        provider: see `Decoder.open`.
        backend: see `Decoder.open`.
        contexts: lengths of context in tokens to measure as well.
    """

    max_new_tokens: int = 128
    repeats: int = 1
    verify_rows: int | None = None
    threads: int | None = None
    provider: str = "cpu"
    backend: str = ONNXRUNTIME
    contexts: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpenBundle:
    """A bundle in a run.

    Attributes:
        label: the folder's name, or its path where two folders share a name.
        decoder: opened.
        open_ms: how long that took: files hashed, weights read, passes timed to choose the rows.
    """

    label: str
    decoder: Decoder
    open_ms: float


def open_bundles(stack: ExitStack, bundles: Sequence[Path], settings: BenchSettings) -> list[OpenBundle]:
    """Open bundles; the stack closes them.

    Raises:
        RequestError: a bundle is named twice.
        BundleError, ProviderError: see `Decoder.open`.
    """
    if len(set(bundles)) < len(bundles):
        raise RequestError(f"bundles: got {[str(b) for b in bundles]}, expected each once")
    names = [bundle.name for bundle in bundles]
    opened = []
    for bundle, name in zip(bundles, names, strict=True):
        began = perf_counter()
        decoder = Decoder.open(
            bundle,
            provider=settings.provider,
            threads=settings.threads,
            verify_rows=settings.verify_rows,
            backend=settings.backend,
        )
        stack.enter_context(decoder)
        open_ms = (perf_counter() - began) * 1000.0
        opened.append(OpenBundle(name if names.count(name) == 1 else str(bundle), decoder, open_ms))
    return opened


def common_tasks(
    opened: Sequence[OpenBundle], prompts: PromptSet | RandomPrompts, settings: BenchSettings
) -> tuple[PromptSet, list[Task]]:
    """Token ids and answer lengths for all: those of the first bundle.

    Raises:
        RequestError: there is no prompt, one is not possible, or a bundle has other tokens for it.
    """
    first = opened[0].decoder
    chosen = prompts.draw(first.manifest.target.vocab_size) if isinstance(prompts, RandomPrompts) else prompts
    check_run(chosen.prompts, settings.repeats)
    ids = encode(first, chosen.prompts)
    for other in opened[1:]:
        if encode(other.decoder, chosen.prompts) != ids:
            raise RequestError(
                f"bundles: {other.label} has other tokens for these prompts than {opened[0].label}, expected "
                "bundles of one tokenizer and chat template; time them one by one"
            )
    return chosen, tasks_from_prompts(first, ids, settings.max_new_tokens, chosen.length)
