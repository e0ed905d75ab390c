"""What a target computes over a text: sizes of channels, and how probable the text is to it.

Shapes: S tokens of a window, K channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bundle import tensors as t
from ...bundle.manifest import Manifest
from ..bundle_graphs import TargetGraph
from .linear import Array

WINDOW = 128
"""Tokens of the text that are seen together."""


@dataclass(frozen=True)
class Scored:
    """How a target reads a text.

    Attributes:
        surprise: [tokens], minus the log-probability of each token behind the ones before it.
        choices: [tokens], the most probable token in each place.
    """

    surprise: NDArray[np.float64]
    choices: NDArray[np.int64]


def cut(ids: Sequence[int]) -> list[list[int]]:
    """Cut a text into windows; a short rest is left out."""
    parts = [list(ids[begin : begin + WINDOW]) for begin in range(0, len(ids), WINDOW)]
    return [part for part in parts if len(part) >= WINDOW // 2]


def windows(ids: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Cut a text into windows, in turn for calibration and for the check."""
    parts = cut(ids)
    return parts[0::2], parts[1::2]


def channel_sizes(
    bundle: Path, manifest: Manifest, values: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, Array]:
    """Largest absolute value of each channel of inner values of the target graph, [K] each.

    Args:
        bundle: the directory.
        manifest: its manifest.
        values: names of values [rows, K].
        texts: token ids.
    """
    sizes: dict[str, Array] = {}
    for got in _inner(bundle, manifest, values, texts):
        for name, rows in got.items():
            largest = np.abs(rows).reshape(-1, rows.shape[-1]).max(axis=0)
            sizes[name] = np.maximum(sizes.get(name, largest), largest)
    return sizes


def channel_powers(
    bundle: Path, manifest: Manifest, values: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, Array]:
    """Mean square of each channel of inner values of the target graph, [K] each; see `channel_sizes`."""
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for got in _inner(bundle, manifest, values, texts):
        for name, rows in got.items():
            flat = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
            sums[name] = sums.get(name, np.zeros(flat.shape[1])) + np.square(flat).sum(axis=0)
        count += len(flat)
    return {name: (total / count).astype(np.float32) for name, total in sums.items()}


def _inner(
    bundle: Path, manifest: Manifest, values: Sequence[str], texts: Sequence[Sequence[int]]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Inner values of the target graph, text by text."""
    info = replace(manifest.graphs[t.TARGET], stages=tuple(values))
    graph = TargetGraph(bundle, replace(manifest, graphs={**manifest.graphs, t.TARGET: info}))
    for text in texts:
        graph.reset(len(text))
        yield graph.run(np.array([text]), 0, wanted=values)


def score(bundle: Path, manifest: Manifest, texts: Sequence[Sequence[int]]) -> Scored:
    """Let a bundle's target read texts, each by itself."""
    surprise, choices = [], []
    for text, logs in zip(texts, _log_probabilities(bundle, manifest, texts), strict=True):
        surprise.append(-logs[np.arange(len(text) - 1), text[1:]])
        choices.append(logs[:-1].argmax(axis=-1))
    return Scored(np.concatenate(surprise), np.concatenate(choices))


def expected_counts(bundle: Path, manifest: Manifest, texts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """How often a bundle's target expects each token in texts, each read by itself: [V]."""
    counts = np.zeros(manifest.target.vocab_size)
    for logs in _log_probabilities(bundle, manifest, texts):
        counts += np.exp(logs).sum(axis=0)
    return counts


def _log_probabilities(
    bundle: Path, manifest: Manifest, texts: Sequence[Sequence[int]]
) -> Iterator[NDArray[np.float64]]:
    """What a bundle's target expects behind each token of each text, [S, V] each."""
    graph = TargetGraph(bundle, manifest)
    for text in texts:
        graph.reset(len(text))
        logits = graph.run(np.array([text]), 0, wanted=[t.LOGITS])[t.LOGITS][0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        yield logits
