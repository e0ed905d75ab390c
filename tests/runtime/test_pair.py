"""Lanes of both models: who is computed together with whom changes nothing, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.tensors import (
    DRAFT_LOGITS,
    FEATURES,
    LOGIT_SUMS,
    PROPOSALS,
    SLOTS,
)
from dflash_deploy.runtime.lane import Lane, Saved
from dflash_deploy.runtime.pair import Pair
from dflash_deploy.runtime.passes import DraftFailure, DraftPass, TargetPass
from dflash_deploy.runtime.stats import Phase
from toy_engines import (
    BLOCK,
    VOCAB,
    ToyDecoder,
    ToyDraft,
    ToyTarget,
    ToyTensor,
    choice,
    greedy,
    logits_of,
    toy_decoder,
)
from toy_service import assert_clean, caches_of, prompt_of, toy_pair

WANTED = (PROPOSALS, LOGIT_SUMS)


def target_pass(ids, rows=None, features=True, logits=False) -> TargetPass:
    return TargetPass(list(ids), len(ids) if rows is None else rows, Phase.VERIFY, features, logits)


def draft_pass(anchor, count=BLOCK - 1) -> DraftPass:
    return DraftPass(anchor, count, WANTED if count else (), Phase.DRAFT)


def prefill(pair: Pair, lane: Lane, ids, features=True) -> int:
    """Compute and commit; gives the next token."""
    (rows,) = pair.run_target([(lane, target_pass(ids, 1, features))])
    lane.target.commit(len(ids))
    return rows.greedy[0]


@dataclass
class Known:
    """What a lane must hold: its committed tokens, and how many of them the draft has seen."""

    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    drafts: bool = True


class Anything:
    """Any passes over any lanes in any order, beside a model of what each lane knows."""

    def __init__(self, seed: int, lanes: int, first_row: int, max_length: int):
        self.random = random.Random(seed)
        self.decoder = toy_decoder(first_proposal_row=first_row, max_length=max_length, with_logits=True)
        self.pair = toy_pair(self.decoder, lanes)
        self.known: dict[Lane, Known] = {lane: Known() for lane in self.pair.lanes}
        self.longest = max_length
        self.saved: list[tuple[Saved, Known]] = []

    def some(self, fits) -> list[Lane]:
        able = [lane for lane in self.pair.lanes if fits(self.known[lane])]
        return self.random.sample(able, self.random.randint(min(1, len(able)), len(able)))

    def target(self) -> None:
        work, longest = [], self.random.choice([1, 2, BLOCK, 40])
        # The longest part must fit into every lane of the range, as the scheduler sees to.
        room = self.longest - max(len(known.tokens) for known in self.known.values())
        for lane in self.some(lambda known: len(known.tokens) + 1 < self.longest):
            ids = [
                self.random.randrange(VOCAB)
                for _ in range(self.random.randint(1, max(1, min(room, longest))))
            ]
            drafts = self.known[lane].drafts and self.random.random() < 0.9
            self.known[lane].drafts = drafts
            rows = self.random.randint(1, min(len(ids), self.decoder.manifest.draft.proposals + 1))
            work.append((lane, target_pass(ids, rows, drafts, self.random.random() < 0.3)))
        if not work:
            return
        for (lane, asked), got in zip(work, self.pair.run_target(work), strict=True):
            tokens = [*self.known[lane].tokens, *asked.ids]
            ends = range(len(tokens) - asked.logit_rows + 1, len(tokens) + 1)
            assert list(got.greedy) == [choice(tokens[:end]) for end in ends]
            if asked.logits:
                np.testing.assert_array_equal(got.logits, np.stack([logits_of(tokens[:end]) for end in ends]))
            kept = self.random.randint(0 if not asked.features else 1, len(asked.ids))
            lane.target.commit(kept)
            self.known[lane].tokens += asked.ids[:kept]

    def draft(self) -> None:
        work = []
        for lane in self.some(lambda known: known.drafts and known.seen < len(known.tokens)):
            count = self.random.choice([0, 1, self.decoder.manifest.draft.proposals])
            work.append((lane, draft_pass(self.random.randrange(VOCAB), count)))
        if not work:
            return
        for (lane, asked), got in zip(work, self.pair.run_draft(work), strict=True):
            known = self.known[lane]
            known.seen = len(known.tokens)
            assert not isinstance(got, DraftFailure), got
            if asked.count:
                assert got[PROPOSALS].tolist() == greedy([*known.tokens, asked.anchor], asked.count)

    def swap(self) -> None:
        free = self.some(lambda known: not known.tokens)
        used = self.some(lambda known: known.tokens)
        if free and used:
            self.pair.swap(used[0], free[0])

    def free(self) -> None:
        lane = self.random.choice(self.pair.lanes)
        self.pair.free(lane)
        self.known[lane] = Known()

    def save(self) -> None:
        lane = self.random.choice(self.pair.lanes)
        known = self.known[lane]
        self.saved.append((self.pair.save(lane), Known([*known.tokens], known.seen)))

    def load(self) -> None:
        free = self.some(lambda known: not known.tokens)
        if free and self.saved:
            self.pair.free(free[0])  # passes of others may have written there
            saved, known = self.random.choice(self.saved)
            # A draft goes on only from where both caches end.
            count = self.random.randint(0, len(known.tokens))
            if self.random.random() < 0.5:
                count = min(count, known.seen)
            self.pair.load(free[0], saved, count)
            self.known[free[0]] = Known(known.tokens[:count], min(known.seen, count), known.seen >= count)

    def check(self) -> None:
        target, draft = caches_of(self.pair)
        for lane in self.pair.lanes:
            known = self.known[lane]
            assert (lane.target.committed, lane.draft.committed) == (len(known.tokens), known.seen)
            np.testing.assert_array_equal(target[lane.index, : len(known.tokens)], known.tokens)
            np.testing.assert_array_equal(draft[lane.index, : known.seen], known.tokens[: known.seen])
        assert {lane.index for lane in self.known} == set(range(len(self.pair.lanes)))


@given(
    seed=st.integers(0, 2**32),
    lanes=st.integers(1, 5),
    first_row=st.integers(0, 1),
    max_length=st.sampled_from([60, 100, 400]),
)
@settings(max_examples=120, deadline=None)
def test_any_passes_over_any_lanes(seed, lanes, first_row, max_length):
    anything = Anything(seed, lanes, first_row, max_length)
    steps = [anything.target] * 5 + [anything.draft] * 5 + [anything.swap, anything.free]
    steps += [anything.save, anything.load]
    for _ in range(30):
        anything.random.choice(steps)()
        anything.check()
    for lane in anything.pair.lanes:
        anything.pair.free(lane)
    assert_clean(anything.pair)


# Features: where the target left them, or gathered.


def watch_features(decoder: ToyDecoder) -> list:
    given = []
    run = decoder.toy_draft.run

    def watched(cache, inputs, wanted, lanes=None):
        given.append(inputs[FEATURES])
        return run(cache, inputs, wanted, lanes)

    decoder.toy_draft.run = watched
    return given


def three_lanes(decoder: ToyDecoder) -> tuple[Pair, list[Lane], list[list[int]]]:
    """Three lanes with a prompt each, computed together; their features are where the target left them."""
    pair = toy_pair(decoder, 4)
    lanes, prompts = pair.lanes[:3], [prompt_of(5 + i, i) for i in range(3)]
    pair.run_target([(lane, target_pass(p, 1)) for lane, p in zip(lanes, prompts, strict=True)])
    for lane, prompt in zip(lanes, prompts, strict=True):
        lane.target.commit(len(prompt))
    return pair, lanes, prompts


def proposals_are_right(pair, lanes, prompts) -> None:
    anchors = [choice(prompt) for prompt in prompts]
    work = [(lane, draft_pass(anchor)) for lane, anchor in zip(lanes, anchors, strict=True)]
    for got, prompt in zip(pair.run_draft(work), prompts, strict=True):
        assert got[PROPOSALS].tolist() == greedy(prompt, BLOCK)[1:]


def test_features_are_handed_over_where_they_are():
    decoder = toy_decoder()
    given = watch_features(decoder)
    pair, lanes, prompts = three_lanes(decoder)
    proposals_are_right(pair, lanes, prompts)
    assert [type(features) for features in given] == [ToyTensor]


def test_features_are_handed_over_also_if_a_lane_takes_no_part():
    decoder = toy_decoder()
    given = watch_features(decoder)
    pair, lanes, prompts = three_lanes(decoder)
    proposals_are_right(pair, [lanes[2], lanes[0]], [prompts[2], prompts[0]])
    assert [type(features) for features in given] == [ToyTensor]
    assert lanes[1].draft.committed == 0
    proposals_are_right(pair, [lanes[1]], [prompts[1]])  # its own are still there


def test_features_of_plain_rounds_are_gathered():
    decoder = toy_decoder()
    given = watch_features(decoder)
    pair, lanes, prompts = three_lanes(decoder)
    for _ in range(3):
        work = [(lanes[1], target_pass([choice(prompts[1])])), (lanes[2], target_pass([choice(prompts[2])]))]
        pair.run_target(work)
        for (lane, asked), prompt in zip(work, prompts[1:], strict=True):
            lane.target.commit(1)
            prompt += asked.ids
    proposals_are_right(pair, lanes, prompts)
    assert [type(features) for features in given] == [np.ndarray]
    assert given[0].shape[:2] == (3, len(prompts[2]))  # all of lane 2, the longest


def test_features_move_with_their_lane():
    decoder = toy_decoder()
    given = watch_features(decoder)
    pair, lanes, prompts = three_lanes(decoder)
    pair.free(lanes[0])
    pair.swap(lanes[2], lanes[0])
    assert [lane.index for lane in (lanes[2], lanes[1], lanes[0])] == [0, 1, 2]
    proposals_are_right(pair, lanes[1:], prompts[1:])
    assert [type(features) for features in given] == [np.ndarray]


def test_features_that_do_not_continue_the_context_are_refused():
    pair, lanes, _ = three_lanes(toy_decoder())
    prefill(pair, lanes[0], [3, 4])
    lanes[0].features = lanes[0].features[1:]
    with pytest.raises(ValueError, match=r"lane 0: draft context ends at 0, .* start at \[5\]"):
        pair.run_draft([(lanes[0], draft_pass(1))])
    lanes[1].features = []
    with pytest.raises(ValueError, match=r"lane 1: .* start at \[\]"):
        pair.run_draft([(lanes[1], draft_pass(1))])


# Room.


def test_a_lane_without_room_is_drafted_by_itself():
    """A long context beside a lane that is nearly full: one pass would write behind its end."""
    decoder = toy_decoder(max_length=100)
    pair = toy_pair(decoder, 3)
    full, long, _ = pair.lanes
    prompts = [prompt_of(98, 1), prompt_of(70, 2)]
    prefill(pair, full, prompts[0][:90])
    pair.run_draft([(full, draft_pass(0, 0))])
    prefill(pair, full, prompts[0][90:])
    prefill(pair, long, prompts[1])
    decoder.toy_draft.calls.clear()
    proposals_are_right(pair, [long, full], [prompts[1], prompts[0]])
    assert [call["batch"] for call in decoder.toy_draft.calls] == [1, 1]


def test_a_pass_without_room_is_a_bug():
    pair = toy_pair(toy_decoder(max_length=100), 2)
    prefill(pair, pair.lanes[0], prompt_of(99))
    with pytest.raises(ValueError, match="pass of 10 rows at slot 99: does not fit into 108 slots"):
        pair.run_target([(pair.lanes[0], target_pass(prompt_of(10)))])


# Zeros, and NaN.

POISON = VOCAB - 1


class NanTarget(ToyTarget):
    """Features of a sequence that begins with POISON are NaN."""

    def compute(self, tokens, inputs, start, rows, several):
        outputs = super().compute(tokens, inputs, start, rows, several)
        if tokens[0] == POISON:
            outputs[FEATURES][..., 0] = np.nan
        return outputs


class NanDraft(ToyDraft):
    """As attention does it, a NaN in any slot that is looked at spoils the whole lane."""

    def compute(self, tokens, inputs, start, rows, several):
        features = inputs[FEATURES]
        known = np.nan_to_num(tokens)
        outputs = super().compute(known, {**inputs, FEATURES: np.nan_to_num(features)}, start, rows, several)
        tokens[start : start + rows] = features[0, :, 0]
        if np.isnan(tokens[: len(inputs[SLOTS])]).any():
            outputs[LOGIT_SUMS][...], outputs[DRAFT_LOGITS][...] = np.nan, np.nan
        return outputs


def nan_decoder() -> ToyDecoder:
    decoder = toy_decoder()
    manifest = decoder.manifest
    return ToyDecoder(manifest, NanTarget(manifest), NanDraft(manifest), None, decoder.settings)


def test_nan_of_a_request_stays_in_its_lane():
    pair, prompts = toy_pair(nan_decoder(), 3), [prompt_of(6, 1), [POISON, 4, 5], prompt_of(4, 2)]
    lanes = pair.lanes[:]
    pair.run_target([(lane, target_pass(p, 1)) for lane, p in zip(lanes, prompts, strict=True)])
    for lane, prompt in zip(lanes, prompts, strict=True):
        lane.target.commit(len(prompt))
    work = [(lane, draft_pass(choice(p))) for lane, p in zip(lanes, prompts, strict=True)]
    good, bad, also_good = pair.run_draft(work)
    assert good[PROPOSALS].tolist() == greedy(prompts[0], BLOCK)[1:]
    assert isinstance(bad, DraftFailure)
    assert "proposal 1 are not finite" in bad.cause
    assert also_good[PROPOSALS].tolist() == greedy(prompts[2], BLOCK)[1:]


@pytest.mark.parametrize("moved", [False, True])
def test_nan_of_a_request_does_not_reach_the_next(moved):
    """The next one is there before the others draft over the features of the last pass."""
    pair = toy_pair(nan_decoder(), 3)
    (first, poisoned, free), prompts = pair.lanes, [prompt_of(6, 1), [POISON, *prompt_of(9, 3)]]
    pair.run_target([(first, target_pass(prompts[0], 1)), (poisoned, target_pass(prompts[1], 1))])
    first.target.commit(6)
    poisoned.target.commit(10)
    if moved:
        pair.swap(poisoned, free)
        pair.free(poisoned)
        following = free
    else:
        pair.free(poisoned)
        following = poisoned
    proposals_are_right(pair, [first], [prompts[0]])
    assert not np.isnan(caches_of(pair)[1]).any()
    short = [7, 8]
    prefill(pair, following, short)
    proposals_are_right(pair, [following], [short])


def test_padding_rows_are_zeroed_too():
    """A pass writes as many rows to every lane in its range as the longest of them has."""
    pair = toy_pair(toy_decoder(), 3)
    low, between, high = pair.lanes
    prefill(pair, low, [1])
    pair.run_target([(low, target_pass([2])), (high, target_pass(prompt_of(50, 3), 1))])
    target, _ = caches_of(pair)
    target[between.index, 5:40] = np.nan
    target[low.index, 10:50] = np.nan
    for lane in pair.lanes:
        pair.free(lane)
    assert_clean(pair)


def test_what_was_written_by_a_load_or_a_swap_is_zeroed():
    pair = toy_pair(toy_decoder(), 3)
    prefill(pair, pair.lanes[0], prompt_of(30))
    pair.run_draft([(pair.lanes[0], draft_pass(0, 0))])
    saved = pair.save(pair.lanes[0])
    assert (saved.target_length, saved.draft_length) == (30, 30)
    assert saved.bytes == 2 * 30 * 8  # the toy's slots are float64
    pair.load(pair.lanes[1], saved, 20)
    pair.swap(pair.lanes[1], pair.lanes[2])
    for lane in pair.lanes:
        pair.free(lane)
    assert_clean(pair)


# Engines that fail.


def test_a_draft_that_failed_is_lost_for_every_lane_it_may_have_written_to():
    """Also for a lane that took no part in it; saved is only what is sound."""
    decoder = toy_decoder()
    pair, lanes, prompts = three_lanes(decoder)
    proposals_are_right(pair, lanes, prompts)
    for lane, prompt in zip(lanes, prompts, strict=True):
        prefill(pair, lane, [choice(prompt)])

    def fail(call, outputs):
        raise EngineError("draft broke")

    decoder.toy_draft.fault = fail
    both = [(lanes[0], draft_pass(1)), (lanes[2], draft_pass(1))]
    assert pair.run_draft(both) == [DraftFailure("draft broke")] * 2
    decoder.toy_draft.fault = None
    calls = len(decoder.toy_draft.calls)
    assert pair.run_draft([(lanes[1], draft_pass(1))]) == [DraftFailure("draft broke")]
    assert len(decoder.toy_draft.calls) == calls
    assert [pair.save(lane).draft_length for lane in lanes] == [0, 0, 0]
    for lane in lanes:
        pair.free(lane)
    assert_clean(pair)
    prefill(pair, lanes[1], prompts[1])
    proposals_are_right(pair, [lanes[1]], [prompts[1]])


def test_features_that_cannot_be_read_are_the_drafts_failure():
    decoder = toy_decoder()
    pair, lanes, _ = three_lanes(decoder)
    pair.swap(lanes[2], pair.lanes[3])  # so that the others have to be read, too

    def fail():
        raise EngineError("device is gone")

    for lane in lanes[:2]:
        lane.features[0].tensor.to_host = fail
    lanes[0].seen = None
    assert pair.run_draft([(lanes[0], draft_pass(1))]) == [DraftFailure("device is gone")]


def test_logits_are_given_to_who_asked():
    pair, lanes, prompts = three_lanes(toy_decoder(with_logits=True))
    work = [(lanes[0], target_pass([1, 2], logits=True)), (lanes[1], target_pass([3]))]
    first, second = pair.run_target(work)
    assert second.logits is None
    np.testing.assert_array_equal(first.logits[1], logits_of([*prompts[0], 1, 2]))
