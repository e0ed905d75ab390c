"""Whole generations: the bundle's graphs in a small loop of their own, beside the originals' loops.

The loop is the definition, not a fast one. L tokens are committed; the anchor is token L, chosen and not
computed; a round proposes tokens behind it, verifies, and keeps the longest prefix that the target would have
chosen, and one token more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...bundle import tensors as t
from ...bundle.manifest import Manifest
from ..bundle_graphs import DraftGraph, TargetGraph
from .compare import Choices
from .inputs import Sample
from .originals import DraftOriginal, Generated, Question, TargetOriginal
from .report import StageReport
from .stages import slot_gap
from .tolerances import TOLERANCES, Kind

# ids of rows, position of the first -> the choice behind every row
Verify = Callable[[list[int], int], list[int]]
# anchor's position, anchor's token, how many -> proposals
Propose = Callable[[int, int, int], list[int]]


@dataclass(frozen=True)
class Round:
    """One round of `decode`: the anchor's position, what was proposed, and what joined the sequence."""

    anchor: int
    proposals: list[int]
    new: list[int]


@dataclass(frozen=True)
class Decoded:
    """A generation: the first token, and the rounds behind it."""

    first: int
    rounds: list[Round]

    def generated(self) -> Generated:
        """Tokens and the rounds' lengths."""
        ids = [self.first, *(token for step in self.rounds for token in step.new)]
        return Generated(ids, [len(step.new) for step in self.rounds])


def decode(
    verify: Verify,
    propose: Propose | None,
    prompt: Sequence[int],
    new_tokens: int,
    most: int,
    stops: Sequence[int],
) -> Decoded:
    """Decode greedily.

    Args:
        verify: the target.
        propose: the draft; None decodes plainly.
        prompt: token ids.
        new_tokens: most tokens.
        most: most proposals a round.
        stops: ids that end it; the stop id is part of the output.
    """
    ids, rounds = [verify(list(prompt), 0)[-1]], []
    while len(ids) < new_tokens and ids[-1] not in stops:
        anchor, budget = len(prompt) + len(ids) - 1, new_tokens - len(ids)
        proposals = propose(anchor, ids[-1], min(most, budget)) if propose is not None else []
        choices = verify([ids[-1], *proposals], anchor)
        accepted = 0
        while accepted < len(proposals) and proposals[accepted] == choices[accepted]:
            accepted += 1
        new = choices[: min(accepted + 1, budget)]
        stop = next((place for place, token in enumerate(new) if token in stops), None)
        new = new if stop is None else new[: stop + 1]
        ids += new
        rounds.append(Round(anchor, proposals, new))
    return Decoded(ids[0], rounds)


class BundleLoop:
    """The bundle's target and draft as `Verify` and `Propose`; one request at a time."""

    def __init__(
        self, manifest: Manifest, target: TargetGraph, draft: DraftGraph, shortest_block: int
    ) -> None:
        """Use loaded graphs; `shortest_block` is the original's."""
        self._manifest, self._target, self._draft = manifest, target, draft
        self._shortest = shortest_block
        self._features = np.zeros((1, 0, 0), np.float32)
        self._first = self._context = 0

    def generate(
        self, prompt: Sequence[int], new_tokens: int, stops: Sequence[int], speculative: bool
    ) -> Decoded:
        """Decode a prompt."""
        capacity = len(prompt) + new_tokens + self._manifest.slack_slots
        self._target.reset(capacity)
        self._draft.reset(capacity)
        self._context = 0
        propose = self._propose if speculative else None
        return decode(self._verify, propose, prompt, new_tokens, self._manifest.draft.proposals, stops)

    def _verify(self, ids: list[int], start: int) -> list[int]:
        # Of a prompt only the last choice is looked at, and its logits may be many.
        rows = [len(ids) - 1] if start == 0 else None
        outputs = self._target.run(np.array([ids]), start, rows, wanted=(t.GREEDY_IDS, t.FEATURES))
        self._features, self._first = outputs[t.FEATURES], start
        choices: list[int] = outputs[t.GREEDY_IDS][0].tolist()
        return choices

    def _propose(self, anchor: int, anchor_id: int, count: int) -> list[int]:
        assert self._first == self._context, "the target's last pass is where the draft's context ends"
        rows = max(self._manifest.draft.first_proposal_row + count, self._shortest)
        outputs = self._draft.run(
            self._features, self._context, anchor, anchor_id, rows, wanted=(t.PROPOSALS,)
        )
        self._context = anchor
        proposals: list[int] = outputs[t.PROPOSALS][0, :count].tolist()
        return proposals


def original_generation(
    target: TargetOriginal, draft: DraftOriginal, prompt: Sequence[int], new_tokens: int, stops: Sequence[int]
) -> Generated:
    """Decode with the draft's own package; where it has no loop, with its modules in ours."""
    own = draft.generate(prompt, new_tokens, stops)
    if own is not None:
        return own
    text = list(prompt)

    def verify(ids: list[int], start: int) -> list[int]:
        text[start:] = ids
        choices: list[int] = target.run(text).logits[start:].argmax(-1).tolist()
        return choices

    def propose(anchor: int, anchor_id: int, count: int) -> list[int]:
        features = target.run(text[:anchor]).features(draft.taps)
        rows = max(draft.first_proposal_row + count, draft.shortest_block)
        run = draft.run(features, Question(anchor, anchor_id, rows))
        proposals: list[int] = run.proposals[:count].tolist()
        return proposals

    most = draft.block_size - draft.first_proposal_row
    return decode(verify, propose, prompt, new_tokens, most, stops).generated()


class GenerationStages:
    """Tokens of plain and of speculative decoding, and acceptance round by round."""

    def __init__(
        self, manifest: Manifest, loop: BundleLoop, target: TargetOriginal, draft: DraftOriginal
    ) -> None:
        limit = TOLERANCES[manifest.dtype][Kind.GENERATION]
        assert limit.margin is not None
        self._manifest, self._loop, self._target, self._draft = manifest, loop, target, draft
        self._limit = limit.margin
        self._plain = Choices("generation.plain", limit)
        self._speculative = Choices("generation.speculative", limit)
        self._rounds = Choices("generation.rounds", limit)
        self._lengths: dict[str, list[int]] = {"original": [], "bundle": []}
        self._remarks: list[str] = []
        self._identical = self._samples = 0

    def add(self, sample: Sample, new_tokens: int) -> None:
        """Generate from one prompt in every way."""
        stops = self._manifest.stop_token_ids
        ends = [place for place, token in enumerate(sample.continuation) if token in stops]
        greedy = sample.continuation[: ends[0] + 1] if ends else sample.continuation
        plain = self._loop.generate(sample.prompt, new_tokens, stops, speculative=False).generated()
        own = original_generation(self._target, self._draft, sample.prompt, new_tokens, stops)
        decoded = self._loop.generate(sample.prompt, new_tokens, stops, speculative=True)
        ours = decoded.generated()
        self._samples += 1
        self._identical += plain.ids == ours.ids == greedy == own.ids
        others = {"transformers": greedy}
        self._add_tokens(self._plain, sample, plain.ids, others)
        self._add_tokens(self._speculative, sample, ours.ids, {**others, self._draft.package: own.ids})
        self._add_rounds(sample, own, ours, decoded.rounds)

    def _add_tokens(
        self, stage: Choices, sample: Sample, got: list[int], others: dict[str, list[int]]
    ) -> None:
        """Every token must be the original target's choice behind those before it, or a near-tie of it."""
        prompt = len(sample.prompt)
        logits = self._target.run((*sample.prompt, *got)).logits[prompt - 1 : -1]
        for place, (scores, token) in enumerate(zip(logits, got, strict=True)):
            stage.add_scored(f"{sample.name}, token {place}", scores, token)
        for package, expected in others.items():
            if got == expected:
                continue
            first = _first_difference(got, expected)
            if first >= min(len(got), len(expected)):
                stage.fail(f"{sample.name}: got {len(got)} tokens, expected {len(expected)} as {package}")
                continue
            gap = abs(float(logits[first][expected[first]] - logits[first][got[first]]))
            text = (
                f"{stage.name}: {sample.name} leaves the output of {package} at token {first}, gap {gap:.2e}"
            )
            if gap <= self._limit:
                self._remarks.append(f"{text}: a near-tie")
            else:
                stage.fail(f"{text}, expected the same or at most {self._limit:.1e}")

    def _add_rounds(self, sample: Sample, own: Generated, ours: Generated, rounds: list[Round]) -> None:
        """Compare acceptance up to the first round that differs: those behind it start elsewhere."""
        self._lengths["original"] += own.lengths
        self._lengths["bundle"] += ours.lengths
        same = _first_difference(ours.ids, own.ids)
        for index, (expected, got) in enumerate(zip(own.lengths, ours.lengths, strict=False)):
            where = f"{sample.name}, round {index}"
            if expected == got:
                self._rounds.add(where, expected, got)
                continue
            if rounds[index].anchor - len(sample.prompt) + min(expected, got) >= same:
                return  # the tokens differ here, which is their stage's matter
            gap, margin = self._explain(sample, ours, rounds[index], min(expected, got) - 1)
            self._rounds.add(where, expected, got, gap, margin)
            return
        if len(own.lengths) != len(ours.lengths) and ours.ids == own.ids:
            self._rounds.fail(f"{sample.name}: got {len(ours.lengths)} rounds, expected {len(own.lengths)}")

    def _explain(
        self, sample: Sample, ours: Generated, step: Round, slot: int
    ) -> tuple[float | None, float | None]:
        """How near a tie the original's proposal was at the slot where acceptance parts."""
        text = (*sample.prompt, *ours.ids)
        anchor_id = text[step.anchor]
        features = self._target.run(text[: step.anchor]).features(self._draft.taps)
        rows = max(self._draft.first_proposal_row + len(step.proposals), self._draft.shortest_block)
        run = self._draft.run(features, Question(step.anchor, anchor_id, rows))
        first = _first_difference(step.proposals, run.proposals.tolist())
        if first > slot:  # the original agrees with the bundle, and not with its own loop
            return slot_gap(self._draft, run, slot, anchor_id, step.proposals[slot])[1], None
        return slot_gap(self._draft, run, first, anchor_id, step.proposals[first])

    def reports(self) -> list[StageReport]:
        """In the order data flows."""
        return [self._plain.report(), self._speculative.report(), self._rounds.report()]

    def remarks(self) -> list[str]:
        """What else was seen, for people."""
        own, ours = self._lengths["original"], self._lengths["bundle"]
        same = f"{self._identical} of {self._samples} prompts"
        lines = [f"plain, speculative and both originals give the same tokens: {same}"]
        if own and ours:
            lines.append(
                f"acceptance length: bundle {sum(ours) / len(ours):.3f} over {len(ours)} rounds, "
                f"original {sum(own) / len(own):.3f} over {len(own)} rounds"
            )
        return [*lines, *self._remarks]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first place where they differ; the shorter's length if it is the other's start."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
