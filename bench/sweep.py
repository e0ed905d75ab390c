"""Rows verified in a round x bundle x length of context: where a block pays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bundle.errors import RequestError, field_error
from ..bundle.manifest import Manifest
from ..bundle.tensors import TARGET
from ..runtime.stats import Mode
from .context import context_tasks
from .figures import bundle_figures, ratio
from .machine import cpu_count, cpu_name
from .measure import SETTLE_S, Progress, Task, Way, interleave
from .opened import BenchSettings, OpenBundle, common_tasks, open_bundles
from .own import PLAIN, PLAIN_EXACT, SPECULATIVE, OwnWay, own_ways, way_name
from .prompts import PromptSet, RandomPrompts
from .run import versions

ADAPTIVE = "adaptive"
Rows = int | str
"""A number of rows, or `ADAPTIVE`."""


def sweep(
    bundles: Sequence[Path],
    prompts: PromptSet | RandomPrompts,
    settings: BenchSettings | None = None,
    rows: Sequence[int] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time speculative decoding with every number of rows, behind every length of context.

    Args:
        bundles: directories, at least one.
        prompts: what to decode.
        settings: how; without `contexts` the prompts are taken as they are.
        rows: numbers to try; none takes all that the bundles allow. The adaptive choice is always tried, too.
        progress: is told how many runs of how many are done, of one bundle and context.

    Returns:
        JSON values: ``cells``, one for each bundle, context (0: the prompts as they are) and number of rows;
        ``settings``, ``versions``, ``cpu``. A cell's ``bits`` are those of the rounded weights of the
        target's layers, null where none are rounded.

    Raises:
        RequestError: a number of rows is not possible, or see `compare`.
        BundleError, ProviderError, EngineError: see `Decoder`.
    """
    settings = replace(settings or BenchSettings(), verify_rows=None)
    with ExitStack() as stack:
        opened = open_bundles(stack, bundles, settings)
        chosen, tasks = common_tasks(opened, prompts, settings)
        tried = {one.label: _rows(one, rows) for one in opened}
        most = min(one.decoder.settings.max_length for one in opened)
        ids = [task.ids for task in tasks]
        behind = {c: context_tasks(ids, c, settings.max_new_tokens, most) for c in settings.contexts}
        cells = [
            cell
            for length, some in (behind or {0: tasks}).items()
            for one in opened
            for cell in _cells(one, length, some, tried[one.label], settings, progress)
        ]
        effective = dict(opened[0].decoder.effective)
        return {
            "cells": cells,
            "settings": {
                "prompts": chosen.name,
                "prompt_count": len(tasks),
                "length": chosen.length.value,
                "max_new_tokens": settings.max_new_tokens,
                "repeats": settings.repeats,
                "provider": effective.get("provider"),
                "threads": effective.get("threads"),
                "cpus": cpu_count(),
            },
            "versions": versions(effective),
            "cpu": cpu_name(),
        }


def _rows(one: OpenBundle, rows: Sequence[int]) -> list[Rows]:
    most = one.decoder.manifest.draft.proposals + 1
    for count in rows:
        if not 2 <= count <= most:
            expected = f"2 to {most} (anchor and proposals of {one.label})"
            raise field_error(RequestError, "rows", count, expected)
    if len(set(rows)) < len(rows):
        raise RequestError(f"rows: got {list(rows)}, expected each once")
    return [*(rows or range(2, most + 1)), ADAPTIVE]


def _cells(
    one: OpenBundle,
    context: int,
    tasks: Sequence[Task],
    rows: Sequence[Rows],
    settings: BenchSettings,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    plain = [way for way in own_ways(one.decoder, one.label) if way.mode is Mode.PLAIN]
    ways = {count: _speculative(one, count) for count in rows}
    every: list[Way] = [*plain, *ways.values()]
    samples = interleave(every, tasks, settings.repeats, progress, SETTLE_S)
    fast, exact = (samples[way_name(one.label, name)] for name in (PLAIN, PLAIN_EXACT))
    cells = []
    for count, way in ways.items():
        found = bundle_figures(fast, exact, samples[way.name])
        speculative = found[SPECULATIVE]
        cells.append(
            {
                "bundle": one.label,
                "dtype": one.decoder.manifest.dtype.value,
                "quantized": one.decoder.manifest.quantization is not None,
                "bits": _bits(one.decoder.manifest),
                "context": context,
                "rows": count,
                "tokens_per_s": speculative["tokens_per_s"],
                "plain_tokens_per_s": found[PLAIN]["tokens_per_s"],
                "ms_per_token": ratio(1000.0, speculative["tokens_per_s"]),
                **{key: speculative[key] for key in ("verify_ms", "draft_ms", "other_share")},
                **{key: found[key] for key in ("speedup", "bound", "acceptance_length", "tokens_identical")},
            }
        )
    return cells


def _bits(manifest: Manifest) -> int | None:
    """Of the rounded weights of the target's layers."""
    if manifest.quantization is None:
        return None
    return 4 if "int4" in manifest.graphs[TARGET].passes else 8


def _speculative(one: OpenBundle, rows: Rows) -> OwnWay:
    fixed = rows if isinstance(rows, int) else None
    decoder = one.decoder.with_settings(exact=True, verify_rows=fixed)
    return OwnWay(way_name(one.label, f"{rows} rows"), decoder, Mode.SPECULATIVE)
