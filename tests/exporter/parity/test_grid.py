"""B01 and A01: the graphs at every size the loop may ask for, against originals that start from scratch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.manifest import Manifest, manifest_from_bundle
from dflash_deploy.exporter.bundle_graphs import DraftGraph, TargetGraph
from dflash_deploy.exporter.checkpoint import checkpoint_from_source
from dflash_deploy.exporter.parity.originals import (
    DraftOriginal,
    DraftRun,
    Question,
    TargetOriginal,
    TargetRun,
    draft_original,
)
from tiny_bundles import TinyBundle

CAPACITY = 64
KINDS = ["dflash2", "dflash", "speculators", "speculators2"]


@dataclass
class Loaded:
    """A tiny bundle's graphs and their originals, with two sequences that differ."""

    manifest: Manifest
    target: TargetGraph
    draft: DraftGraph
    target_original: TargetOriginal
    draft_original: DraftOriginal
    ids: np.ndarray  # [2, S]
    runs: list[TargetRun]

    def features(self, rows: slice = slice(None)) -> np.ndarray:
        """[2, S, F] by the original target."""
        return np.stack([run.features(self.draft_original.taps)[rows] for run in self.runs])


@pytest.fixture(scope="module")
def loaded(tiny_bundle: Callable[[str], TinyBundle]) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def give(name: str) -> Loaded:
        if name not in made:
            pair = tiny_bundle(name)
            manifest = manifest_from_bundle(pair.bundle)
            target = TargetOriginal(checkpoint_from_source(str(pair.target)))
            ids = np.random.default_rng(5).integers(0, manifest.target.vocab_size, (2, CAPACITY - 8))
            made[name] = Loaded(
                manifest,
                TargetGraph(pair.bundle, manifest),
                DraftGraph(pair.bundle, manifest),
                target,
                draft_original(checkpoint_from_source(str(pair.draft)), target),
                ids,
                [target.run(row.tolist()) for row in ids],
            )
        return made[name]

    return give


def close(got: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()), err_msg=str(what)
    )


@pytest.mark.parametrize("name", KINDS)
def test_target_at_every_past_and_number_of_rows(loaded: Callable[[str], Loaded], name: str) -> None:
    pair = loaded(name)
    block = pair.manifest.draft.block_size
    expected = pair.features()
    for past, rows, batch in itertools.product(
        (0, 1, 2, 17, block - 1, block, block + 1), sorted({1, 2, block - 1, block}), (1, 2)
    ):
        ids = pair.ids[:batch]
        pair.target.reset(CAPACITY, batch)
        if past:
            pair.target.run(ids[:, :past], 0)
        kv = None if rows % 2 else CAPACITY  # just enough, or all there is
        out = pair.target.run(ids[:, past : past + rows], past, kv=kv)
        what = (past, rows, batch)
        for b in range(batch):
            close(out[t.LOGITS][b], pair.runs[b].logits[past : past + rows], what)
            close(out[t.FEATURES][b], expected[b, past : past + rows], what)
            assert (out[t.GREEDY_IDS][b] == out[t.LOGITS][b].argmax(-1)).all()


@pytest.mark.parametrize("name", KINDS)
def test_tap_is_the_output_of_its_layer_and_of_no_neighbour(
    loaded: Callable[[str], Loaded], name: str
) -> None:
    pair = loaded(name)
    ids = torch.tensor(pair.ids[:1])
    with torch.inference_mode():
        hidden = pair.target_original.model(ids, output_hidden_states=True).hidden_states
    pair.target.reset(CAPACITY)
    features = pair.target.run(pair.ids[:1], 0)[t.FEATURES][0]
    size = pair.manifest.target.hidden_size
    for place, tap in enumerate(pair.manifest.draft.taps):
        got = features[:, place * size : (place + 1) * size]
        close(got, hidden[tap + 1][0].numpy(), tap)
        for other in (tap, tap + 2):
            assert np.abs(got - hidden[other][0].numpy()).max() > 0.1, (tap, other)
    assert pair.manifest.draft.taps == {
        "dflash2": (2, 0, 1), "dflash": (0,), "speculators": (0, 1), "speculators2": (1, 2),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_target_with_requests_of_different_lengths(loaded: Callable[[str], Loaded], name: str) -> None:
    pair = loaded(name)
    lengths = np.array([17, 3])
    pair.target.reset(CAPACITY, 2)
    pair.target.run(pair.ids[:, :17], 0)  # 14 rows of the second request are padding
    rows = np.stack([pair.ids[b, n : n + 4] for b, n in enumerate(lengths)])
    out = pair.target.run(rows, lengths, np.array([[3, 0], [1, 3]]))
    for b, wanted in enumerate(([3, 0], [1, 3])):
        close(out[t.LOGITS][b], pair.runs[b].logits[lengths[b] + np.array(wanted)])
        close(out[t.FEATURES][b], pair.features()[b, lengths[b] : lengths[b] + 4])


def check_round(out: dict[str, np.ndarray], b: int, batch: int, run: DraftRun, what: Any) -> None:
    """Compare one request's layers, logits and proposals."""
    for index, expected in enumerate(run.layers):
        rows = out[f"{t.STAGE}layer.{index}"]
        close(rows.reshape(batch, -1, rows.shape[-1])[b, : len(expected)], expected, (what, index))
    count = len(run.proposals)
    logits = out[t.DRAFT_LOGITS] if t.DRAFT_LOGITS in out else out[f"{t.STAGE}logits"]
    close(logits[b, :count], run.logits, what)
    assert out[t.PROPOSALS][b, :count].tolist() == run.proposals.tolist(), what
    assert np.isfinite(out[t.LOGIT_SUMS]).all()


@pytest.mark.parametrize("name", KINDS)
def test_draft_at_every_past_context_and_block(loaded: Callable[[str], Loaded], name: str) -> None:
    pair = loaded(name)
    block, shortest = pair.manifest.draft.block_size, pair.draft_original.shortest_block
    features = pair.features()
    for past, rows in itertools.product((0, 1, 2, 17, block - 1, block, block + 1), (1, block, 33)):
        anchor = past + rows
        for block_rows in {max(2, shortest), max(block - 1, shortest), block}:
            pair.draft.reset(CAPACITY)
            if past:
                pair.draft.run(features[:1, :past], 0, past, 0, block)
            kv = None if past % 2 else CAPACITY
            anchor_id = int(pair.ids[0, anchor])
            out = pair.draft.run(features[:1, past:anchor], past, anchor, anchor_id, block_rows, kv)
            run = pair.draft_original.run(features[0], Question(anchor, anchor_id, block_rows))
            check_round(out, 0, 1, run, (past, rows, block_rows))


@pytest.mark.parametrize("name", KINDS)
def test_draft_with_requests_of_different_lengths(loaded: Callable[[str], Loaded], name: str) -> None:
    pair = loaded(name)
    block, shortest = pair.manifest.draft.block_size, pair.draft_original.shortest_block
    features = pair.features()
    pair.draft.reset(CAPACITY, 2)
    pair.draft.run(features[:, :17], 0, [17, 6], pair.ids[[0, 1], [17, 6]], block)
    # New rows 17..19 of the first request, 6..10 of the second, and padding behind the first's anchor.
    rows = np.stack([features[0, 17:22], features[1, 6:11]])
    rows[0, 3:] = 1e3
    anchors, block_rows = [20, 11], [block, max(block - 1, shortest)]
    out = pair.draft.run(rows, [17, 6], anchors, pair.ids[[0, 1], anchors], block_rows)
    for b in range(2):
        question = Question(anchors[b], int(pair.ids[b, anchors[b]]), block_rows[b])
        check_round(out, b, 2, pair.draft_original.run(features[b], question), b)
