"""The graph of a whole round beside the two that it is made of: the same bits, the loop's own acceptance."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...bundle import tensors as t
from ...bundle.manifest import Manifest
from ...bundle.round_graph import ACCEPTED, ROUND, VERIFY_ROWS, of_model
from ..bundle_graphs import Array, BundleGraph, DraftGraph, TargetGraph
from .compare import Values
from .inputs import Sample
from .report import StageReport
from .tolerances import SAME_BITS


class RoundStages:
    """Rounds of greedy decoding, each computed in both ways from the same caches."""

    def __init__(self, directory: Path, manifest: Manifest, target: TargetGraph, draft: DraftGraph) -> None:
        """Load the graph, if the bundle has it.

        Args:
            directory: the bundle.
            manifest: its manifest.
            target: its portable target graph; what it holds of a request is lost.
            draft: its portable draft graph, likewise.

        Raises:
            BundleError: the graph cannot be loaded.
        """
        info = manifest.graphs.get(ROUND)
        self._manifest, self._target, self._draft = manifest, target, draft
        self._graph = None if info is None else BundleGraph(directory, info)
        self._values = Values(ROUND, SAME_BITS)

    def add(self, sample: Sample) -> None:
        """Compare one sample, round by round, until its tokens are there again."""
        if self._graph is None:
            return
        info, prompt = self._manifest.draft, np.array([sample.prompt], np.int64)
        self._target.reset(len(sample.ids) + self._manifest.slack_slots)
        self._draft.reset(self._target.capacity)
        given = self._target.run(prompt, 0)
        start, anchor = len(sample.prompt), int(given[t.GREEDY_IDS][0, -1])
        proposals = self._draft.run(given[t.FEATURES], 0, start, anchor, info.block_size)[t.PROPOSALS]
        while (left := len(sample.ids) - start) > 0:
            ids = np.concatenate([[[anchor]], proposals], axis=1)
            rows = min(left, ids.shape[1])
            fused = self._fused(ids, start, rows)
            given = self._target.run(ids, start)
            greedy = given[t.GREEDY_IDS]
            standing = ids[0, 1:rows] == greedy[0, : rows - 1]
            accepted = int(np.logical_and.accumulate(standing).sum())
            anchor, begin, start = int(greedy[0, accepted]), start, start + accepted + 1
            drafted = self._draft.run(given[t.FEATURES], begin, start, anchor, info.block_size)
            proposals = drafted[t.PROPOSALS]
            for name, expected in {
                t.GREEDY_IDS: greedy,
                ACCEPTED: np.array([accepted]),
                t.PROPOSALS: proposals,
                t.LOGIT_SUMS: drafted[t.LOGIT_SUMS],
            }.items():
                self._values.add(expected, fused[name])

    def _fused(self, ids: Array, start: int, verify_rows: int) -> dict[str, Array]:
        """What the graph gives behind the caches as they are."""
        assert self._graph is not None
        slots = np.arange(start + ids.shape[1], dtype=np.int64)
        inputs = {
            t.INPUT_IDS: ids,
            VERIFY_ROWS: np.array([verify_rows]),
            t.START: np.array([start]),
            t.BLOCK_ROWS: np.array([self._manifest.draft.block_size]),
        }
        for model, graph in ((t.TARGET, self._target), (t.DRAFT, self._draft)):
            inputs[of_model(model, t.SLOTS)] = slots
            inputs |= {of_model(model, name): cache for name, cache in graph.past.items()}
        return self._graph.run(inputs, (t.GREEDY_IDS, ACCEPTED, t.PROPOSALS, t.LOGIT_SUMS))

    def reports(self) -> list[StageReport]:
        """One stage, or none without the graph."""
        return [] if self._graph is None else [self._values.report()]
