"""Stage by stage: the bundle's target and draft beside their originals, given the same inputs.

The draft gets the features that the original target computed, so a fault of the target does not show in the
draft's stages; within a model a fault shows in every stage behind it, which is why the first bad one counts.
Shapes: R rows, H hidden size, V vocabulary, Q block rows, P proposals, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...bundle import tensors as t
from ...bundle.errors import BundleError, field_error
from ...bundle.manifest import Manifest
from ..bundle_graphs import BundleGraph, DraftGraph, TargetGraph
from .compare import Choices, Settings, Values, best_match
from .inputs import Sample, passes
from .originals import Array, DraftOriginal, DraftRun
from .report import StageReport
from .tolerances import TOLERANCES, Kind, Tolerance

_PROMPT_LOGIT_ROWS = 16
_MATCH_ROWS = 64  # rows by which a tap's layer is found
_NEAR = 0.1  # a relative distance above this matches nothing


def compare_settings(manifest: Manifest, draft: DraftOriginal) -> StageReport:
    """What the manifest says the draft is, beside what the original says."""
    info = manifest.draft
    stage = Settings("manifest", TOLERANCES[manifest.dtype][Kind.SETTINGS])
    stage.add("draft.taps", draft.taps, info.taps)
    stage.add("draft.block_size", draft.block_size, info.block_size)
    stage.add("draft.mask_token_id", draft.mask_token_id, info.mask_token_id)
    stage.add("draft.first_proposal_row", draft.first_proposal_row, info.first_proposal_row)
    return stage.report()


class TargetStages:
    """Taps, logits and greedy choices of the target."""

    def __init__(self, manifest: Manifest, graph: TargetGraph, taps: Sequence[int]) -> None:
        """`taps` are the original's, in the order the features stand."""
        limits = TOLERANCES[manifest.dtype]
        self._graph, self._manifest, self._taps = graph, manifest, tuple(taps)
        self._values = [Values(f"target.tap.{tap}", limits[Kind.TAP]) for tap in taps]
        self._seen: list[list[Array]] = [[] for _ in taps]
        self._layers: list[list[Array]] = []
        self._logits = Values("target.logits", limits[Kind.LOGITS], logits=True)
        self._choices = Choices("target.greedy_ids", limits[Kind.CHOICE])

    def add(self, sample: Sample) -> None:
        """Compare one sample, pass by pass."""
        draft, size = self._manifest.draft, self._manifest.target.hidden_size
        total = len(sample.ids)
        self._graph.reset(total + self._manifest.slack_slots)
        for step in passes(len(sample.prompt), total, draft.proposals + 1):
            wanted = np.arange(step.rows)[-_PROMPT_LOGIT_ROWS:] if step.start == 0 else np.arange(step.rows)
            outputs = self._graph.run(step.ids(sample, self._manifest.target.vocab_size), step.start, wanted)
            features = outputs[t.FEATURES][0]  # [R, taps * H]
            rows = slice(step.start, step.end)
            room = _MATCH_ROWS - sum(len(piece[0]) for piece in self._layers)
            if room > 0:
                self._layers.append([layer[rows][:room] for layer in sample.run.layers])
            for index, tap in enumerate(self._taps):
                got = features[: step.committed, index * size : (index + 1) * size]
                self._values[index].add(sample.run.layers[tap][rows], got)
                if room > 0:
                    self._seen[index].append(got[:room])
            kept = wanted < step.committed
            expected = sample.run.logits[step.start + wanted[kept]]
            self._logits.add(expected, outputs[t.LOGITS][0][kept])
            for row, scores, chosen in zip(
                wanted[kept], expected, outputs[t.GREEDY_IDS][0][kept].tolist(), strict=True
            ):
                self._choices.add_scored(f"{sample.name}, position {step.start + row}", scores, chosen)

    def reports(self) -> list[StageReport]:
        """Taps by depth, which is the order data flows, then logits and choices."""
        layers = [np.concatenate(pieces) for pieces in zip(*self._layers, strict=True)]
        for index, tap in enumerate(self._taps):
            if layers and self._seen[index]:
                self._name_layer(self._values[index], tap, np.concatenate(self._seen[index]), layers)
        order = np.argsort(self._taps, kind="stable")
        return [*(self._values[i].report() for i in order), self._logits.report(), self._choices.report()]

    @staticmethod
    def _name_layer(stage: Values, tap: int, rows: Array, layers: list[Array]) -> None:
        if rows.shape != layers[tap].shape:
            return
        best, distances = best_match(rows, layers)
        where = f"(relative distance {distances[best]:.1e}; layer {tap}: {distances[tap]:.1e})"
        if not np.isfinite(distances[best]):
            stage.note = "matches no layer: not finite"
        elif distances[best] > _NEAR:
            stage.note = stage.cause = f"tap {tap} matches no layer's output; nearest is layer {best} {where}"
        else:
            stage.note = f"tap {tap} matches the output of layer {best} {where}"
            stage.cause = stage.note if best != tap else ""


class SelectionStages:
    """Candidates, scores and the path through them; for a draft without a selector, the choices alone."""

    def __init__(self, prefix: str, scores: Tolerance, choice: Tolerance, selector: bool) -> None:
        self._candidates = Choices(f"{prefix}.candidates", choice) if selector else None
        self._scores = Values(f"{prefix}.scores", scores)
        self._proposals = Choices(f"{prefix}.proposals", choice)

    def add(
        self, where: str, draft: DraftOriginal, run: DraftRun, anchor_id: int, outputs: dict[str, Array]
    ) -> None:
        """Compare one round. `outputs` holds the bundle's for the P slots that the original has."""
        count = len(run.proposals)
        if self._candidates is not None:
            assert run.candidates is not None
            candidates = outputs[t.CANDIDATES][0][:count]  # [P, k]
            edges = outputs[t.EDGE_SCORES][0][:count]  # [P, k, k]
            if candidates.shape != run.candidates.shape:
                self._candidates.fail(f"shape: got {candidates.shape}, expected {run.candidates.shape}")
                return
            for slot in range(count):
                self._add_candidates(self._candidates, f"{where}, slot {slot}", run, slot, candidates[slot])
                previous = [anchor_id] if slot == 0 else candidates[slot - 1].tolist()
                self._add_scores(draft, run, slot, previous, candidates[slot], edges[slot])
        self._add_path(where, draft, run, anchor_id, outputs[t.PROPOSALS][0][:count])

    @staticmethod
    def _add_candidates(stage: Choices, where: str, run: DraftRun, slot: int, got: Array) -> None:
        """Compare two sets; a swap counts by how far the newcomer is below the original's last candidate."""
        assert run.candidates is not None
        logits, expected = run.logits[slot], set(run.candidates[slot].tolist())
        found = set(got.tolist())
        if len(found) != len(got) or not all(0 <= i < logits.size for i in found):
            stage.fail(f"{where}: got candidates {got.tolist()}, expected different ids below {logits.size}")
            return
        for same in sorted(expected & found):
            stage.add(where, same, same)
        worst = min(logits[i] for i in expected)
        for lost, new in zip(sorted(expected - found), sorted(found - expected), strict=True):
            stage.add(where, lost, new, float(worst - logits[new]))

    def _add_scores(
        self, draft: DraftOriginal, run: DraftRun, slot: int, previous: list[int], ids: Array, edges: Array
    ) -> None:
        """Compare the candidates that both sides have, up to a constant a row; see `DraftOriginal.scores`."""
        if not all(0 <= i < run.logits.shape[-1] for i in previous):
            return  # named by the candidates' stage
        names, scores = draft.scores(run, slot, previous)  # [k], [n, k]
        places = {int(token): place for place, token in enumerate(names)}
        both = [(places[int(token)], column) for column, token in enumerate(ids) if int(token) in places]
        if not both:
            return
        theirs, ours = (list(columns) for columns in zip(*both, strict=True))
        a, b = scores[:, theirs], edges[: len(previous), ours]
        scale = np.sqrt(np.square(run.logits[slot][names[theirs]].astype(np.float64)).mean())
        self._scores.add(
            a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True), np.full(len(previous), scale)
        )

    def _add_path(self, where: str, draft: DraftOriginal, run: DraftRun, anchor_id: int, got: Array) -> None:
        """Compare slot by slot up to the first that differs: those behind it hang on it."""
        for slot, (expected, token) in enumerate(zip(run.proposals.tolist(), got.tolist(), strict=True)):
            place = f"{where}, slot {slot}"
            if expected == token:
                self._proposals.add(place, expected, token)
                continue
            gap, margin = slot_gap(draft, run, slot, anchor_id, token)
            self._proposals.add(place, expected, token, gap, margin)
            return

    def reports(self) -> list[StageReport]:
        """In the order data flows."""
        if self._candidates is None:
            return [self._proposals.report()]
        return [self._candidates.report(), self._scores.report(), self._proposals.report()]


def slot_gap(
    draft: DraftOriginal, run: DraftRun, slot: int, anchor_id: int, token: int
) -> tuple[float | None, float | None]:
    """How far the original scores `token` below its own proposal of a slot, and its second best below that.

    The gap of a token that is not among the original's candidates is how far its logit is below theirs; None
    if the token is none at all.
    """
    previous = anchor_id if slot == 0 else int(run.proposals[slot - 1])
    ids, scores = draft.scores(run, slot, [previous])
    row = scores[0]
    margin = float(np.sort(row)[-1] - np.sort(row)[-2]) if row.size > 1 else None
    place = np.flatnonzero(ids == token)
    if place.size:
        return float(row.max() - row[place[0]]), margin
    if run.candidates is not None and 0 <= token < run.logits.shape[-1]:
        logits = run.logits[slot]
        return float(logits[run.candidates[slot]].min() - logits[token]), margin
    return None, margin


def _part(directory: Path, manifest: Manifest, name: str) -> BundleGraph:
    """A part of the draft as a graph of its own."""
    if name not in manifest.graphs:
        raise field_error(
            BundleError, "manifest.json: graphs", sorted(manifest.graphs), f"a graph named {name!r}"
        )
    return BundleGraph(directory, manifest.graphs[name])


class DraftStages:
    """Every stage of the draft, and its convolutions and its selector as graphs of their own."""

    def __init__(self, directory: Path, manifest: Manifest, graph: DraftGraph, draft: DraftOriginal) -> None:
        limits, exact = TOLERANCES[manifest.dtype], TOLERANCES[t.DType.FLOAT32]
        info = manifest.draft
        self._manifest, self._graph, self._draft = manifest, graph, draft
        self._context = Values("draft.context", limits[Kind.CONTEXT])
        self._layers = [Values(f"draft.layer.{i}", limits[Kind.LAYER]) for i in range(info.num_layers)]
        self._hidden = Values("draft.hidden", limits[Kind.LAYER])
        self._logits = Values("draft.logits", limits[Kind.LOGITS], logits=True)
        selector = info.selector is not None
        self._selection = SelectionStages("draft", limits[Kind.SCORES], limits[Kind.CHOICE], selector)
        self._conv_graph = self._selector_graph = None
        self._conv = Values("conv", limits[Kind.OPERATOR])
        if info.conv is not None:
            self._conv_graph = _part(directory, manifest, t.CONV)
        self._selector = SelectionStages("selector", exact[Kind.SCORES], exact[Kind.CHOICE], selector=True)
        if selector:
            self._selector_graph = _part(directory, manifest, t.SELECTOR)

    def add(self, sample: Sample) -> None:
        """Compare one sample, round by round."""
        manifest, draft = self._manifest, self._draft
        info, total = manifest.draft, len(sample.ids)
        self._graph.reset(total + manifest.slack_slots)
        for index, step in enumerate(passes(len(sample.prompt), total, info.proposals + 1)):
            question = step.question(sample, info.block_size, draft.shortest_block)
            if question is None:
                break
            run = draft.run(sample.features, question)
            outputs = self._graph.run(
                step.features(sample, padded=index % 2 == 1),
                step.start,
                question.anchor,
                question.anchor_id,
                question.rows,
            )
            where = f"{sample.name}, anchor {question.anchor}"
            self._add_values(run, outputs, step.start, step.committed, question.rows)
            self._selection.add(where, draft, run, question.anchor_id, outputs)
            self._add_parts(where, run, question.anchor_id)

    def _add_values(
        self, run: DraftRun, outputs: dict[str, Array], start: int, committed: int, rows: int
    ) -> None:
        count = len(run.proposals)
        self._context.add(run.context[start:], outputs[f"{t.STAGE}context"][:committed])
        for index, stage in enumerate(self._layers):
            stage.add(run.layers[index], outputs[f"{t.STAGE}layer.{index}"][:rows])
        hidden = outputs[f"{t.STAGE}hidden"]
        self._hidden.add(run.hidden, hidden.reshape(-1, hidden.shape[-1])[:count])
        logits = outputs[t.DRAFT_LOGITS] if t.DRAFT_LOGITS in outputs else outputs[f"{t.STAGE}logits"]
        self._logits.add(run.logits, logits[0][:count])

    def _add_parts(self, where: str, run: DraftRun, anchor_id: int) -> None:
        """The convolutions and the selector alone, on what the original fed its own."""
        if self._conv_graph is not None:
            for call in run.convs:
                inputs = {t.HIDDEN: call.hidden[None], t.DELTA: call.delta[None], t.BASE: call.base}
                self._conv.add(call.output, self._conv_graph.run(inputs)[t.OUTPUT][0])
        if self._selector_graph is not None and len(run.proposals) == self._manifest.draft.proposals:
            inputs = {
                t.HIDDEN: run.hidden[None],
                t.UNARY_LOGITS: run.logits[None],
                t.ANCHOR_IDS: np.array([anchor_id], np.int64),
            }
            self._selector.add(where, self._draft, run, anchor_id, self._selector_graph.run(inputs))

    def reports(self) -> list[StageReport]:
        """In the order data flows."""
        found = [self._context.report()]
        if self._conv_graph is not None:
            found.append(self._conv.report())
        found += [stage.report() for stage in (*self._layers, self._hidden, self._logits)]
        if self._selector_graph is not None:
            found += self._selector.reports()
        return [*found, *self._selection.reports()]
