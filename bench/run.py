"""One bundle: plain and speculative decoding of the same prompts, timed in one run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..bundle.errors import RequestError, field_error
from ..runtime.backends import ONNXRUNTIME
from ..runtime.decoder import Decoder
from ..runtime.request import Prompt
from .figures import bundle_figures
from .machine import cpu_name
from .measure import Progress, Samples, interleave
from .own import OWN_WAYS, Length, own_ways, tasks_from_prompts, uses_chat, way_name


def run_bench(
    bundle: Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    verify_rows: int | None = None,
    threads: int | None = None,
    provider: str = "cpu",
    repeats: int = 1,
    progress: Progress | None = None,
    backend: str = ONNXRUNTIME,
) -> dict[str, Any]:
    """Open a bundle and time it; see `bench_decoder` for the figures.

    Args:
        bundle: the directory.
        prompts: texts, put into the chat template if the bundle has one, or token ids.
        max_new_tokens: most tokens produced for each.
        verify_rows: see `Decoder.open`.
        threads: see `Decoder.open`.
        provider: see `Decoder.open`.
        repeats: runs of each prompt and way, of which the median counts.
        progress: is told how many runs of how many are done.
        backend: see `Decoder.open`.

    Raises:
        RequestError: there is no prompt, or a prompt or setting is not possible.
        BundleError, ProviderError, EngineError: see `Decoder`.
    """
    with Decoder.open(
        bundle, provider=provider, threads=threads, verify_rows=verify_rows, backend=backend
    ) as decoder:
        return bench_decoder(decoder, prompts, max_new_tokens, repeats, progress)


def bench_decoder(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    repeats: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time an open decoder.

    Every way decodes an answer as far as the model takes it, or to `max_new_tokens`.

    Returns:
        JSON values: what `bundle_report` gives, and the settings, versions and machine.

    Raises:
        RequestError: there is no prompt, or one is not possible.
    """
    check_run(prompts, repeats)
    tasks = tasks_from_prompts(decoder, prompts, max_new_tokens, Length.ANSWER)
    samples = interleave(own_ways(decoder), tasks, repeats, progress)
    return {
        **bundle_report(decoder, samples),
        "settings": {
            **decoder.effective,
            "max_new_tokens": max_new_tokens,
            "prompts": len(prompts),
            "repeats": repeats,
            "chat": uses_chat(decoder),
        },
        "versions": versions(decoder.effective),
        "cpu": cpu_name(),
    }


def check_run(prompts: Sequence[Prompt], repeats: int) -> None:
    """Refuse a run that measures nothing.

    Raises:
        RequestError: there is no prompt, or no repeat.
    """
    if not prompts:
        raise RequestError("prompts: got none, expected at least one")
    if repeats < 1:
        raise field_error(RequestError, "repeats", repeats, ">= 1")


def bundle_report(decoder: Decoder, samples: Samples, label: str = "") -> dict[str, Any]:
    """A bundle's figures (see `bundle_figures` and `way_figures`) and what it really ran with.

    Args:
        decoder: the bundle, opened.
        samples: of its ways, by their names with the label.
        label: see `own_ways`.
    """
    return {
        **bundle_figures(*(samples[way_name(label, name)] for name in OWN_WAYS)),
        "bundle": decoder.manifest.name,
        "threads": decoder.effective.get("threads"),
        "effective": dict(decoder.effective),
    }


def versions(effective: Mapping[str, object]) -> dict[str, Any]:
    """Versions of what computes."""
    return {
        "dflash-deploy": __version__,
        str(effective.get("engine")): effective.get("engine_version"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
