"""Requests over shared lanes: each gives what it gives alone, whoever comes, goes, fails or is in the way."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.policy import FixedRows
from dflash_deploy.runtime.stats import Mode
from toy_engines import BLOCK, VOCAB, always, at_slot, choice, greedy, never, sometimes, toy_decoder
from toy_service import Turned, WildRows, prompt_of

PROMPT = [5, 9, 2, 60, 31]
SPOILERS = [never, always, sometimes, at_slot(2)]


# Who joins, who leaves.


@given(
    seed=st.integers(0, 2**32),
    lanes=st.integers(1, 6),
    first_row=st.integers(0, 1),
    block_size=st.integers(2, 9),
    spoiler=st.sampled_from(SPOILERS),
    prefill_rows=st.sampled_from([3, 16, 64]),
)
@settings(max_examples=60, deadline=None)
def test_every_output_is_its_own_whoever_comes_and_goes(
    seed, lanes, first_row, block_size, spoiler, prefill_rows
):
    chance = random.Random(seed)
    decoder = toy_decoder(spoiler, None, block_size, first_row, max_length=150)
    most = decoder.settings.verify_rows
    policy = WildRows(most, seed) if chance.random() < 0.5 else FixedRows(chance.randint(1, most))
    turned = Turned(decoder, lanes, prefill_rows, chance.choice([None, 2 * prefill_rows, 300]), policy)
    running, expected, stopped = [], {}, set()
    for index in range(14):
        for _ in range(chance.choice([0, 1, 1, 3])):
            if not turned.scheduler.free_lanes:
                break
            prompt = prompt_of(chance.choice([1, 2, 7, 40, chance.randint(1, 140)]), index)
            count = chance.choice([1, 2, 9, chance.randint(1, 150)])
            mode = chance.choice([Mode.SPECULATIVE, Mode.SPECULATIVE, Mode.PLAIN])
            sink, one = turned.admit(prompt, count, mode=mode, keep=chance.random() < 0.3)
            expected[sink] = greedy(prompt, min(count, 150 - len(prompt)))
            running.append((sink, one))
        if running and chance.random() < 0.2:
            sink, one = chance.choice(running)
            if not sink.ended:
                stopped.add(sink)
            turned.scheduler.stop(one, FinishReason.CANCELLED)
            turned.scheduler.settle()
        for _ in range(chance.randint(0, 6)):
            turned.cycle()
    turned.run()
    for sink, tokens in expected.items():
        if sink in stopped:
            assert sink.finish is FinishReason.CANCELLED
            assert sink.ids == tokens[: len(sink.ids)]
        else:
            assert sink.ids == tokens
            assert sink.finish is FinishReason.LENGTH
        assert sink.stats.draft_failures == 0, sink.stats.draft_failure
        assert sum(sink.stats.acceptance_lengths) == max(len(sink.ids) - 1, 0)


def test_a_pass_computes_nobody_but_who_runs():
    turned = Turned(toy_decoder(), lanes=8)
    for i in range(8):
        turned.admit(prompt_of(4, i), 10 + 9 * i)
    turned.cycle()
    calls = turned.decoder.toy_target.calls
    while turned.scheduler.running:
        running, done = len(turned.scheduler.running), len(calls)
        turned.cycle()
        assert [call["batch"] for call in calls[done:]] == [running]
    assert calls[-1]["batch"] == 1


def test_one_pass_of_each_model_is_one_round_of_all():
    turned = Turned(toy_decoder(), lanes=5)
    for i in range(5):
        turned.admit(prompt_of(3 + i, i), 3 * BLOCK + 1)
    turned.cycle()  # prefill, and the first round
    for runner in (turned.decoder.toy_target, turned.decoder.toy_draft):
        runner.calls.clear()
    turned.cycle()
    assert [call["rows"] for call in turned.decoder.toy_target.calls] == [BLOCK]
    assert len(turned.decoder.toy_draft.calls) == 1


def test_a_request_joins_between_two_rounds():
    turned = Turned(toy_decoder())
    first, _ = turned.admit(PROMPT, 60)
    turned.cycle()
    turned.cycle()
    late, _ = turned.admit([7, 7], 20)
    turned.cycle()
    assert len(late.ids) == 1 + BLOCK  # its prompt and its first round, while the other had one of its own
    assert first.cycles == [1, 1, 2, 3]
    turned.run()
    assert (first.ids, late.ids) == (greedy(PROMPT, 60), greedy([7, 7], 20))


# Prompts.


def test_prompts_that_came_together_are_computed_together():
    turned = Turned(toy_decoder(), lanes=4)
    for i in range(4):
        turned.admit(prompt_of(30 + i, i), 5)
    turned.cycle()
    assert [(call["batch"], call["rows"]) for call in turned.decoder.toy_target.calls] == [(4, 33), (4, 4)]
    assert [call["batch"] for call in turned.decoder.toy_draft.calls] == [4]


def test_prompts_of_other_lengths_are_not_padded_to_the_longest():
    turned = Turned(toy_decoder(), lanes=4)
    for i, length in enumerate([60, 3, 4, 58]):
        turned.admit(prompt_of(length, i), 5)
    turned.cycle()
    prefills = [(call["batch"], call["rows"]) for call in turned.decoder.toy_target.calls[:-1]]
    assert sorted(prefills) == [(1, 58), (1, 60), (2, 4)]


@pytest.mark.parametrize("longs", [1, 3])
def test_long_prompts_do_not_starve_those_that_decode(longs):
    """Every cycle has a round of whoever decodes, and no more rows of prompts than were allowed."""
    turned = Turned(toy_decoder(always, max_length=1000), 1 + longs, prefill_rows=16, cycle_prefill_rows=40)
    short, _ = turned.admit([1, 2], 200)
    turned.cycle()
    prompts = [prompt_of(700 + i, i) for i in range(longs)]
    sinks = [turned.admit(prompt, 4)[0] for prompt in prompts]
    calls = turned.decoder.toy_target.calls
    while not short.ended:
        done, had = len(calls), len(short.ids)
        turned.cycle()
        assert len(short.ids) == had + 1  # with a draft that is always wrong
        prefill = calls[done:-1]
        assert sum(call["batch"] * call["rows"] for call in prefill) <= 40
    turned.run()
    assert short.ids == greedy([1, 2], 200)
    assert [sink.ids for sink in sinks] == [greedy(prompt, 4) for prompt in prompts]


def test_those_that_decode_do_not_starve_long_prompts():
    """A prompt of so many parts is there after so many turns of those that are computed with it."""
    turned = Turned(toy_decoder(always, max_length=1000), lanes=8, prefill_rows=16)
    for i in range(5):
        turned.admit(prompt_of(2, i), 900)
    turned.cycle()
    parts, longs = 10, [turned.admit(prompt_of(160, 50 + i), 2)[0] for i in range(3)]
    for _ in range(parts * len(longs)):
        assert not all(sink.ended for sink in longs)
        turned.cycle()
    assert all(sink.ids for sink in longs)


def test_newcomers_do_not_get_before_a_prompt_that_waits():
    turned = Turned(toy_decoder(always, max_length=1000), lanes=6, prefill_rows=16)
    turned.admit([1], 900)
    turned.cycle()
    long, _ = turned.admit(prompt_of(160, 9), 2)
    cycles = 0
    while not long.ids:
        if turned.scheduler.free_lanes:
            turned.admit(prompt_of(16, 10 + cycles), 1)
        turned.cycle()
        cycles += 1
        assert cycles <= 5 * 10, "the long prompt starves"


def test_long_prompts_take_turns():
    turned = Turned(toy_decoder(always, max_length=1000), lanes=4, prefill_rows=16)
    turned.admit([1], 900)
    turned.cycle()
    lanes = [turned.admit(prompt_of(300, 9 + i), 2)[1].lane for i in range(3)]
    for cycle in range(1, 46):
        turned.cycle()
        parts = [lane.target.committed // 16 for lane in lanes]
        assert sum(parts) == cycle
        assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_features_of_plain_rounds_fit_into_a_pass(rows):
    """Rounds without a draft leave features behind, never more than one pass of the draft may take in."""

    class Plain(FixedRows):
        def rows(self, requests):
            return 1 if turned.cycles % 150 else self.count

    decoder = toy_decoder(max_length=800)
    decoder.toy_draft.limits_planned = decoder.toy_target.limits_planned = type(
        decoder.toy_draft.limits_planned
    )(800, 808, max(rows, BLOCK), BLOCK, 4)
    turned = Turned(decoder, prefill_rows=rows, policy=Plain(BLOCK))
    first, _ = turned.admit(prompt_of(30), 400)
    second, _ = turned.admit(prompt_of(3, 1), 340)
    turned.run()
    assert (first.ids, second.ids) == (greedy(prompt_of(30), 400), greedy(prompt_of(3, 1), 340))
    assert first.stats.draft_failures == second.stats.draft_failures == 0
    assert max(first.stats.acceptance_lengths) == BLOCK


# Stops, in company (A05).


@pytest.mark.parametrize("spoiler", [never, at_slot(3)])
@pytest.mark.parametrize("position", range(2 * BLOCK + 2))
def test_stop_at_every_position(position, spoiler):
    full = greedy(PROMPT, 60)
    first = full.index(full[position])
    absent = next(token for token in range(VOCAB) if token not in full)
    stops = [absent, full[position]]
    turned = Turned(toy_decoder(spoiler), lanes=6)
    cases = []
    for budget, stopped in ((60, True), (first + 2, True), (first + 1, True), (first, False)):
        if budget:
            sink, one = turned.admit(PROMPT, budget, stop_token_ids=stops, keep=True)
            cases.append((sink, one, budget, stopped))
    other, _ = turned.admit([8, 8], 50, stop_token_ids=())
    turned.run()
    for sink, _, budget, stopped in cases:
        assert sink.ids == full[: first + 1 if stopped else budget]
        assert sink.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        # Nothing behind it in what a next turn would find, either.
        assert sink.kept.target_length == len(PROMPT) + len(sink.ids) - 1
        assert sink.stats.target_kv_length == sink.kept.target_length
        (tokens,) = sink.kept.target
        assert tokens[0, :, 0].tolist() == [*PROMPT, *sink.ids][:-1]
        assert sum(sink.stats.acceptance_lengths) == len(sink.ids) - 1
    assert other.ids == greedy([8, 8], 50)


# Nothing stays (A15).


def test_nothing_is_left_between_requests():
    """Long, short, one token, long; eight at once; one: each as if it were the first."""
    turned = Turned(toy_decoder(sometimes), lanes=8)

    def check(*requests: tuple[list[int], int]) -> None:
        sinks = [turned.admit(prompt, count)[0] for prompt, count in requests]
        turned.run()
        for sink, (prompt, count) in zip(sinks, requests, strict=True):
            assert sink.ids == greedy(prompt, count)
            assert sink.stats.cached_tokens == 0

    for length, count in ((200, 90), (5, 20), (1, 1), (180, 120)):
        check((prompt_of(length), count))
    check(*((prompt_of(5 + 9 * i, i), 4 + 11 * i) for i in range(8)))
    check((PROMPT, 30))


def test_a_sink_that_raises_ends_its_request_alone():
    turned = Turned(toy_decoder(), lanes=3)
    sinks = [turned.admit(prompt_of(4, i), 40)[0] for i in range(3)]

    def broken(step):
        raise ZeroDivisionError("somebody's callback")

    turned.cycle()
    sinks[1].step = broken
    turned.run()
    assert isinstance(sinks[1].error, ZeroDivisionError)
    for i in (0, 2):
        assert sinks[i].ids == greedy(prompt_of(4, i), 40)


def test_requests_that_ended_are_not_held():
    turned = Turned(toy_decoder(), lanes=2)
    sink, one = turned.admit(PROMPT, 10)
    seen = weakref.ref(one.job)
    turned.run()
    turned.sinks.clear()
    del sink, one
    assert seen() is None


# Engines that fail.


def test_an_engine_error_ends_who_was_in_that_pass():
    """A prefill fails while others decode: they do not notice."""
    turned = Turned(toy_decoder(), lanes=4)
    going = [turned.admit(prompt_of(4, i), 60)[0] for i in range(2)]
    turned.cycle()
    failing = [turned.admit(prompt_of(30, 7 + i), 60)[0] for i in range(2)]
    turned.decoder.toy_target.fail_at = len(turned.decoder.toy_target.calls)
    fail = turned.decoder.toy_target.before

    def once(sizes):
        try:
            fail(sizes)
        finally:
            turned.decoder.toy_target.fail_at = None

    turned.decoder.toy_target.before = once
    turned.cycle()
    assert [str(sink.error) for sink in failing] == ["target broke"] * 2
    later, _ = turned.admit(prompt_of(5, 20), 30)
    turned.run()
    assert [sink.ids for sink in going] == [greedy(prompt_of(4, i), 60) for i in range(2)]
    assert later.ids == greedy(prompt_of(5, 20), 30)


def test_a_failing_verify_pass_ends_its_range_and_the_next_request_runs():
    turned = Turned(toy_decoder(), lanes=3, prefill_rows=16)
    sinks = [turned.admit(prompt_of(4, i), 60)[0] for i in range(2)]
    turned.cycle()
    turned.decoder.toy_target.fail_at = 0
    turned.cycle()
    assert all(isinstance(sink.error, EngineError) for sink in sinks)
    assert not turned.scheduler.running
    turned.decoder.toy_target.fail_at = None
    again, _ = turned.admit(prompt_of(4, 0), 60)
    turned.run()
    assert again.ids == greedy(prompt_of(4, 0), 60)


def test_logits_of_one_request_that_are_nan_end_it_alone():
    from dflash_deploy.runtime.sampling import Sampling

    decoder = toy_decoder(with_logits=True)
    turned = Turned(decoder, lanes=2)

    def spoil(outputs):
        if outputs["logits"].shape[0] == 2 and outputs["logits"].shape[1] > 2:
            outputs["logits"][0] = np.nan

    decoder.toy_target.after = spoil
    bad, _ = turned.admit(PROMPT, 30, sampling=Sampling(1.0, seed=1))
    good, _ = turned.admit([3, 4], 30)
    turned.run()
    assert "has the maximum nan" in str(bad.error)
    assert good.ids == greedy([3, 4], 30)


def nan(call, outputs):
    outputs["logit_sums"][0, 0] = np.nan


def broke(call, outputs):
    raise EngineError("draft broke")


def no_tokens(call, outputs):
    outputs["proposals"][0, 0] = VOCAB


@pytest.mark.parametrize(("fault", "failures"), [(nan, 1), (broke, 3), (no_tokens, 1)])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_failing_draft_costs_only_speed(fault, failures, at, caplog):
    """NaN in a row costs one request its draft; an engine that fails, all of the pass."""

    def once(call, outputs):
        if call == at:
            fault(call, outputs)

    turned = Turned(toy_decoder(fault=once), lanes=3)
    sinks = [turned.admit(prompt_of(4, i), 60, keep=True)[0] for i in range(3)]
    turned.run()
    assert [sink.ids for sink in sinks] == [greedy(prompt_of(4, i), 60) for i in range(3)]
    assert [sink.stats.draft_failures for sink in sinks] == [1] * failures + [0] * (3 - failures)
    warned = [r for r in caplog.records if "goes on without it" in r.getMessage()]
    assert len(warned) == failures
    # What a session would keep of the draft is sound, or nothing.
    for index, sink in enumerate(sinks):
        assert (sink.kept.draft_length > 0) == (index >= failures)
        assert sink.kept.target_length == 4 + 60 - 1


def test_a_draft_may_fail_while_a_prompt_is_computed():
    def once(call, outputs):
        if call == 1:  # the first part of the long prompt
            raise EngineError("draft broke")

    turned = Turned(toy_decoder(fault=once), lanes=2, prefill_rows=8)
    sink, _ = turned.admit(prompt_of(60), 20)
    other, _ = turned.admit([1], 50)
    turned.run()
    assert sink.ids == greedy(prompt_of(60), 20)
    assert other.ids == greedy([1], 50)
    assert sink.stats.draft_failures == 1
    assert sink.stats.draft_failure == "draft broke"


def test_a_draft_pass_has_room_in_every_lane():
    """One is near the end of its lane, another comes with a long context: found as a crash of all."""

    class Now(FixedRows):
        plain = True

        def rows(self, requests):
            return 1 if self.plain else self.count

    policy = Now(BLOCK)
    turned = Turned(toy_decoder(max_length=100), lanes=3, prefill_rows=64, policy=policy)
    full, _ = turned.admit(prompt_of(90, 1), 10)
    turned.cycle()
    plain, _ = turned.admit(prompt_of(3, 2), 60, mode=Mode.PLAIN)
    late, _ = turned.admit(prompt_of(40, 3), 50)
    turned.cycle()
    turned.cycle()
    policy.plain = False
    turned.run()
    assert full.ids == greedy(prompt_of(90, 1), 10)
    assert late.ids == greedy(prompt_of(40, 3), 50)
    assert plain.ids == greedy(prompt_of(3, 2), 60)
    assert full.stats.draft_failures == late.stats.draft_failures == 0


# What was kept of an earlier request.


@given(
    st.integers(0, 60),
    st.integers(1, 60),
    st.sampled_from(list(Mode)),
    st.sampled_from(list(Mode)),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_what_was_kept_is_not_computed_again(shared, more, first_mode, mode, data):
    turned = Turned(toy_decoder(sometimes), lanes=3, prefill_rows=32)
    before, _ = turned.admit(prompt_of(30), 40, keep=True, mode=first_mode)
    turned.admit([9], 70)
    turned.run()
    tokens = [*prompt_of(30), *before.ids][:-1]
    prompt = [*tokens[:shared], *prompt_of(more, 77)]
    common = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), shared)
    common = min(common, len(prompt) - 1)
    after, _ = turned.admit(prompt, 30, before.kept, common, mode=mode)
    turned.admit([8], data.draw(st.integers(1, 30)))
    computed = len(turned.decoder.toy_target.calls)
    turned.run()
    assert after.ids == greedy(prompt, 30)
    reused = min(common, before.kept.draft_length) if mode is Mode.SPECULATIVE else common
    assert after.stats.cached_tokens == reused
    assert after.stats.draft_failures == 0
    assert len(turned.decoder.toy_target.calls) > computed
    if first_mode is Mode.PLAIN:
        assert before.kept.draft_length == 0


def test_prompts_are_computed_together_only_where_there_is_room():
    """The last part of one stands near the end of its lane, where a part of the other would not fit."""
    turned = Turned(toy_decoder(max_length=100), lanes=2, prefill_rows=20)
    before, _ = turned.admit(prompt_of(90), 5, keep=True)
    turned.run()
    turned.decoder.toy_target.calls.clear()
    near, _ = turned.admit([*prompt_of(90), *prompt_of(9, 3)], 1, before.kept, 90)
    other, _ = turned.admit(prompt_of(40, 4), 1)
    turned.run()
    assert near.ids == greedy([*prompt_of(90), *prompt_of(9, 3)], 1)
    assert other.ids == greedy(prompt_of(40, 4), 1)
    assert [call["batch"] for call in turned.decoder.toy_target.calls] == [1, 1, 1]


def test_a_cache_that_cannot_be_saved_costs_only_the_next_turn(caplog):
    turned = Turned(toy_decoder(), lanes=1)
    sink, _ = turned.admit(PROMPT, 10, keep=True)

    def broken(lane):
        raise EngineError("copy failed")

    turned.pair.save = broken
    turned.run()
    assert sink.ids == greedy(PROMPT, 10)
    assert sink.kept is None
    assert "copy failed" in caplog.text


def test_a_cache_that_cannot_be_loaded_ends_the_request():
    turned = Turned(toy_decoder(), lanes=2)
    before, _ = turned.admit(PROMPT, 10, keep=True)
    turned.run()

    def broken(lane, saved, tokens):
        raise EngineError("copy failed")

    turned.pair.load = broken
    after, _ = turned.admit([*PROMPT, *before.ids], 10, before.kept, 8)
    assert str(after.error) == "copy failed"
    other, _ = turned.admit(PROMPT, 10)
    turned.run()
    assert other.ids == greedy(PROMPT, 10)
    assert choice(PROMPT) == other.ids[0]
