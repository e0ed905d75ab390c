"""The service: its queue, its ends, its failures, its sessions; from threads."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref

import pytest

from dflash_deploy.bundle.errors import BusyError, EngineError, RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.request import job_from_request
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode
from toy_engines import BLOCK, ToyDecoder, always, greedy, sometimes, toy_decoder
from toy_service import (
    assert_clean,
    complete,
    letters,
    letters_codec,
    prompt_of,
    read_now,
    still_service,
    turn,
    turn_until,
)

PROMPT = [5, 9, 2, 60, 31]
SOON_S = 20.0  # far more than anything here takes


def service_of(decoder: ToyDecoder | None = None, **settings) -> Service:
    return Service(decoder or toy_decoder(sometimes), ServiceSettings(**{"max_requests": 4, **settings}))


class Passes:
    """Lets the target make so many passes, and no more."""

    def __init__(self, decoder: ToyDecoder, count: int):
        self.calls_before = len(decoder.toy_target.calls)
        self._begun, self._allowed, self._changed = 0, count, threading.Condition()
        decoder.toy_target.before = self.before

    def before(self, sizes):
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._begun <= self._allowed, SOON_S)

    def allow(self, more: int) -> None:
        with self._changed:
            self._allowed += more
            self._changed.notify_all()

    def wait_for(self, begun: int) -> None:
        """Until that many were begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= begun, SOON_S)


def idle(service: Service) -> None:
    """Wait until nothing runs."""
    until = time.monotonic() + SOON_S
    while service.stats().running or service.stats().waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


# One and many.


def test_a_service_gives_what_a_decoder_gives():
    decoder = toy_decoder(sometimes)
    expected = decoder.generate(PROMPT, 40)
    with service_of(decoder) as service:
        got = service.generate(PROMPT, 40)
        chunks = list(service.submit(PROMPT, 40))
    assert got.ids == expected.ids == tuple(token for chunk in chunks for token in chunk.ids)
    assert got.finish_reason is FinishReason.LENGTH
    assert got.stats.prompt_tokens == 5


def test_many_threads_submit_and_read():
    """More callers than lanes and places in the queue; each gets its own tokens."""
    wrong = []

    def work(index: int) -> None:
        for turn_ in range(4):
            prompt = prompt_of(1 + (7 * index + turn_) % 50, 10 * index + turn_)
            count = 1 + (13 * index + 5 * turn_) % 40
            ticket = service.submit(prompt, count, wait_s=SOON_S)
            if turn_ % 2:
                ids = [token for chunk in ticket for token in chunk.ids]
            else:
                ids = [*ticket.result(SOON_S).ids]
            if ids != greedy(prompt, count):
                wrong.append((prompt, count, ids))

    with service_of(max_waiting=3) as service:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = service.stats()
    assert not wrong
    assert stats.finished == {"length": 48}
    assert (stats.submitted, stats.running, stats.waiting, stats.refused) == (48, 0, 0, 0)
    assert stats.cycle_requests / stats.cycles > 1.5


def test_a_ticket_may_be_read_from_another_thread_than_waits_for_it():
    with service_of() as service:
        ticket = service.submit(PROMPT, 60)
        whole = []
        waiter = threading.Thread(target=lambda: whole.append(ticket.result(SOON_S)))
        waiter.start()
        read = [token for chunk in ticket for token in chunk.ids]
        waiter.join()
    assert read == [*whole[0].ids] == greedy(PROMPT, 60)


# The queue.


def test_one_more_than_there_is_room_for_is_refused():
    service = still_service(toy_decoder(), max_requests=2, max_waiting=3)
    tickets = [service.submit(PROMPT, 40) for _ in range(5)]
    with pytest.raises(
        BusyError, match=r"0 requests run, 5 wait and 0 callers are in line, .*; try again later"
    ):
        service.submit(PROMPT, 9)
    turn(service)
    with pytest.raises(BusyError, match="2 requests run, 3 wait"):
        service.submit(PROMPT, 9)
    assert (service.stats().submitted, service.stats().refused) == (5, 2)
    turn_until(service, tickets)
    assert service.submit(PROMPT, 9)


def test_a_service_without_a_queue_takes_what_it_can_run():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    ticket = service.submit(PROMPT, 9)
    with pytest.raises(BusyError):
        service.submit(PROMPT, 9)
    complete(service, ticket)
    assert complete(service, service.submit(PROMPT, 3)).ids == tuple(greedy(PROMPT, 3))


def test_callers_wait_for_room_in_the_order_in_which_they_came():
    decoder = toy_decoder()
    service = still_service(decoder, max_requests=1, max_waiting=0)
    blocking, order = service.submit([77], 4), []
    admit = service._scheduler.admit

    def watched(job, *arguments, **options):
        order.append(job.prompt[0])
        return admit(job, *arguments, **options)

    service._scheduler.admit = watched

    def work(index: int) -> None:
        assert service.submit([index], 1, wait_s=SOON_S).result(SOON_S).ids

    threads = []
    for index in range(5):
        threads.append(threading.Thread(target=work, args=(index,)))
        threads[-1].start()
        until = time.monotonic() + SOON_S
        while len(service._queue._line) <= index:
            assert time.monotonic() < until
            time.sleep(0.001)
    with pytest.raises(BusyError, match="5 callers are in line"):
        service.submit(PROMPT, 4)  # does not get before them
    while any(thread.is_alive() for thread in threads):
        turn(service)
        time.sleep(0.001)
    assert order == [77, 0, 1, 2, 3, 4]
    assert blocking.done


def test_a_cancelled_request_makes_room_at_once():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    waiting, got = service.submit(PROMPT, 4), []
    thread = threading.Thread(target=lambda: got.append(service.submit([1], 4, wait_s=SOON_S)))
    thread.start()
    while not service._queue._line:
        time.sleep(0.001)
    waiting.cancel()
    thread.join(SOON_S / 2)
    assert len(got) == 1
    assert complete(service, got[0]).ids == tuple(greedy([1], 4))


def test_waiting_for_room_has_an_end():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    ticket = service.submit(PROMPT, 4)
    began = time.monotonic()
    with pytest.raises(BusyError):
        service.submit(PROMPT, 4, wait_s=0.05)
    with pytest.raises(BusyError):  # its own time is over before
        service.submit(PROMPT, 4, wait_s=math.inf, deadline_s=0.05)
    assert 0.1 <= time.monotonic() - began < SOON_S
    assert not service._queue._line
    assert not ticket.done


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline_s": 0.0}, "deadline_s: got 0.0, expected .*> 0"),
        ({"deadline_s": math.nan}, "deadline_s: got nan"),
        ({"wait_s": -1.0}, "wait_s: got -1.0, expected .*>= 0"),
        ({"wait_s": math.nan}, "wait_s: got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"prompt": []}, "prompt: got no tokens"),
        ({"prompt": [1] * 400}, "length in tokens: got 400"),
    ],
)
def test_a_request_that_cannot_be_served_never_gets_into_the_queue(options, words):
    service = still_service(toy_decoder())
    with pytest.raises(RequestError, match=words):
        service.submit(**{"prompt": PROMPT, **options})
    assert service.stats().submitted == service.stats().waiting == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_requests": 0}, "max_requests: got 0"),
        ({"max_waiting": -1}, "max_waiting: got -1"),
        ({"prefill_rows": 0}, "prefill_rows: got 0"),
        ({"verify_rows": 9}, "verify_rows: got 9, expected 1 to 8"),
        ({"max_length": 1}, "max_length: got 1"),
        # 408 slots x 2 models x 2 x 4 bytes for each request
        (
            {"kv_budget_bytes": 26111},
            "kv_budget_bytes: got 26111, expected >= 26112, for 4 requests of 400 tokens; lower max_req",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(RequestError, match=words):
        still_service(toy_decoder(), **settings)


def test_a_budget_that_is_just_enough():
    service = still_service(toy_decoder(), kv_budget_bytes=26112)
    assert service.effective["kv_sessions_bytes"] == 0
    with service.session() as session:
        complete(service, session.submit(PROMPT, 4))
        assert (service.stats().kept_bytes, service.stats().evictions) == (0, 1)


# Deadlines.


def test_a_deadline_ends_what_runs_where_it_is():
    service = still_service(toy_decoder(always))
    ticket = service.submit(PROMPT, 300, deadline_s=1000.0)
    turn(service, 5)
    ticket._entry.expires = 0.0
    turn(service)
    result = ticket.result(0)
    assert result.finish_reason is FinishReason.DEADLINE
    assert [*result.ids] == greedy(PROMPT, 6) == read_now(ticket)  # what came before it may be read later
    assert_clean(service._scheduler._pair)


def test_a_deadline_ends_what_waits():
    service = still_service(toy_decoder(), max_requests=1)
    running = service.submit(PROMPT, 40)
    turn(service)
    late = service.submit(PROMPT, 40, deadline_s=0.001)
    last = service.submit([1], 3)
    time.sleep(0.002)
    turn(service)
    assert late.result(0).finish_reason is FinishReason.DEADLINE
    assert late.result(0).ids == ()
    assert [*late] == []
    assert complete(service, last).ids == tuple(greedy([1], 3))
    assert running.result(0).finish_reason is FinishReason.LENGTH


def test_a_deadline_ends_a_caller_who_waits_for_room():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    running = service.submit(PROMPT, 4)
    late = service.generate([1], 4, deadline_s=0.02)
    assert (late.finish_reason, late.ids, late.text) == (FinishReason.DEADLINE, (), "")
    assert not service._queue._line
    stats = service.stats()
    assert (stats.submitted, stats.refused, stats.waiting) == (2, 0, 1)
    assert stats.finished == {"deadline": 1}
    assert complete(service, running).ids == tuple(greedy(PROMPT, 4))
    service.close()
    with pytest.raises(RequestError, match="closed"):
        service.generate([1], 4, deadline_s=0.02)


def test_a_deadline_that_passed_before_the_first_round_gives_no_tokens(monkeypatch):
    """Even if it did so behind the turn's own look at the clock."""
    service = still_service(toy_decoder())
    late = service.submit(PROMPT, 40, deadline_s=1000.0)
    other = service.submit(PROMPT, 4)
    settle = service._scheduler.settle

    def slow_settle():
        late._entry.expires = 0.0
        settle()

    with monkeypatch.context() as slowly:
        slowly.setattr(service._scheduler, "settle", slow_settle)
        turn(service)
    result = late.result(0)
    assert (result.finish_reason, result.ids, result.text) == (FinishReason.DEADLINE, (), "")
    assert (result.stats.new_tokens, result.stats.rounds, result.stats.prefill_ms) == (0, 0, 0.0)
    assert complete(service, other).ids == tuple(greedy(PROMPT, 4))
    assert service.stats().running == 0
    assert_clean(service._scheduler._pair)


def test_a_round_that_began_in_time_is_part_of_the_answer():
    service = still_service(toy_decoder())
    ticket = service.submit(PROMPT, 40, deadline_s=1000.0)
    turn(service)
    ticket._entry.expires = 0.0
    turn(service)
    result = ticket.result(0)
    assert result.finish_reason is FinishReason.DEADLINE
    assert [*result.ids] == greedy(PROMPT, 40)[: len(result.ids)]
    assert result.ids


def test_a_deadline_counts_from_the_call(monkeypatch):
    """Tokenising a long prompt takes its part of the time."""
    service = still_service(toy_decoder())

    def slowly(*arguments):
        time.sleep(0.02)
        return job_from_request(*arguments)

    monkeypatch.setattr("dflash_deploy.runtime.service.job_from_request", slowly)
    ticket = service.submit(PROMPT, 40, deadline_s=0.01)
    turn(service)
    assert ticket.result(0).finish_reason is FinishReason.DEADLINE
    assert ticket.result(0).ids == ()


def test_a_deadline_passes_in_real_time():
    with service_of(toy_decoder(always, max_length=400)) as service:
        ticket = service.submit(PROMPT, 390, deadline_s=0.02)
        result = ticket.result(SOON_S)
        assert result.finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)
        assert [*result.ids] == greedy(PROMPT, 390)[: len(result.ids)]


# Cancelling (D04).


def test_cancel_before_it_runs():
    service = still_service(toy_decoder(), max_requests=1)
    running, waiting = service.submit(PROMPT, 5), service.submit(PROMPT, 5)
    turn(service)
    waiting.cancel()
    assert waiting.done  # at once
    assert waiting.result(0).finish_reason is FinishReason.CANCELLED
    assert service.stats().waiting == 0
    assert complete(service, running).ids == tuple(greedy(PROMPT, 5))


def test_cancel_in_the_middle_of_the_prompt():
    decoder = toy_decoder()
    service = still_service(decoder, prefill_rows=8)
    ticket = service.submit(prompt_of(100), 5)
    turn(service, 3)
    calls = len(decoder.toy_target.calls)
    ticket.cancel()
    turn(service, 3)
    assert len(decoder.toy_target.calls) == calls
    assert ticket.result(0).ids == ()
    assert ticket.result(0).finish_reason is FinishReason.CANCELLED
    assert_clean(service._scheduler._pair)


@pytest.mark.parametrize("read", range(4))
def test_cancel_in_mid_stream(read):
    """What was not read by then does not exist."""
    decoder = toy_decoder(always)
    service = still_service(decoder)
    ticket, other = service.submit(PROMPT, 100), service.submit([4], 60)
    turn(service, 5)
    got = [token for _ in range(read) for token in next(ticket).ids]
    calls = len(decoder.toy_target.calls)
    ticket.cancel()
    ticket.cancel()
    turn(service)
    assert len(decoder.toy_target.calls) == calls + 1  # the round of the other
    result = ticket.result(0)
    assert result.finish_reason is FinishReason.CANCELLED
    # Nobody who reads: then it is as for a deadline, and what there is may be read.
    assert [*result.ids] == (got if read else greedy(PROMPT, 6))
    assert result.stats.new_tokens == len(result.ids)
    assert read_now(ticket) == ([] if read else greedy(PROMPT, 6))
    ticket.cancel()
    assert ticket.result(0) is result
    assert complete(service, other).ids == tuple(greedy([4], 60))


def test_cancel_after_the_end_changes_nothing():
    service = still_service(toy_decoder())
    ticket = service.submit(PROMPT, 20)
    result = complete(service, ticket)
    ticket.cancel()
    turn(service)
    assert ticket.result(0) is result
    assert read_now(ticket) == greedy(PROMPT, 20)
    assert service.stats().finished == {"length": 1}


@pytest.mark.parametrize("how", ["cancel", "drop", "leave", "raise"])
def test_a_cancelled_request_costs_one_more_round_at_most(how):
    decoder = toy_decoder(always)
    with service_of(decoder, verify_rows=BLOCK) as service:
        passes = Passes(decoder, 4)  # the prompt, and three rounds
        ticket = service.submit(PROMPT, 390)
        read = [token for _ in range(4) for token in next(ticket).ids]
        passes.wait_for(5)  # the round that is on its way
        if how == "cancel":
            ticket.cancel()
        elif how == "leave":
            with ticket:
                pass
        elif how == "raise":
            with pytest.raises(ZeroDivisionError), ticket:
                raise ZeroDivisionError
        del ticket
        gc.collect()
        passes.allow(1000)
        idle(service)
        assert read == greedy(PROMPT, 4)
        assert len(decoder.toy_target.calls) - passes.calls_before == 5
        assert service.stats().finished == {"cancelled": 1}
        assert [*service.generate([8], 5).ids] == greedy([8], 5)


def test_a_thousand_cancelled_requests_leave_nothing():
    decoder = toy_decoder(sometimes)
    service = still_service(decoder, max_waiting=20)
    entries = weakref.WeakSet()

    def some(count: int) -> None:
        for index in range(count):
            ticket = service.submit(prompt_of(1 + index % 40, index), 60, wait_s=0.0)
            entries.add(ticket._entry)
            if index % 3:
                turn(service, 1 + index % 2)
            if index % 5 == 0:
                ticket.cancel()
            elif index % 5 == 1 and index % 3:
                read_now(ticket)
                ticket.cancel()
            del ticket  # the others are dropped
            if index % 3 == 0:
                turn(service)

    some(100)
    gc.collect()
    threads, objects = threading.active_count(), len(gc.get_objects())
    some(1000)
    turn(service)
    gc.collect()
    assert len(entries) == 0
    assert threading.active_count() == threads
    assert len(gc.get_objects()) < objects + 200
    stats = service.stats()
    assert (stats.running, stats.waiting, stats.submitted) == (0, 0, 1100)
    assert sum(stats.finished.values()) == 1100
    assert_clean(service._scheduler._pair)


def test_a_ticket_holds_nothing_of_a_request_that_ended():
    service = still_service(toy_decoder(always))
    ticket = service.submit(PROMPT, 20)
    turn(service)
    running = weakref.ref(ticket._entry.running)
    complete(service, ticket)
    gc.collect()
    assert running() is None


def test_cancelling_from_many_threads():
    decoder = toy_decoder(sometimes)
    with service_of(decoder, max_waiting=8) as service:

        def work(seed: int) -> None:
            for index in range(25):
                ticket = service.submit(prompt_of(3, seed), 50, wait_s=SOON_S)
                if index % 3 == 0:
                    next(ticket, None)
                other = threading.Thread(target=ticket.cancel)
                other.start()
                ticket.cancel()
                result = ticket.result(SOON_S)
                assert [*result.ids] == greedy(prompt_of(3, seed), 50)[: len(result.ids)]
                done.append(result)
                other.join()

        done: list = []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 200
        assert sum(service.stats().finished.values()) == 200


# The end.


def test_close_while_streams_are_read():
    decoder = toy_decoder(always)
    service = service_of(decoder, max_requests=3)
    ends = []

    def read(index: int) -> None:
        ticket = service.submit(prompt_of(4, index), 390, wait_s=SOON_S)
        started.release()
        ids = [token for chunk in ticket for token in chunk.ids]
        ends.append((index, ids, ticket.result(SOON_S)))

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    closers = [threading.Thread(target=service.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for thread in threads + closers:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert len(ends) == 6
    for index, ids, result in ends:
        assert ids == greedy(prompt_of(4, index), 390)[: len(ids)]
        assert [*result.ids] == ids
        assert result.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert not service._thread.is_alive()
    stats = service.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert not decoder.toy_target.closed  # it was lent
    service.close()


def test_after_the_end_nothing_is_taken():
    service = service_of()
    session = service.session()
    service.close()
    for ask in (service.submit, service.generate, session.submit):
        with pytest.raises(RequestError, match="service: is closed; open the bundle again"):
            ask(PROMPT, 4)


def test_callers_in_line_are_told_that_it_closed():
    service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
    ticket = service.submit(PROMPT, 4)
    told = []

    def wait() -> None:
        with pytest.raises(RequestError, match="is closed"):
            service.submit(PROMPT, 4, wait_s=SOON_S)
        told.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    while not service._queue._line:
        time.sleep(0.001)
    service.close()
    thread.join(SOON_S)
    assert told
    assert ticket.result(0).finish_reason is FinishReason.CANCELLED


def test_a_closed_service_frees_its_caches_and_its_own_engines():
    decoder = toy_decoder()
    caches = []
    new_cache = decoder.toy_target.new_cache

    def watched(capacity, batch=1):
        cache = new_cache(capacity, batch)
        caches.append(weakref.ref(cache))
        return cache

    decoder.toy_target.new_cache = watched
    with Service(decoder, own=True) as service:
        session = service.session()
        session.submit(PROMPT, 9).result(SOON_S)
        assert service.stats().kept_bytes
    gc.collect()
    assert [cache() for cache in caches] == [None]
    assert service.stats().kept_bytes == 0
    assert decoder.toy_target.closed
    assert decoder.toy_draft.closed


def test_closing_waits_for_the_round_in_progress():
    decoder = toy_decoder()
    service = service_of(decoder, verify_rows=BLOCK)
    passes = Passes(decoder, 0)
    ticket = service.submit(PROMPT, 40)
    passes.wait_for(1)
    closer = threading.Thread(target=service.close)
    closer.start()
    assert not ticket.done
    passes.allow(1000)
    closer.join(SOON_S)
    assert ticket.result(0).finish_reason is FinishReason.CANCELLED


# Failures.


def test_an_engine_error_ends_the_request_and_not_the_service():
    decoder = toy_decoder()
    service = still_service(decoder)
    tickets = [service.submit(prompt_of(3, i), 30) for i in range(3)]
    turn(service, 2)
    decoder.toy_target.fail_at = 0
    turn(service)
    decoder.toy_target.fail_at = None
    for ticket in tickets:
        read_first = next(ticket)
        assert read_first.ids  # what came before the error can be read
        with pytest.raises(EngineError, match="target broke") as first:
            list(ticket)
        with pytest.raises(EngineError, match="target broke") as second:
            ticket.result(0)
        assert first.value is not second.value  # a traceback of one raise does not hold the other's frames
    assert complete(service, service.submit(PROMPT, 30)).ids == tuple(greedy(PROMPT, 30))
    stats = service.stats()
    assert (stats.failed, stats.finished) == (3, {"length": 1})


def test_a_bug_in_a_round_ends_the_requests_and_not_the_service(caplog):
    decoder = toy_decoder()
    with service_of(decoder, verify_rows=BLOCK) as service:
        broken = {"left": 1}
        compute = decoder.toy_draft.compute

        def bug(*arguments):
            if broken["left"]:
                broken["left"] = 0
                raise ZeroDivisionError("a bug")
            return compute(*arguments)

        decoder.toy_draft.compute = bug
        with pytest.raises(ZeroDivisionError):
            service.generate(PROMPT, 30)
        assert "a round failed" in caplog.text
        assert [*service.generate(PROMPT, 30).ids] == greedy(PROMPT, 30)
        assert service.stats().failed == 1


def test_a_bug_between_queue_and_lane_ends_the_request(caplog):
    service = still_service(toy_decoder())
    admit = service._scheduler.admit

    def bug(*arguments, **options):
        raise ZeroDivisionError("a bug")

    service._scheduler.admit = bug
    ticket = service.submit(PROMPT, 30)
    turn(service)
    with pytest.raises(ZeroDivisionError):
        ticket.result(0)
    assert service.stats().running == 0
    service._scheduler.admit = admit
    assert complete(service, service.submit(PROMPT, 30)).ids == tuple(greedy(PROMPT, 30))


def test_lanes_that_cannot_be_cleaned_stop_the_service(caplog):
    """As after a device is lost: everyone is told, nobody hangs."""
    service = service_of()
    caplog.set_level(logging.CRITICAL)

    def broken(lane):
        raise EngineError("device is gone")

    service._scheduler._pair.free = broken
    assert service.submit(PROMPT, 4).result(SOON_S).ids  # its answer was there before
    service._thread.join(SOON_S)
    assert not service._thread.is_alive()
    with pytest.raises(
        EngineError, match=r"has stopped, its engines failed \(device is gone\); open another"
    ):
        service.submit(PROMPT, 4)
    service.close()


def test_a_stopped_service_ends_those_that_wait():
    service = still_service(toy_decoder(), max_requests=1)

    def broken(lane):
        raise EngineError("device is gone")

    first, second = service.submit(PROMPT, 2), service.submit(PROMPT, 4)
    service._scheduler._pair.free = broken
    service._round()
    service.close()
    assert first.result(0).ids == tuple(greedy(PROMPT, 2))
    with pytest.raises(EngineError, match="device is gone"):
        second.result(0)
    assert service.stats().running == service.stats().waiting == 0


def test_a_service_opens_over_a_broken_draft():
    def broken(call, outputs):
        raise EngineError("draft broke")

    with service_of(toy_decoder(fault=broken)) as service:
        result = service.generate(PROMPT, 30)
        stats = service.stats()
    assert [*result.ids] == greedy(PROMPT, 30)
    assert (stats.draft_failures, stats.last_draft_failure) in ((1, "draft broke"), (0, None))


def test_results_that_are_not_there_yet():
    service = still_service(toy_decoder())
    ticket = service.submit(PROMPT, 4)
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
        ticket.result(0.01)
    assert not ticket.done
    assert complete(service, ticket).ids == tuple(greedy(PROMPT, 4))
    assert ticket.result(math.inf)


# Requests as they are meant.


@pytest.mark.parametrize("verify_rows", [None, 4])
def test_a_seed_gives_the_same_text_alone_and_among_others(verify_rows):
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=11, logprobs=2)
    decoder = toy_decoder(with_logits=True)
    results = []
    for others in (0, 3, 7):
        with service_of(decoder, max_requests=5, verify_rows=verify_rows) as service:
            noise = [
                service.submit(prompt_of(2 + i, i), 90, sampling=Sampling(0.5 * (i % 3), seed=i))
                for i in range(others)
            ]
            results.append(service.submit(PROMPT, 60, sampling=sampling).result(SOON_S))
            del noise
    first = results[0]
    assert len(first.ids) == 60
    assert [*first.ids] != greedy(PROMPT, 60)
    for result in results[1:]:
        assert (result.ids, result.logprobs) == (first.ids, first.logprobs)
    assert [logprob.id for logprob in first.logprobs] == [*first.ids]
    assert all(len(logprob.best) == 2 for logprob in first.logprobs)


def test_another_seed_gives_another_text():
    with service_of(toy_decoder(with_logits=True)) as service:
        texts = {service.generate(PROMPT, 30, sampling=Sampling(1.0, seed=seed)).ids for seed in range(4)}
    assert len(texts) == 4


def sampled(seed: int) -> Sampling:
    return Sampling(temperature=0.9, top_k=30, repetition_penalty=1.2, seed=seed)


def test_a_sampled_text_may_stop_at_every_position():
    """In company: cut behind the stop token, and otherwise what it was."""
    decoder = toy_decoder(sometimes, with_logits=True)
    full = [*decoder.generate(PROMPT, 40, sampling=sampled(5)).ids]
    service = still_service(decoder, max_requests=8)
    tickets = []
    for position in range(2 * BLOCK + 2):
        stops = [full[position]]
        tickets.append((service.submit(PROMPT, 40, stop_token_ids=stops, sampling=sampled(5)), stops))
    turn_until(service, [ticket for ticket, _ in tickets])
    for ticket, (stop,) in tickets:
        result, ids = ticket.result(0), full[: full.index(stop) + 1]
        assert (result.finish_reason, [*result.ids]) == (FinishReason.STOP, ids)
        assert read_now(ticket) == ids
        assert result.stats.target_kv_length == len(PROMPT) + len(ids) - 1
    # At the end of the budget: a shorter one makes shorter blocks, and with them other draws.
    tickets = []
    for budget in range(1, 2 * BLOCK + 2):
        alone = decoder.generate(PROMPT, budget, sampling=sampled(5)).ids
        for token, reason in ((alone[-1], FinishReason.STOP), (96, FinishReason.LENGTH)):
            if alone.index(token) + 1 == budget if token in alone else True:
                ticket = service.submit(PROMPT, budget, stop_token_ids=[token], sampling=sampled(5))
                tickets.append((ticket, alone, reason))
    turn_until(service, [ticket for ticket, _, _ in tickets])
    for ticket, ids, reason in tickets:
        assert (ticket.result(0).ids, ticket.result(0).finish_reason) == (ids, reason)


def test_nothing_is_left_between_sampled_requests():
    """Long, short, one token, long; eight at once; one: each as a decoder that did nothing else has it."""
    service = still_service(toy_decoder(sometimes, with_logits=True), max_requests=8)

    def check(*requests: tuple[list[int], int, int]) -> None:
        tickets = [service.submit(p, n, sampling=sampled(seed)) for p, n, seed in requests]
        turn_until(service, tickets)
        for ticket, (prompt, count, seed) in zip(tickets, requests, strict=True):
            fresh = toy_decoder(sometimes, with_logits=True).generate(prompt, count, sampling=sampled(seed))
            assert ticket.result(0).ids == fresh.ids

    for length, count in ((200, 90), (5, 20), (1, 1), (180, 120)):
        check((prompt_of(length), count, 3))
    check(*((prompt_of(5 + 9 * i, i), 4 + 11 * i, i) for i in range(8)))
    check((PROMPT, 30, 3))


def test_log_probabilities_come_with_their_tokens():
    service = still_service(toy_decoder(with_logits=True))
    ticket = service.submit(PROMPT, 20, sampling=Sampling(logprobs=3))
    turn_until(service, [ticket])
    for chunk in ticket:
        assert [logprob.id for logprob in chunk.logprobs] == [*chunk.ids]
        assert all(logprob.best[0][0] == logprob.id for logprob in chunk.logprobs)  # greedy: the best one
    assert [*ticket.result(0).ids] == greedy(PROMPT, 20)
    assert len(ticket.result(0).logprobs) == 20


def test_min_new_tokens_keep_stop_tokens_back():
    stop = greedy(PROMPT, 1)[0]
    decoder = toy_decoder(with_logits=True, stops=(stop,))
    service = still_service(decoder)
    short, longer = service.submit(PROMPT, 30), service.submit(PROMPT, 30, min_new_tokens=10)
    turn_until(service, [short, longer])
    assert short.result(0).ids == (stop,)
    assert stop not in longer.result(0).ids[:10]
    assert len(longer.result(0).ids) >= 10


def test_stop_strings_end_a_request_in_company():
    decoder = toy_decoder(codec=letters_codec())
    full = greedy(PROMPT, 40)
    service = still_service(decoder)
    stop = letters(full[11:14])
    tickets = [service.submit(PROMPT, 40, stop=[stop, "\u0fff"]), service.submit(PROMPT, 40)]
    turn_until(service, tickets)
    chunks = [*tickets[0]]
    result = tickets[0].result(0)
    assert result.text == "".join(chunk.text for chunk in chunks) == letters(full[:11])
    assert [*result.ids] == full[:14]
    assert result.finish_reason is FinishReason.STOP
    assert tickets[1].result(0).text == letters(full)


def test_plain_requests_beside_speculative_ones():
    decoder = toy_decoder()
    service = still_service(decoder)
    tickets = [service.submit(prompt_of(3, i), 40, mode=list(Mode)[i % 2]) for i in range(4)]
    turn_until(service, tickets)
    for i, ticket in enumerate(tickets):
        assert [*ticket.result(0).ids] == greedy(prompt_of(3, i), 40)
        assert max(ticket.result(0).stats.acceptance_lengths) == (1 if i % 2 else BLOCK)


# Figures.


def test_figures_add_up():
    decoder = toy_decoder(sometimes)
    service = still_service(decoder, max_requests=2, max_waiting=6)
    tickets = [service.submit(prompt_of(3 + i, i), 10 + i) for i in range(8)]
    with pytest.raises(BusyError):
        service.submit(PROMPT, 1)
    turn(service)
    tickets[1].cancel()
    tickets[7].cancel()
    stats = service.stats()
    assert (stats.submitted, stats.refused, stats.running, stats.waiting) == (8, 1, 2, 5)
    assert stats.finished == {"cancelled": 1}
    turn_until(service, tickets)
    results = [ticket.result(0) for ticket in tickets]
    stats = service.stats()
    assert stats.finished == {"length": 6, "cancelled": 2}
    assert stats.submitted == sum(stats.finished.values()) + stats.failed + stats.running + stats.waiting
    every = [result.stats for result in results]
    assert stats.prompt_tokens == sum(s.prompt_tokens for s in every)
    assert stats.new_tokens == sum(s.new_tokens for s in every)
    assert stats.rounds == sum(s.rounds for s in every)
    assert stats.with_tokens == 7
    assert stats.acceptance_length == pytest.approx(
        sum(sum(s.acceptance_lengths) for s in every) / stats.rounds
    )
    for place in range(BLOCK - 1):
        assert stats.proposed[place] == sum(s.proposed[place] for s in every if len(s.proposed) > place)
        assert stats.accepted[place] == sum(s.accepted[place] for s in every if len(s.accepted) > place)
    assert len(stats.acceptance_by_position) == BLOCK - 1
    assert stats.queue_ms == pytest.approx(sum(s.queue_ms for s in every))
    assert stats.first_token_ms >= stats.queue_ms - every[7].queue_ms
    assert stats.busy_ms > 0
    assert stats.cycles == service._scheduler._cycles
    assert stats.lanes_bytes == 2 * 408 * 2 * 2 * 4


def test_the_settings_in_use_are_told():
    service = still_service(toy_decoder(), max_length=100)
    assert service.max_length == 100
    effective = service.effective
    assert effective["max_length"] == 100
    assert (effective["max_requests"], effective["max_waiting"], effective["verify_rows"]) == (4, 64, BLOCK)
    assert effective["kv_sessions_bytes"] == effective["kv_lanes_bytes"] == 4 * 108 * 2 * 2 * 4
    with service_of() as adaptive:
        assert adaptive.effective["verify_rows"] == "adaptive"
