"""The tuned graphs of a bundle beside its portable ones: they must give the same bits."""

from __future__ import annotations

from pathlib import Path

from ...bundle import tensors as t
from ...bundle.manifest import Manifest
from ...bundle.tuned import portable
from ..bundle_graphs import DraftGraph, TargetGraph
from .compare import Values
from .inputs import Sample, passes
from .report import StageReport
from .tolerances import SAME_BITS


class TunedStages:
    """Outputs of each tuned graph, over the passes by which the portable ones are checked."""

    def __init__(self, directory: Path, manifest: Manifest, target: TargetGraph, draft: DraftGraph) -> None:
        """Load the tuned graphs.

        Args:
            directory: the bundle.
            manifest: its manifest.
            target: its portable target graph; what it holds of a request is lost.
            draft: its portable draft graph, likewise.

        Raises:
            BundleError: a graph cannot be loaded.
        """
        self._manifest, self._target, self._draft = manifest, target, draft
        of_target = {name: info for name, info in manifest.tuned.items() if portable(name) == t.TARGET}
        self._targets = {name: TargetGraph(directory, manifest, info) for name, info in of_target.items()}
        self._drafts = {
            name: DraftGraph(directory, manifest, info)
            for name, info in manifest.tuned.items()
            if name not in of_target
        }
        self._values = {
            name: Values(
                name.replace("target.", "tuned.", 1) if name in of_target else f"tuned.{name}", SAME_BITS
            )
            for name in manifest.tuned
        }

    def add(self, sample: Sample) -> None:
        """Compare one sample, pass by pass."""
        if self._targets:
            self._add_targets(sample)
        if self._drafts:
            self._add_drafts(sample)

    def _add_targets(self, sample: Sample) -> None:
        total = len(sample.ids)
        for graph in (self._target, *self._targets.values()):
            graph.reset(total + self._manifest.slack_slots)
        wanted = (t.FEATURES, t.LOGITS)
        for step in passes(len(sample.prompt), total, self._manifest.draft.proposals + 1):
            if step.rows < 2:  # a lone row is computed in another order, unless it is grouped
                continue
            ids = step.ids(sample, self._manifest.target.vocab_size)
            expected = self._target.run(ids, step.start, wanted=wanted)
            for name, graph in self._targets.items():
                got = graph.run(ids, step.start, wanted=wanted)
                for output in wanted:
                    self._values[name].add(expected[output], got[output])

    def _add_drafts(self, sample: Sample) -> None:
        info, total = self._manifest.draft, len(sample.ids)
        for graph in (self._draft, *self._drafts.values()):
            graph.reset(total + self._manifest.slack_slots)
        for index, step in enumerate(passes(len(sample.prompt), total, info.proposals + 1)):
            if step.end >= total:
                break
            features = step.features(sample, padded=index % 2 == 1)
            asked = (features, step.start, step.end, sample.ids[step.end], info.block_size)
            expected = self._draft.run(*asked)
            for name, graph in self._drafts.items():
                got = graph.run(*asked)
                for output, values in expected.items():
                    self._values[name].add(values, got[output])

    def reports(self, model: str) -> list[StageReport]:
        """One stage for each tuned graph of a model, `TARGET` or `DRAFT`."""
        return [values.report() for name, values in self._values.items() if portable(name) == model]
