"""Conversations: what two turns have in common is computed once, in both caches, and nothing else changes."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import BusyError, EngineError, RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.kept import Kept, KeptStore
from dflash_deploy.runtime.lane import Saved
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode
from toy_engines import BLOCK, VOCAB, always, greedy, sometimes, toy_decoder
from toy_service import (
    assert_clean,
    complete,
    letter,
    letters,
    letters_codec,
    prompt_of,
    still_service,
    turn,
    turn_until,
)

PROMPT = [5, 9, 2, 60, 31]


def answer(service, session, prompt, count, **options):
    """A turn: the tokens are those of a fresh run, whatever was kept."""
    result = complete(service, session.submit(prompt, count, **options))
    assert [*result.ids] == greedy(prompt, len(result.ids))
    assert result.stats.draft_failures == 0
    return result


def test_a_conversation_is_computed_once():
    service = still_service(toy_decoder())
    session, prompt = service.session(), [*PROMPT]
    kept = 0
    for turn_ in range(5):
        result = answer(service, session, prompt, 17)
        assert result.stats.cached_tokens == kept
        # All but the last token, which was chosen and not computed; also by the draft.
        kept = result.stats.draft_kv_length
        assert kept == result.stats.target_kv_length == len(prompt) + 16
        prompt = [*prompt, *result.ids, *prompt_of(4, turn_)]
        assert_clean(service._scheduler._pair)
    assert service.stats().cached_tokens == sum(
        [0, *(5 + 21 * i + 16 for i in range(4))]  # each prompt, and all but the last token behind it
    )


def test_what_is_kept_is_not_computed():
    decoder = toy_decoder()
    service = still_service(decoder)
    session = service.session()
    first = answer(service, session, prompt_of(100), 17)
    done = len(decoder.toy_target.calls), len(decoder.toy_draft.calls)
    answer(service, session, [*prompt_of(100), *first.ids, 4, 4], 1)
    rows = [call["rows"] for call in decoder.toy_target.calls[done[0] :]]
    assert rows == [100 + 17 + 2 - first.stats.target_kv_length] == [3]
    # The draft takes in what is new for the request that may follow.
    assert [call["context_rows"] for call in decoder.toy_draft.calls[done[1] :]] == [3]


@pytest.mark.parametrize("at", [0, 1, 3, 20, 29, 30, 45])
def test_an_edit_in_the_middle(at):
    service = still_service(toy_decoder(sometimes))
    session = service.session()
    first = answer(service, session, prompt_of(30), 20)
    whole = [*prompt_of(30), *first.ids]
    edited = [*whole[:at], (whole[at] + 1) % VOCAB, *whole[at + 1 :]]
    second = answer(service, session, edited, 20)
    assert second.stats.cached_tokens == min(at, first.stats.draft_kv_length)
    third = answer(service, session, [*edited, *second.ids, 1], 20)
    assert third.stats.cached_tokens == second.stats.draft_kv_length


def test_the_same_prompt_twice():
    service = still_service(toy_decoder())
    session = service.session()
    for expected in (0, 29, 29):  # something has to be computed: the last token of the prompt
        assert answer(service, session, prompt_of(30), 20).stats.cached_tokens == expected


def test_a_shorter_prompt():
    service = still_service(toy_decoder())
    session = service.session()
    answer(service, session, prompt_of(30), 20)
    assert answer(service, session, prompt_of(30)[:12], 20).stats.cached_tokens == 11
    assert answer(service, session, prompt_of(30), 20).stats.cached_tokens == 12
    assert answer(service, session, [77], 3).stats.cached_tokens == 0


@pytest.mark.parametrize("read", [0, 1, 3])
def test_after_a_cancel_only_what_was_delivered_exists(read):
    service = still_service(toy_decoder(always))
    session = service.session()
    ticket = session.submit(PROMPT, 100)
    turn(service, 8)
    delivered = [token for _ in range(read) for token in next(ticket).ids]
    if not read:
        assert ticket._entry.poll() is not None  # read by somebody who then went away
        delivered = greedy(PROMPT, 1)
    ticket.cancel()
    # The next turn may come at once: it waits for the end of this one.
    prompt = [*PROMPT, *delivered, 8, 8]
    result = answer(service, session, prompt, 20)
    assert [*ticket.result(0).ids] == delivered
    assert result.stats.cached_tokens == 5 + len(delivered)
    # A prompt that has what nobody saw finds no more than that.
    service_2 = still_service(toy_decoder(always))
    session_2 = service_2.session()
    ticket = session_2.submit(PROMPT, 100)
    turn(service_2, 8)
    for _ in range(max(read, 1)):
        next(ticket)
    ticket.cancel()
    result = answer(service_2, session_2, [*PROMPT, *greedy(PROMPT, 8), 3], 5)
    assert result.stats.cached_tokens == 5 + max(read, 1)


def test_a_dropped_ticket_ends_its_turn():
    service = still_service(toy_decoder(always))
    session = service.session()
    next_chunk = session.submit(PROMPT, 100)
    turn(service, 3)
    del next_chunk
    gc.collect()
    assert answer(service, session, [*PROMPT, 4], 5).stats.cached_tokens == 5
    assert service.stats().finished == {"cancelled": 1, "length": 1}


def test_a_turn_at_a_time():
    service = still_service(toy_decoder())
    session = service.session()
    first = session.submit(PROMPT, 40)
    with pytest.raises(RequestError, match="its last request has not ended; read it to its end or cancel it"):
        session.submit(PROMPT, 40)
    turn_until(service, [first])
    assert session.submit(PROMPT, 40)


def test_a_turn_that_was_refused_leaves_the_session_as_it_was():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    session = service.session()
    answer(service, session, PROMPT, 9)
    blocking = service.submit([1], 30)
    with pytest.raises(BusyError):
        session.submit([*PROMPT, 1], 3)
    turn_until(service, [blocking])
    assert answer(service, session, [*PROMPT, 1], 3).stats.cached_tokens == 5


def test_plain_then_speculative_then_plain():
    """The draft goes on only from where both caches end."""
    service = still_service(toy_decoder())
    session = service.session()
    first = answer(service, session, prompt_of(40), 20, mode=Mode.PLAIN)
    prompt = [*prompt_of(40), *first.ids, 4]
    second = answer(service, session, prompt, 20)
    assert second.stats.cached_tokens == 0
    assert max(second.stats.acceptance_lengths) == BLOCK
    prompt = [*prompt, *second.ids, 4]
    third = answer(service, session, prompt, 20, mode=Mode.PLAIN)
    assert third.stats.cached_tokens == second.stats.target_kv_length
    prompt = [*prompt, *third.ids, 4]
    fourth = answer(service, session, prompt, 20)
    # What the plain turn did not need of the draft's context was loaded and kept all the same.
    assert fourth.stats.cached_tokens == second.stats.draft_kv_length
    assert max(fourth.stats.acceptance_lengths) == BLOCK


@pytest.mark.parametrize("kind", ["nan", "error"])
def test_after_a_draft_failed_the_next_turn_drafts_again(kind):
    state = {"fail": True}

    def fault(call, outputs):
        if state["fail"] and kind == "error":
            raise EngineError("draft broke")
        if state["fail"]:
            outputs["logit_sums"][...] = float("nan")

    service = still_service(toy_decoder(fault=fault))
    session = service.session()
    first = complete(service, session.submit(PROMPT, 30))
    assert [*first.ids] == greedy(PROMPT, 30)
    assert first.stats.draft_failures == 1
    state["fail"] = False
    second = answer(service, session, [*PROMPT, *first.ids, 5], 30)
    assert second.stats.cached_tokens == 0  # nobody knows what the draft's cache held
    assert max(second.stats.acceptance_lengths) == BLOCK


def test_after_an_engine_error_the_turn_before_is_still_there():
    decoder = toy_decoder()
    service = still_service(decoder)
    session = service.session()
    first = answer(service, session, PROMPT, 20)
    failing = session.submit([*PROMPT, *first.ids, 1], 20)
    decoder.toy_target.fail_at = 0
    turn_until(service, [failing])
    decoder.toy_target.fail_at = None
    with pytest.raises(EngineError):
        failing.result(0)
    second = answer(service, session, [*PROMPT, *first.ids, 1], 20)
    assert second.stats.cached_tokens == first.stats.draft_kv_length


def test_a_full_context():
    service = still_service(toy_decoder(), max_length=60)
    session = service.session()
    first = answer(service, session, prompt_of(40), 100)
    assert len(first.ids) == 20
    assert first.finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError, match="length in tokens: got 60, expected at most 59"):
        session.submit([*prompt_of(40), *first.ids], 5)
    second = answer(service, session, [*prompt_of(40), *first.ids][:59], 5)
    assert len(second.ids) == 1
    assert second.stats.cached_tokens == 58 < first.stats.draft_kv_length  # one is always computed


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_turns(data):
    """Any number of sessions, any edits, in any company."""
    service = still_service(toy_decoder(sometimes, max_length=200), max_requests=3, prefill_rows=32)
    sessions = [(service.session(), [*PROMPT]) for _ in range(data.draw(st.integers(1, 4)))]
    for _ in range(data.draw(st.integers(1, 4))):
        tickets = []
        for index, (session, whole) in enumerate(sessions):
            cut = data.draw(st.integers(0, len(whole)))
            prompt = [*whole[:cut], *prompt_of(data.draw(st.integers(1, 12)), 60 + index)]
            mode = data.draw(st.sampled_from(list(Mode)))
            tickets.append((session.submit(prompt, data.draw(st.integers(1, 30)), mode=mode), prompt))
        turn_until(service, [ticket for ticket, _ in tickets])
        for index, (ticket, prompt) in enumerate(tickets):
            result = ticket.result(0)
            assert [*result.ids] == greedy(prompt, len(result.ids))
            assert result.stats.draft_failures == 0
            sessions[index] = (sessions[index][0], [*prompt, *result.ids])
    assert_clean(service._scheduler._pair)


# Memory.


def saved_of(tokens: int) -> Saved:
    """8 bytes a token in each cache."""
    import numpy as np

    part = (np.zeros((1, tokens, 1)),)
    return Saved(part, part, tokens, tokens)


def test_what_was_not_used_for_longest_goes_first():
    store = KeptStore(16 * 30)
    for key in range(3):
        store.put(key, Kept(tuple(range(10)), saved_of(10)))
    assert store.bytes == 16 * 30
    assert store.get(0)
    store.put(3, Kept(tuple(range(15)), saved_of(15)))
    assert [store.get(key) is not None for key in range(4)] == [True, False, False, True]
    assert (store.bytes, store.evictions, len(store)) == (16 * 25, 2, 2)
    store.put(0, Kept((1,), saved_of(1)))
    assert store.bytes == 16 * 16
    store.drop(3)
    store.drop(3)
    assert (store.bytes, len(store)) == (16, 1)


def test_what_alone_is_too_much_pushes_nothing_out():
    store = KeptStore(16 * 30)
    store.put(0, Kept(tuple(range(10)), saved_of(10)))
    store.put(1, Kept(tuple(range(31)), saved_of(31)))
    assert (store.get(0) is not None, store.get(1)) == (True, None)
    assert (store.bytes, store.evictions) == (160, 1)


def test_what_a_prompt_has_in_common_ends_before_its_last_token():
    kept = Kept((1, 2, 3, 4, 5), saved_of(4))
    assert [kept.common(p) for p in ([1], [1, 2], [1, 2, 9, 9], [1, 2, 3, 4, 5, 6], [2])] == [0, 1, 2, 4, 0]


def test_sessions_share_a_budget():
    """The lanes take theirs; what is over is for two conversations of this length, not for three."""
    decoder = toy_decoder()
    lanes = 408 * 2 * 2 * 4
    service = still_service(decoder, max_requests=1, kv_budget_bytes=lanes + 2 * 75 * 16)
    sessions = [service.session() for _ in range(3)]
    results = [answer(service, session, prompt_of(40, i), 30) for i, session in enumerate(sessions)]
    stats = service.stats()
    assert (stats.kept_sessions, stats.evictions) == (2, 1)
    assert 0 < stats.kept_bytes <= 2 * 75 * 16
    cached = []
    for i in (2, 0, 1):
        prompt = [*prompt_of(40, i), *results[i].ids, 1]
        cached.append(answer(service, sessions[i], prompt, 1).stats.cached_tokens)
    assert [count > 40 for count in cached] == [True, False, False]  # 1 gave way when 0 came again


def test_a_closed_session_frees_what_it_kept():
    service = still_service(toy_decoder())
    with service.session() as session:
        answer(service, session, PROMPT, 9)
        assert service.stats().kept_bytes > 0
    assert service.stats().kept_bytes == 0
    with pytest.raises(RequestError, match="session: is closed; begin another"):
        session.submit(PROMPT, 9)
    session.close()
    assert len(service._sessions) == 0


def test_closing_ends_what_runs_and_keeps_nothing():
    service = still_service(toy_decoder(always))
    session = service.session()
    ticket = session.submit(PROMPT, 100)
    turn(service, 3)
    session.close()
    turn(service)
    assert ticket.result(0).finish_reason is FinishReason.CANCELLED
    assert service.stats().kept_bytes == 0
    waiting = still_service(toy_decoder(), max_requests=1)
    blocking, session = waiting.submit(PROMPT, 9), waiting.session()
    ticket = session.submit(PROMPT, 9)
    session.close()
    assert ticket.done
    assert complete(waiting, blocking).ids


def test_a_dropped_session_is_closed():
    service = still_service(toy_decoder())
    session = service.session()
    answer(service, session, PROMPT, 9)
    assert service.stats().kept_bytes > 0
    del session
    gc.collect()
    complete(service, service.submit([1], 1))
    assert service.stats().kept_bytes == 0
    assert len(service._sessions) == 0


def test_sessions_in_threads():
    def talk(index: int) -> None:
        with service.session() as session:
            prompt = prompt_of(3 + index, index)
            for turn_ in range(4):
                ticket = session.submit(prompt, 15, wait_s=20.0)
                if turn_ == 2:
                    next(ticket)
                    ticket.cancel()
                ids = [*ticket.result(20.0).ids]
                assert ids == greedy(prompt, 15)[: len(ids)]
                prompt = [*prompt, *ids, index]
            done.append(index)

    done: list[int] = []
    with Service(toy_decoder(sometimes), ServiceSettings(max_requests=3, max_waiting=2)) as service:
        threads = [threading.Thread(target=talk, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [*range(8)]
        stats = service.stats()
        assert stats.cached_tokens > 0
        assert stats.kept_bytes == 0


# Messages.

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"


def chat_service(**options):
    """Each role is one letter, which the tokenizer does not know: token 0."""
    return still_service(toy_decoder(codec=letters_codec(TEMPLATE), **options))


def test_a_conversation_of_messages():
    service = chat_service()
    session = service.session()
    first = complete(service, session.send(letters([3, 4]), 10))
    assert [*first.ids] == greedy([0, 3, 4], 10)
    assert first.text == letters(first.ids)
    second = complete(service, session.send(letters([7]), 10))
    prompt = [0, 3, 4, 0, *first.ids, 0, 7]
    assert [*second.ids] == greedy(prompt, 10)
    assert session.settled() == [
        {"role": "user", "content": letters([3, 4])},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": letter(7)},
        {"role": "assistant", "content": second.text},
    ]
    assert second.stats.cached_tokens >= 3
    session.messages = [*session.messages[:1]]
    third = complete(service, session.send(letter(9), 5))
    assert [*third.ids] == greedy([0, 3, 4, 0, 9], 5)


def test_a_cancelled_answer_is_in_the_conversation_as_far_as_it_was_delivered():
    service = chat_service(spoiler=always)
    session = service.session()
    ticket = session.send(letter(3), 50)
    turn(service, 5)
    text = next(ticket).text + next(ticket).text
    ticket.cancel()
    second = session.send(letter(4), 5)
    assert [message["content"] for message in session.messages] == [letter(3), text, letter(4)]
    assert len(text) == 2
    assert complete(service, second).ids


def test_a_failed_answer_leaves_the_conversation_as_it_was():
    service = chat_service()
    session = service.session()
    complete(service, session.send(letter(3), 5))
    before = [*session.settled()]
    failing = session.send(letter(4), 50)
    service._scheduler._pair._target.fail_at = 0
    turn_until(service, [failing])
    service._scheduler._pair._target.fail_at = None
    assert session.settled() == before
    again = complete(service, session.send(letter(5), 5))
    assert session.settled()[2:] == [
        {"role": "user", "content": letter(5)},
        {"role": "assistant", "content": again.text},
    ]


def test_a_message_that_was_refused_is_not_in_the_conversation():
    service = chat_service()
    session = service.session()
    with pytest.raises(RequestError):
        session.send(letter(1) * 500, 5)
    assert session.settled() == []
    ticket = session.send(letter(1), 5)
    with pytest.raises(RequestError, match="has not ended"):
        session.send(letter(2), 5)
    complete(service, ticket)
    assert [message["role"] for message in session.settled()] == ["user", "assistant"]


def test_rounds_without_the_draft_are_taken_in_before_the_cache_is_kept():
    """A service may verify no proposals for a while: the next request reuses those tokens, too."""
    service = still_service(toy_decoder(), verify_rows=1)
    session = service.session()
    first = answer(service, session, PROMPT, 30)
    assert first.stats.rounds == 29
    second = answer(service, session, [*PROMPT, *first.ids, 3], 10)
    assert second.stats.cached_tokens == len(PROMPT) + 29
