"""Requests come, are read, cancelled, late, fail and end in any order, beside a model of what must come out.

The service is turned by hand, so that what hypothesis finds can be played again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import BusyError, EngineError, RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.session import Session
from dflash_deploy.runtime.stats import Mode
from dflash_deploy.runtime.ticket import Entry, Ticket
from toy_engines import VOCAB, always, at_slot, greedy, never, sometimes, toy_decoder
from toy_service import WildRows, assert_clean, check_lanes, prompt_of, still_service

MAX_LENGTH = 120


@dataclass(eq=False)
class Expected:
    """A request, and what is known of it."""

    ticket: Ticket | None  # None: dropped
    entry: Entry
    prompt: list[int]
    tokens: list[int]  # what it gives if nothing gets in the way
    finish: FinishReason
    session: int | None
    sampled: bool = False
    read: list[int] = field(default_factory=list)
    touched: bool = False  # somebody tried to read
    cancelled: bool = False
    late: bool = False
    in_failure: bool = False  # ran in a cycle in which the target failed
    checked: bool = False


@dataclass
class Talk:
    """A session, and the conversation as far as it was delivered."""

    session: Session
    whole: list[int]
    last: Expected | None = None


class Play:
    """What callers, engines and time do, each by a method that takes its chances; `check` is the model."""

    def __init__(self, chance: random.Random):
        spoiler = chance.choice([never, always, sometimes, at_slot(2)])

        def made():
            return toy_decoder(spoiler, max_length=MAX_LENGTH, with_logits=True, verify_rows=5)

        self.decoder, self.alone = made(), made()
        lanes = chance.randint(1, 4)
        lanes_bytes = 2 * 4 * 2 * lanes * (MAX_LENGTH + 8)
        self.service = still_service(
            self.decoder,
            max_requests=lanes,
            max_waiting=chance.randint(0, 3),
            prefill_rows=chance.choice([4, 16, 64]),
            kv_budget_bytes=lanes_bytes + chance.choice([0, 3000, 10**6, 10**6]),
        )
        self.service._scheduler._policy = WildRows(5, chance.randrange(999))
        self.decoder.toy_target.before = self.before_target
        self.decoder.toy_draft.fault = self.after_draft
        self.target_fails = False
        self.draft_fails: str | None = None
        self.draft_failed = False
        self.failed_now = False
        self.closed = False
        self.requests: list[Expected] = []
        self.talks: list[Talk] = []
        self.refused = 0

    # The engines.

    def before_target(self, sizes):
        if self.target_fails:
            self.target_fails, self.failed_now = False, True
            raise EngineError("target broke")

    def after_draft(self, call, outputs):
        if self.draft_fails is None:
            return
        kind, self.draft_fails, self.draft_failed = self.draft_fails, None, True
        if kind == "error":
            raise EngineError("draft broke")
        for name in ("logit_sums", "draft_logits"):
            outputs[name][0] = np.nan

    # What callers do.

    def submit(self, chance):
        length = chance.choice([1, chance.randint(1, 8), chance.randint(1, MAX_LENGTH - 1)])
        count = chance.choice([1, chance.randint(1, 12), chance.randint(1, 80)])
        kind = chance.choice(["greedy", "greedy", "greedy", "plain", "stop", "sampled"])
        self._submit(prompt_of(length, chance.randint(0, 30)), count, kind, chance, None)

    def talk(self, chance):
        """A turn of a conversation: it goes on, or was edited, or begins anew."""
        if self.closed:
            return
        if len(self.talks) < 3:
            self.talks.append(Talk(self.service.session(), []))
        talk = chance.choice(self.talks)
        last = talk.last
        for _ in range(chance.choice([0, 0, MAX_LENGTH])):
            if last is not None and not last.entry.ended:
                self.turn()
        self.check()
        cut = chance.choice([len(talk.whole), len(talk.whole), chance.randint(0, len(talk.whole))])
        prompt = [*talk.whole[:cut], *prompt_of(chance.randint(1, 6), 40 + chance.randint(0, 3))]
        if len(prompt) >= MAX_LENGTH:
            talk.whole = []
            return
        count = chance.randint(1, 30)
        if last is not None and not last.entry.ended and not last.entry.cancelled:
            with pytest.raises(RequestError, match="has not ended"):
                talk.session.submit(prompt, count)
            return
        if last is not None and not last.entry.ended:
            self.turn()  # what the session would wait for
        kind = chance.choice(["greedy", "greedy", "plain", "sampled"])
        made = self._submit(prompt, count, kind, chance, talk)
        if made is not None:
            talk.last, talk.whole = made, prompt

    def _submit(self, prompt, count, kind, chance, talk):
        options: dict = {}
        if kind == "sampled":
            options["sampling"] = Sampling(0.8, top_p=0.9, seed=chance.randrange(9))
            tokens = [*self.alone.generate(prompt, count, **options).ids]
        else:
            tokens = greedy(prompt, min(count, MAX_LENGTH - len(prompt)))
        finish = FinishReason.LENGTH
        if kind == "plain":
            options["mode"] = Mode.PLAIN
        if kind == "stop":
            options["stop_token_ids"] = [chance.choice(tokens), VOCAB - 1]
            end = next(i for i, token in enumerate(tokens) if token in options["stop_token_ids"])
            tokens, finish = tokens[: end + 1], FinishReason.STOP
        queue = self.service._queue
        room = self.service.settings.max_requests - len(queue.running) + self.service.settings.max_waiting
        ask = self.service.submit if talk is None else talk.session.submit
        if self.closed:
            with pytest.raises(RequestError, match="is closed"):
                ask(prompt, count, **options)
            return None
        if len(queue.waiting) >= room:
            with pytest.raises(BusyError):
                ask(prompt, count, **options)
            self.refused += 1
            return None
        ticket = ask(prompt, count, **options)
        session = None if talk is None else self.talks.index(talk)
        made = Expected(ticket, ticket._entry, prompt, tokens, finish, session, kind == "sampled")
        self.requests.append(made)
        return made

    def some(self, chance, which: Callable[[Expected], bool] = lambda one: True) -> Expected | None:
        able = [one for one in self.requests if one.ticket is not None and which(one)]
        return chance.choice(able[-6:]) if able else None

    def read(self, chance):
        one = self.some(chance)
        if one is None:
            return
        one.touched = True
        for _ in range(chance.randint(1, 5)):
            try:
                chunk = one.ticket._entry.poll()
            except EngineError:
                assert one.in_failure
                return
            if chunk is None:
                return
            one.read += chunk.ids
            assert one.read == one.tokens[: len(one.read)] or (one.sampled and self.draft_failed)

    def cancel(self, chance):
        one = self.some(chance)
        if one is not None:
            one.cancelled = one.cancelled or not one.entry.ended
            one.ticket.cancel()

    def drop(self, chance):
        one = self.some(chance)
        if one is not None:
            one.cancelled = one.cancelled or not one.entry.ended
            one.ticket = None
            assert one.entry.cancelled

    def be_late(self, chance):
        one = self.some(chance, lambda one: not one.entry.ended)
        if one is not None:
            one.late, one.entry.expires = True, 0.0

    def end_talk(self, chance):
        if not self.talks:
            return
        talk = chance.choice(self.talks)
        if chance.random() < 0.5:
            if talk.last is not None and not talk.last.entry.ended:
                talk.last.cancelled = True
            talk.session.close()
        talk.whole, talk.last = [], None
        talk.session = self.service.session()

    def break_target(self, chance):
        self.target_fails = True

    def break_draft(self, chance):
        self.draft_fails = chance.choice(["error", "nan"])

    # Time goes on.

    def turns(self, chance):
        for _ in range(chance.choice([1, 1, 2, 5])):
            self.turn()

    def turn(self):
        if self.closed:
            return
        service, queue = self.service, self.service._queue
        before = {e: sum(len(s.ids) for s in e._steps) for e in queue.running}
        done = len(self.decoder.toy_target.calls), len(self.decoder.toy_draft.calls)
        self.failed_now = False
        service._round()
        check_lanes(service._scheduler)
        ran = [one for one in self.requests if one.entry in before or one.entry in queue.running]
        ran += [one for one in self.requests if one not in ran and one.entry.ended and not one.checked]
        targets = len(self.decoder.toy_target.calls) - done[0]
        assert targets <= 1 + len(ran)
        assert len(self.decoder.toy_draft.calls) - done[1] <= 2 * len(ran)
        if not queue.running and all(one.cancelled or one.late for one in ran):
            assert targets == 0, "a round for nobody"
        for one in ran:
            one.in_failure |= self.failed_now
        for entry, had in before.items():
            if had and not entry.ended:
                assert sum(len(s.ids) for s in entry._steps) > had, "a request starves"

    def close(self, chance):
        if self.closed or chance.random() < 0.8:
            return
        for one in self.requests:
            one.cancelled = one.cancelled or not one.entry.ended
        self.service.close()
        self.service.close()
        self.closed = True
        assert all(one.entry.ended for one in self.requests)

    # The model.

    def check(self):
        for one in self.requests:
            if one.entry.ended and not one.checked:
                one.checked = True
                self._check_end(one)
            if one.checked and one.ticket is not None:
                assert one.ticket.done
        stats = self.service.stats()
        assert (stats.submitted, stats.refused) == (len(self.requests), self.refused)
        assert stats.submitted == sum(stats.finished.values()) + stats.failed + stats.running + stats.waiting
        assert stats.kept_bytes <= self.service._kept.budget_bytes
        assert stats.running <= self.service.settings.max_requests

    def _check_end(self, one: Expected) -> None:
        entry = one.entry
        if entry.error is not None:
            assert one.in_failure
            assert str(entry.error) == "target broke"
            return
        result = entry.result
        ids = [*result.ids]
        if one.sampled and result.stats.draft_failures:
            # From there on other draws: the law is the same, the text is not.
            one.tokens = [*ids, *one.tokens[len(ids) :]]
        assert ids == one.tokens[: len(ids)]
        assert [token for step in entry._steps for token in step.ids] == ids
        if result.finish_reason is FinishReason.CANCELLED:
            assert one.cancelled
            if one.touched:
                assert ids == one.read
        elif result.finish_reason is FinishReason.DEADLINE:
            assert one.late
        else:
            assert ids == one.tokens
            assert result.finish_reason is one.finish
        if result.stats.draft_failures:
            assert self.draft_failed
        assert result.stats.cached_tokens < len(one.prompt)
        if one.session is None:
            assert result.stats.cached_tokens == 0
        elif self.talks[one.session].last is one:
            self.talks[one.session].whole = [*one.prompt, *ids]

    def finish(self):
        self.target_fails = False
        if not self.closed:
            for _ in range(3 * MAX_LENGTH * (1 + len(self.requests))):
                if all(one.entry.ended for one in self.requests):
                    break
                self.turn()
                self.check()
            assert all(one.entry.ended for one in self.requests), "a request starves"
            self.turn()
            assert_clean(self.service._scheduler._pair)
            assert not self.service._queue.running
            assert not self.service._queue.waiting
        self.check()
        for one in self.requests:
            if one.ticket is not None and one.entry.result is not None:
                one.read += [token for chunk in one.ticket for token in chunk.ids]
                assert one.read == [*one.entry.result.ids]
        self.service.close()


OPERATIONS = (
    ["submit"] * 8
    + ["turns"] * 8
    + ["talk"] * 6
    + ["read"] * 4
    + ["cancel", "drop", "be_late", "end_talk", "break_target", "break_draft", "close"]
)
SEEN: Counter[str] = Counter()


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**32)), min_size=20, max_size=70),
)
def play(seed: int, steps: Sequence[tuple[str, int]]) -> None:
    playing = Play(random.Random(seed))
    for name, chances in steps:
        getattr(playing, name)(random.Random(chances))
        playing.check()
    playing.finish()
    for one in playing.requests:
        result = one.entry.result
        SEEN["failed" if result is None else result.finish_reason.value] += 1
        if result is not None:
            SEEN["cached"] += result.stats.cached_tokens > 0
            SEEN["draft failed"] += result.stats.draft_failures
            SEEN["sampled"] += one.sampled


def plays(examples: int) -> None:
    """Play so often, and see that the plays were not idle."""
    SEEN.clear()
    checks = list(HealthCheck)
    settings(max_examples=examples, deadline=None, suppress_health_check=checks)(play)()
    for what in ("length", "stop", "cancelled", "deadline", "failed", "cached", "draft failed", "sampled"):
        assert SEEN[what] > examples / 20, SEEN


def test_random_interleavings():
    plays(100)


@pytest.mark.slow
def test_more_random_interleavings():
    plays(2000)
