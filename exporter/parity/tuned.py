"""The tuned target graphs of a bundle beside its portable one: they must give the same bits."""

from __future__ import annotations

from pathlib import Path

from ...bundle import tensors as t
from ...bundle.manifest import Manifest
from .compare import Values
from .graphs import TargetGraph
from .inputs import Sample, passes
from .report import StageReport
from .tolerances import Tolerance

SAME_BITS = Tolerance(relative=0.0, why="the same sums in the same order: the tokens must be the same, too")


class TunedStages:
    """Features and logits of each tuned graph, over the passes by which the portable one is checked."""

    def __init__(self, directory: Path, manifest: Manifest, portable: TargetGraph) -> None:
        """Load the tuned graphs.

        Args:
            directory: the bundle.
            manifest: its manifest.
            portable: its target graph; what it holds of a request is lost.

        Raises:
            BundleError: a graph cannot be loaded.
        """
        self._manifest, self._portable = manifest, portable
        self._graphs = {name: TargetGraph(directory, manifest, info) for name, info in manifest.tuned.items()}
        self._values = {
            name: Values(name.replace("target.", "tuned.", 1), SAME_BITS) for name in self._graphs
        }

    def add(self, sample: Sample) -> None:
        """Compare one sample, pass by pass."""
        draft, total = self._manifest.draft, len(sample.ids)
        if not self._graphs:
            return
        for graph in (self._portable, *self._graphs.values()):
            graph.reset(total + self._manifest.slack_slots)
        for step in passes(len(sample.prompt), total, draft.proposals + 1):
            if step.rows < 2:  # a lone row is computed in another order, unless it is grouped
                continue
            ids = step.ids(sample, self._manifest.target.vocab_size)
            wanted = (t.FEATURES, t.LOGITS)
            expected = self._portable.run(ids, step.start, wanted=wanted)
            for name, graph in self._graphs.items():
                got = graph.run(ids, step.start, wanted=wanted)
                for output in wanted:
                    self._values[name].add(expected[output], got[output])

    def reports(self) -> list[StageReport]:
        """One stage for each tuned graph."""
        return [values.report() for values in self._values.values()]
