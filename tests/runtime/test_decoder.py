"""The loop over the toy pair: what it commits, how it ends, what it asks for, and what it leaves behind."""

import gc
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError, RequestError
from dflash_deploy.bundle.limits import PREFILL_ROWS
from dflash_deploy.runtime import decoder as decoder_module
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.stats import Mode
from toy_engines import (
    BLOCK,
    VOCAB,
    always,
    at_slot,
    choice,
    expected_lengths,
    greedy,
    hash_of,
    never,
    sometimes,
    toy_decoder,
)

PROMPT = [5, 9, 2, 60, 31]
SPOILERS = {"never": never, "always": always, "sometimes": sometimes, "slot 2": at_slot(2)}
prompts = st.lists(st.integers(0, VOCAB), min_size=1, max_size=12)


# Tokens: speculative == plain == greedy.


@given(
    prompt=prompts,
    count=st.integers(1, 60),
    seed=st.integers(0, 99),
    block_size=st.integers(2, 9),
    first_row=st.integers(0, 1),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_speculative_equals_plain_for_any_acceptance(prompt, count, seed, block_size, first_row, data):
    most = block_size - first_row + 1
    verify_rows = data.draw(st.integers(2, most)) if most > 2 else 2

    def spoiler(position, index):
        return hash_of([seed, position]) % 4 == 0

    decoder = toy_decoder(spoiler, None, block_size, first_row, verify_rows)
    plain = decoder.generate(prompt, count, mode=Mode.PLAIN)
    speculative = decoder.generate(prompt, count)
    assert list(plain.ids) == list(speculative.ids) == greedy(prompt, count)
    assert plain.finish_reason is speculative.finish_reason is FinishReason.LENGTH
    assert list(speculative.stats.acceptance_lengths) == expected_lengths(
        prompt, speculative.ids, count, spoiler, verify_rows, block_size - first_row
    )


@pytest.mark.parametrize("name", SPOILERS)
def test_acceptance_lengths(name):
    decoder = toy_decoder(SPOILERS[name])
    stats = decoder.generate(PROMPT, 50).stats
    assert list(stats.acceptance_lengths) == expected_lengths(
        PROMPT, greedy(PROMPT, 50), 50, SPOILERS[name], BLOCK
    )
    assert sum(stats.acceptance_lengths) == stats.new_tokens - 1 == 49
    if name == "never":
        assert set(stats.acceptance_lengths[:-1]) == {BLOCK}
    if name == "always":
        assert set(stats.acceptance_lengths) == {1}


def test_lone_rows_are_padded_only_when_exact():
    """A lone row may choose otherwise at a near tie: exact decoding has none."""
    exact, fast = toy_decoder(), toy_decoder(exact=False)
    expected = greedy(PROMPT, 120)
    assert list(exact.generate(PROMPT, 120, mode=Mode.PLAIN).ids) == expected
    assert list(exact.generate(PROMPT, 120).ids) == expected
    assert min(call["rows"] for call in exact.toy_target.calls) == 2
    assert min(call["logit_rows"] for call in exact.toy_target.calls) == 2
    differing = fast.generate(PROMPT, 120, mode=Mode.PLAIN)
    assert list(differing.ids) != expected
    assert {call["rows"] for call in fast.toy_target.calls[1:]} == {1}


@pytest.mark.parametrize("extra", [-1, 0, 1, PREFILL_ROWS + 3])
def test_long_prompts_are_prefilled_in_parts(extra):
    prompt = [hash_of([i]) % VOCAB for i in range(PREFILL_ROWS + extra)]
    decoder = toy_decoder(max_length=2000)
    result = decoder.generate(prompt, 30)
    assert list(result.ids) == greedy(prompt, 30)
    assert max(call["rows"] for call in decoder.toy_target.calls) <= PREFILL_ROWS
    # Every part's features arrived: an oracle that misses one proposes nonsense.
    assert list(result.stats.acceptance_lengths) == expected_lengths(prompt, result.ids, 30, never, BLOCK)


# Budget, context limit, stop ids (A05).


@pytest.mark.parametrize("count", range(1, 2 * BLOCK + 2))
def test_nothing_is_computed_beyond_the_budget(count):
    decoder = toy_decoder()
    result = decoder.generate(PROMPT, count)
    assert list(result.ids) == greedy(PROMPT, count)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.stats.target_kv_length == len(PROMPT) + count - 1
    done, drafts = 1, 0
    for call, length in zip(decoder.toy_target.calls[1:], result.stats.acceptance_lengths, strict=True):
        assert call["rows"] <= max(count - done, 2)
        drafts += count - done > 1  # the last token alone is a plain step
        done += length
    assert len(decoder.toy_draft.calls) == drafts


@pytest.mark.parametrize("length", range(5, 5 + 2 * BLOCK))
def test_context_limit_ends_the_generation(length):
    decoder = toy_decoder(max_length=length + 1)
    result = decoder.generate(PROMPT, 1000)
    assert list(result.ids) == greedy(PROMPT, length + 1 - len(PROMPT))
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("spoiler", [never, always, at_slot(3)])
@pytest.mark.parametrize("position", range(2 * BLOCK + 2))
def test_stop_at_every_position(position, spoiler):
    """Two stop ids, one of which never comes; the budget ends at, just before and just behind the stop."""
    full = greedy(PROMPT, 60)
    first = full.index(full[position])  # the token may have come earlier
    absent = next(token for token in range(VOCAB) if token not in full)
    decoder = toy_decoder(spoiler)
    for budget, stopped in ((60, True), (first + 2, True), (first + 1, True), (first, False)):
        if budget == 0:
            continue
        stream = decoder.stream(PROMPT, budget, stop_token_ids=[absent, full[position]])
        streamed = [token for chunk in stream for token in chunk.ids]
        result = stream.result
        assert streamed == list(result.ids) == full[: first + 1 if stopped else budget]
        assert result.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert result.stats.target_kv_length == len(PROMPT) + len(streamed) - 1
        assert sum(result.stats.acceptance_lengths) == len(streamed) - 1
        plain = decoder.generate(PROMPT, budget, mode=Mode.PLAIN, stop_token_ids=[absent, full[position]])
        assert (plain.ids, plain.finish_reason) == (result.ids, result.finish_reason)


@given(st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=4), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_stop_ids_and_budget(stops, budget):
    decoder = toy_decoder(sometimes, stops=tuple(stops))
    full = greedy(PROMPT, budget)
    cut = next((i + 1 for i, token in enumerate(full) if token in stops), None)
    result = decoder.generate(PROMPT, budget)
    assert list(result.ids) == full[:cut]
    assert result.finish_reason is (FinishReason.LENGTH if cut is None else FinishReason.STOP)


def test_an_empty_list_of_stop_ids_replaces_the_bundles():
    stop = greedy(PROMPT, 1)[0]
    decoder = toy_decoder(stops=(stop,))
    assert decoder.generate(PROMPT, 9).ids == (stop,)
    assert list(decoder.generate(PROMPT, 9, stop_token_ids=[]).ids) == greedy(PROMPT, 9)


# Shapes.


@given(prompts, st.integers(1, 200), st.integers(2, 16))
@settings(max_examples=40, deadline=None)
def test_shapes_are_few_and_within_limits(prompt, count, block_size):
    """The toy engines check the limits; here, that lengths looked at are rounded to buckets."""
    decoder = toy_decoder(sometimes, block_size=block_size, max_length=300)
    decoder.generate(prompt, count)
    for call in decoder.toy_target.calls + decoder.toy_draft.calls:
        assert call["kv"] % 64 == 0 or call["kv"] == 300 + block_size
    assert len({call["kv"] for call in decoder.toy_target.calls}) <= 1 + (len(prompt) + count) // 64 + 1


def watch_caches(monkeypatch, decoder):
    """Weak references to the target's caches, and their capacities, as they are made."""
    seen = []
    new_cache = decoder.toy_target.new_cache

    def watched(capacity, batch=1):
        cache = new_cache(capacity, batch)
        seen.append((weakref.ref(cache), capacity))
        return cache

    monkeypatch.setattr(decoder.toy_target, "new_cache", watched)
    return seen


def test_caches_are_sized_for_the_request(monkeypatch):
    decoder = toy_decoder(max_length=4000)
    caches = watch_caches(monkeypatch, decoder)
    decoder.generate(PROMPT, 10)
    decoder.generate(PROMPT, 3000)
    assert [capacity for _, capacity in caches] == [64, 3072]


# Failing drafts (A09).


def not_finite(call, outputs):
    if call == 2:
        outputs["logit_sums"][0, 1] = np.nan


def infinite(call, outputs):
    if call == 2:
        outputs["logit_sums"][0, 0] = np.inf


def raising(call, outputs):
    if call == 2:
        raise EngineError("draft broke")


def beyond_vocabulary(call, outputs):
    if call == 2:
        outputs["proposals"][0, 0] = VOCAB


def negative(call, outputs):
    if call == 2:
        outputs["proposals"][0, 2] = -1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (not_finite, "proposal 2 are not finite"),
        (infinite, "proposal 1 are not finite"),
        (raising, "draft broke"),
        (beyond_vocabulary, "not all tokens"),
        (negative, "not all tokens"),
    ],
)
def test_a_failing_draft_is_counted_named_once_and_left_alone(fault, words, caplog):
    decoder = toy_decoder(fault=fault)
    with caplog.at_level(logging.WARNING, "dflash_deploy"):
        result = decoder.generate(PROMPT, 40)
    assert list(result.ids) == greedy(PROMPT, 40)
    assert result.stats.draft_failures == 1
    assert words in (result.stats.draft_failure or "")
    assert [record for record in caplog.records if words in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1
    assert len(decoder.toy_draft.calls) == 2  # not asked again
    assert result.stats.acceptance_lengths == (BLOCK, *[1] * (39 - BLOCK))
    # The next request starts afresh, with the draft.
    decoder.toy_draft.fault = None
    again = decoder.generate(PROMPT, 40)
    assert again.stats.draft_failures == 0
    assert again.stats.draft_failure is None
    assert max(again.stats.acceptance_lengths) == BLOCK


def test_a_draft_that_fails_in_prefill_leaves_a_plain_request():
    def broken(call, outputs):
        raise EngineError("draft broke")

    decoder = toy_decoder(fault=broken, max_length=2000)
    prompt = [3] * (PREFILL_ROWS + 9)
    result = decoder.generate(prompt, 12)
    assert list(result.ids) == greedy(prompt, 12)
    assert (result.stats.draft_failures, len(decoder.toy_draft.calls)) == (1, 1)


def test_what_lies_behind_a_short_block_is_not_looked_at(caplog):
    """The toy draft fills it with NaN and invalid ids."""
    for count in range(2, BLOCK + 1):
        assert toy_decoder().generate(PROMPT, count).stats.draft_failures == 0
    assert not caplog.records


def test_a_failing_target_ends_the_stream_with_its_error():
    decoder = toy_decoder(fail_at=2)
    stream = decoder.stream(PROMPT, 40)
    next(stream)
    with pytest.raises(EngineError, match="target broke"):
        list(stream)
    assert list(stream) == []
    with pytest.raises(RequestError, match=r"ended in an error: .*target broke"):
        _ = stream.result


# Nothing is left between requests (A15), and a reader may go away (D04).

SEQUENCE = [[7] * 90, PROMPT, [4], [11] * 120]


def test_requests_in_turn_equal_fresh_ones():
    decoder = toy_decoder(sometimes)
    for prompt in SEQUENCE + SEQUENCE[::-1]:
        for mode in Mode:
            fresh = toy_decoder(sometimes).generate(prompt, 30, mode=mode)
            got = decoder.generate(prompt, 30, mode=mode)
            assert (got.ids, got.stats.acceptance_lengths) == (fresh.ids, fresh.stats.acceptance_lengths)


def test_streams_read_in_alternation_do_not_see_each_other():
    decoder = toy_decoder(sometimes)
    streams = [decoder.stream(prompt, 30) for prompt in SEQUENCE]
    open_streams = list(streams)
    while open_streams:
        open_streams = [stream for stream in open_streams if next(stream, None) is not None]
    for prompt, stream in zip(SEQUENCE, streams, strict=True):
        assert list(stream.result.ids) == greedy(prompt, 30)


def test_streams_in_threads():
    decoder = toy_decoder(sometimes)
    prompts = [[i, *PROMPT] for i in range(8)]
    got = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: got.update({i: decoder.generate(p, 30).ids}))
        for i, p in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, prompt in enumerate(prompts):
        assert list(got[i]) == greedy(prompt, 30)
    assert list(decoder.generate(PROMPT, 30).ids) == greedy(PROMPT, 30)


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_closing_a_stream_ends_it_at_once(chunks):
    decoder = toy_decoder(always)
    stream = decoder.stream(PROMPT, 60)
    read = [token for _ in range(chunks) for token in next(stream).ids]
    calls = len(decoder.toy_target.calls)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert len(decoder.toy_target.calls) == calls == chunks
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert list(stream.result.ids) == read
    assert stream.result.stats.new_tokens == chunks
    assert list(decoder.generate(PROMPT, 30).ids) == greedy(PROMPT, 30)


def test_an_exception_in_the_reader_leaves_the_decoder_usable():
    decoder = toy_decoder()

    def reader():
        with decoder.stream(PROMPT, 60) as stream:
            for index, _ in enumerate(stream):
                if index == 2:
                    raise KeyError("reader")

    with pytest.raises(KeyError):
        reader()
    assert len(decoder.toy_target.calls) == 3
    assert list(decoder.generate(PROMPT, 30).ids) == greedy(PROMPT, 30)


def test_ended_and_dropped_streams_free_their_caches(monkeypatch):
    decoder = toy_decoder()
    caches = watch_caches(monkeypatch, decoder)
    ended = decoder.stream(PROMPT, 20)
    list(ended)
    closed = decoder.stream(PROMPT, 20)
    next(closed)
    closed.close()
    dropped = decoder.stream(PROMPT, 20)
    next(dropped)
    del dropped
    gc.collect()
    assert [cache() for cache, _ in caches] == [None] * 3
    assert ended.result.finish_reason is FinishReason.LENGTH


def test_nothing_is_computed_before_the_first_read():
    decoder = toy_decoder()
    decoder.stream(PROMPT, 20)
    assert decoder.toy_target.calls == []


# Requests that cannot be served.


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "got no tokens"),
        ([3] * 400, "got 400, expected at most 399"),
        ([1, VOCAB + 1], r"prompt\[1\]: got 98, expected a token id, 0 <= id < 98"),
        ([-1], r"prompt\[0\]: got -1"),
        ([1.5], r"prompt\[0\]: got 1.5"),
        (["a"], r"prompt\[0\]: got 'a'"),
        ("text", "no tokenizer"),
    ],
)
def test_bad_prompts(prompt, words):
    with pytest.raises(RequestError, match=words):
        toy_decoder().stream(prompt)


@pytest.mark.parametrize("count", [0, -3, 1.5, None])
def test_bad_max_new_tokens(count):
    with pytest.raises(RequestError, match=r"max_new_tokens: got .*, expected >= 1"):
        toy_decoder().stream(PROMPT, count)


def test_a_mode_by_name_is_refused():
    name: Any = "plain"
    with pytest.raises(RequestError, match="mode: got 'plain', expected"):
        toy_decoder().stream(PROMPT, 3, mode=name)


def test_bad_stop_ids():
    with pytest.raises(RequestError, match=r"stop_token_ids\[0\]: got 1000"):
        toy_decoder().stream(PROMPT, 3, stop_token_ids=[1000])


def test_a_system_message_beside_ids_is_refused():
    with pytest.raises(RequestError, match="system"):
        toy_decoder().stream(PROMPT, 3, system="be brief")


@pytest.mark.parametrize("rows", [0, 1, BLOCK + 1])
def test_bad_verify_rows(rows):
    with pytest.raises(RequestError, match=r"verify_rows: got .*, expected 2 to 8"):
        toy_decoder(verify_rows=rows)


@pytest.mark.parametrize("length", [1, 401])
def test_bad_max_length(length):
    with pytest.raises(RequestError, match=r"max_length: got .*, expected 2 to 400"):
        toy_decoder().with_settings(max_length=length)


def test_a_prompt_that_just_fits():
    decoder = toy_decoder(max_length=40)
    prompt = [3] * 39
    assert list(decoder.generate(prompt, 9).ids) == greedy(prompt, 1)


def test_numpy_ids_are_ids():
    ids: Any = np.array(PROMPT)
    assert list(toy_decoder().generate(ids, 4).ids) == greedy(PROMPT, 4)


def test_result_before_the_end():
    stream = toy_decoder().stream(PROMPT, 20)
    next(stream)
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.result


# Text and figures.


class Letters:
    """A codec that holds the last token back, as one with characters over several tokens does."""

    def encode_prompt(self, prompt, chat, system=None):
        assert (chat, system) == (False, None)
        return [ord(char) - 97 for char in prompt]

    def stream(self):
        return LetterStream()


class LetterStream:
    def __init__(self):
        self.held = ""

    def push(self, ids):
        text = self.held + "".join(chr(97 + i) for i in ids)
        self.held = text[-1:]
        return text[:-1]

    def close(self):
        held, self.held = self.held, ""
        return held


def test_text_follows_the_tokens():
    decoder = toy_decoder(codec=Letters())
    stream = decoder.stream("fdg", 20, chat=False)
    chunks = list(stream)
    expected = greedy([5, 3, 6], 20)
    assert (
        "".join(chunk.text for chunk in chunks)
        == stream.result.text
        == "".join(chr(97 + i) for i in expected)
    )
    assert all(chunk.ids for chunk in chunks)
    cancelled = decoder.stream("fdg", 20, chat=False)
    text = next(cancelled).text + next(cancelled).text
    cancelled.close()
    assert cancelled.result.text == text


def test_figures():
    decoder = toy_decoder(sometimes)
    stats = decoder.generate(PROMPT, 40).stats
    assert (stats.mode, stats.prompt_tokens, stats.new_tokens) == (Mode.SPECULATIVE, 5, 40)
    assert stats.rounds == len(stats.acceptance_lengths) == len(decoder.toy_target.calls) - 1
    assert stats.acceptance_length == pytest.approx(39 / stats.rounds)
    assert (stats.target_kv_length, stats.draft_kv_length) == (44, 44 - stats.acceptance_lengths[-1])
    assert min(stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.other_ms) > 0
    assert stats.total_ms == pytest.approx(stats.prefill_ms + stats.decode_ms)
    assert 0 < stats.other_share < 1
    assert stats.tokens_per_s == pytest.approx(39_000 / stats.decode_ms)
    plain = decoder.generate(PROMPT, 40, mode=Mode.PLAIN).stats
    assert (plain.draft_ms, plain.draft_kv_length, plain.rounds, plain.acceptance_length) == (0, 0, 39, 1)
    one = decoder.generate(PROMPT, 1).stats
    assert (one.rounds, one.acceptance_length, one.tokens_per_s) == (0, 0, 0)


def test_time_of_the_reader_is_not_counted():
    import time

    decoder = toy_decoder()
    stream = decoder.stream(PROMPT, 12)
    for _ in stream:
        time.sleep(0.1)
    assert stream.result.stats.total_ms < 100


def test_closing_the_decoder_ends_its_streams():
    with toy_decoder() as decoder:
        stream = decoder.stream(PROMPT, 20)
        next(stream)
    decoder.close()
    with pytest.raises(EngineError, match="closed"):
        next(stream)


def test_effective_settings_are_told():
    decoder = toy_decoder(verify_rows=4).with_settings(exact=False)
    assert decoder.effective == {
        "engine": "toy",
        "provider": "toy",
        "threads": 1,
        "dtype": "float32",
        "verify_rows": 4,
        "exact": False,
        "max_length": 400,
    }


def test_the_toy_target_depends_on_every_token():
    assert choice([1, 2, 3]) != choice([1, 9, 3])


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("at", [1, 4])
def test_a_target_that_is_not_finite_is_an_error_and_not_token_0(mode, at):
    """Graphs choose -1 where a logit is not finite: nobody takes it for a token."""
    decoder = toy_decoder()
    decoder.toy_target.after = lambda outputs: (
        outputs["greedy_ids"].fill(-1) if len(decoder.toy_target.calls) == at else None
    )
    stream = decoder.stream(PROMPT, 60, mode=mode)
    with pytest.raises(EngineError, match=r"target logits: row \d of the round holds NaN or infinity"):
        list(stream)


def test_what_passes_cost_is_found_out_once_whoever_comes_first(monkeypatch):
    """Two streams begin at once; neither decodes before it is known."""
    asked, go_on = [], threading.Event()

    def slow(*_):
        asked.append(1)
        assert go_on.wait(30)

    monkeypatch.setattr(decoder_module, "calibrate", slow)
    decoder = toy_decoder().with_settings(verify_rows=None)
    streams = [decoder.stream(PROMPT, 8) for _ in range(2)]
    firsts = [threading.Thread(target=next, args=(stream,)) for stream in streams]
    for thread in firsts:
        thread.start()
    firsts[1].join(0.2)
    assert all(thread.is_alive() for thread in firsts)
    go_on.set()
    for thread in firsts:
        thread.join(30)
    assert len(asked) == 1
