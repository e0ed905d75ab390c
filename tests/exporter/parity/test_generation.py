"""The loop that parity drives the graphs with, and how differing generations are judged. No models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.parity.generation import Decoded, GenerationStages, Round, decode
from dflash_deploy.exporter.parity.inputs import Pass, passes
from dflash_deploy.exporter.parity.originals import DraftRun, Generated

VOCAB = 11
PROMPT = (3, 1, 4)


def following(token: int) -> int:
    """The stub target: what comes behind a token."""
    return (3 * token + 1) % VOCAB


def verify(ids: list[int], start: int) -> list[int]:
    return [following(i) for i in ids]


def draft(right: int) -> Any:
    """A draft of which the first `right` proposals are right."""

    def propose(anchor: int, anchor_id: int, count: int) -> list[int]:
        out, token = [], anchor_id
        for slot in range(count):
            token = following(token) if slot < right else (following(token) + 1) % VOCAB
            out.append(token)
        return out

    return propose


def plain(new_tokens: int, stops: tuple[int, ...] = ()) -> list[int]:
    ids = [following(PROMPT[-1])]
    while len(ids) < new_tokens and ids[-1] not in stops:
        ids.append(following(ids[-1]))
    return ids


@pytest.mark.parametrize("right", [0, 1, 2, 4])
@pytest.mark.parametrize("new_tokens", [1, 2, 5, 13])
def test_tokens_are_the_targets_whatever_is_proposed(right: int, new_tokens: int) -> None:
    got = decode(verify, draft(right), PROMPT, new_tokens, 4, ()).generated()
    assert got.ids == plain(new_tokens)
    assert decode(verify, None, PROMPT, new_tokens, 4, ()).generated().ids == got.ids
    assert sum(got.lengths) == new_tokens - 1
    assert all(length == right + 1 for length in got.lengths[:-1])


@pytest.mark.parametrize("stop", plain(7))
def test_ends_behind_the_first_stop(stop: int) -> None:
    got = decode(verify, draft(4), PROMPT, 7, 4, (stop,)).generated()
    assert got.ids == plain(7, (stop,))


def test_passes_cover_every_row_once_and_reject_some() -> None:
    for prompt, total, rows in ((5, 40, 8), (1, 2, 4), (7, 30, 2)):
        steps = list(passes(prompt, total, rows))
        assert steps[0] == Pass(0, prompt, prompt)
        assert [step.start for step in steps[1:]] == [step.end for step in steps[:-1]]
        assert steps[-1].end == total
        assert all(1 <= step.committed <= step.rows <= rows for step in steps[1:])
    kept = {step.committed for step in passes(5, 60, 8)}
    assert {1, 7, 8, 3} <= kept


class Originals:
    """A stub of both originals: `shift` moves one logit, so that a token or a proposal differs."""

    taps, block_size, mask_token_id, first_proposal_row, shortest_block = (0,), 4, 0, 1, 2
    package = "stub"

    def __init__(self, gap: float, lengths: list[int]) -> None:
        self.gap, self.lengths = gap, lengths

    def _logits(self, best: list[int]) -> np.ndarray:
        """Every row prefers `best`, and its neighbour by `gap` less."""
        logits = np.full((len(best), VOCAB), -9.0)
        for row, token in enumerate(best):
            logits[row, token], logits[row, (token + 1) % VOCAB] = 1.0, 1.0 - self.gap
        return logits

    def run(self, ids: Any, question: Any = None) -> Any:
        if question is not None:
            choices = draft(4)(question.anchor, question.anchor_id, question.rows - 1)
            logits = self._logits(choices)
            return DraftRun(np.zeros(0), (), np.zeros((len(choices), 1)), logits, np.array(choices))
        logits = self._logits([following(i) for i in ids])
        return SimpleNamespace(logits=logits, features=lambda taps: np.zeros((len(ids), 1)))

    def scores(self, run: DraftRun, slot: int, previous: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(VOCAB), run.logits[slot][None]

    def generate(self, prompt: Any, new_tokens: int, stops: Any) -> Generated:
        return Generated(plain(new_tokens), self.lengths)


def judged(gap: float, plain_ids: list[int], decoded: Decoded, lengths: list[int]) -> dict[str, Any]:
    """Judge a bundle that decodes like this."""
    originals: Any = Originals(gap, lengths)
    manifest: Any = SimpleNamespace(dtype=DType.FLOAT32, stop_token_ids=())
    sample: Any = SimpleNamespace(name="prompt 1", prompt=PROMPT, continuation=plain(6))
    loop: Any = SimpleNamespace(
        generate=lambda *_, speculative: (
            decoded if speculative else Decoded(plain_ids[0], [Round(3, [], plain_ids[1:])])
        )
    )
    stages = GenerationStages(manifest, loop, originals, originals)
    stages.add(sample, 6)
    return {report.name: report for report in stages.reports()} | {"remarks": stages.remarks()}


def two_rounds(first: int) -> Decoded:
    """Six right tokens in two rounds, `first` in the first one, which proposes wrongly behind it."""
    ids = plain(6)
    proposals = ids[1:4] if first == 3 else [*ids[1:first], (ids[first] + 1) % VOCAB, 0][:3]
    rounds = [Round(3, proposals, ids[1 : 1 + first]), Round(3 + first, ids[1 + first : 6], ids[1 + first :])]
    return Decoded(ids[0], rounds)


def test_the_same_generation_passes() -> None:
    reports = judged(1.0, plain(6), two_rounds(3), [3, 2])
    assert all(reports[f"generation.{name}"].passed for name in ("plain", "speculative", "rounds"))
    assert reports["generation.rounds"].samples == 2
    assert "same tokens: 1 of 1 prompts" in reports["remarks"][0]


@pytest.mark.parametrize(("gap", "good"), [(1e-5, True), (0.5, False)])
def test_another_token_passes_as_a_near_tie_only(gap: float, good: bool) -> None:
    ids = plain(2)
    other = (following(ids[1]) + 1) % VOCAB
    ids += [other]
    while len(ids) < 6:
        ids.append(following(ids[-1]))
    reports = judged(gap, ids, two_rounds(3), [3, 2])
    stage = reports["generation.plain"]
    assert stage.passed is good, stage.reasons
    assert stage.divergence_count == 1, (
        "behind a divergence the original is asked about the bundle's own text"
    )
    assert stage.divergences[0].where == "prompt 1, token 2"
    assert stage.divergences[0].margin == pytest.approx(gap)
    assert reports["generation.speculative"].passed
    if good:
        assert "leaves the output of transformers at token 2" in reports["remarks"][-1]


@pytest.mark.parametrize(("gap", "good"), [(1e-5, True), (0.5, False)])
def test_another_acceptance_passes_as_a_near_tie_only(gap: float, good: bool) -> None:
    reports = judged(gap, plain(6), two_rounds(2), [3, 2])
    stage = reports["generation.rounds"]
    assert stage.passed is good, stage.reasons
    assert stage.divergences[0].gap == pytest.approx(gap)
    assert (stage.divergences[0].original, stage.divergences[0].bundle) == ("3", "2")


def test_missing_tokens_fail() -> None:
    reports = judged(1.0, plain(5), two_rounds(3), [3, 2])
    assert "got 5 tokens, expected 6 as transformers" in reports["generation.plain"].reasons[0]
