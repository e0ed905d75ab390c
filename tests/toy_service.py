"""The scheduler and the service over the toy pair, turned by hand, and what must hold after every turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import TokenizerInfo
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.decoder import Generation
from dflash_deploy.runtime.lane import Saved
from dflash_deploy.runtime.loop import Step
from dflash_deploy.runtime.pair import Pair
from dflash_deploy.runtime.policy import FixedRows, RowPolicy
from dflash_deploy.runtime.request import Request, job_from_request
from dflash_deploy.runtime.scheduler import Running, Scheduler
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import GenerationStats
from dflash_deploy.runtime.text import TextCodec
from dflash_deploy.runtime.ticket import Ticket
from toy_engines import VOCAB, ToyDecoder, hash_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Any tokens; two seeds differ from the first one on."""
    return [seed % VOCAB, *(hash_of([seed, i * 7919]) % VOCAB for i in range(length - 1))]


def toy_pair(decoder: ToyDecoder, lanes: int) -> Pair:
    limits = ShapeLimits.from_manifest(decoder.manifest, decoder.settings.max_length)
    return Pair(
        decoder.manifest,
        decoder.toy_target,
        decoder.toy_draft,
        limits.capacity,
        lanes,
        decoder.settings.exact,
    )


def caches_of(pair: Pair) -> list[np.ndarray]:
    """Slots of target and draft, [lanes, capacity]."""
    return [pair._target_cache.tokens, pair._draft_cache.tokens]


class WildRows(FixedRows):
    """Another number of rows each time. No output may depend on it."""

    def __init__(self, most: int, seed: int):
        super().__init__(most)
        self.random = random.Random(seed)

    def rows(self, requests: int) -> int:
        return self.random.choice([1, 1, 2, self.random.randint(1, self.count), self.count])


@dataclass(eq=False)
class ToySink:
    """Collects what a request is told, and that nothing comes behind the end."""

    ids: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None
    stats: GenerationStats | None = None
    kept: Saved | None = None
    now: int = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def step(self, step: Step) -> None:
        assert not self.ended
        self.ids += step.ids
        self.cycles.append(self.now)

    def end(self, finish: FinishReason, stats: GenerationStats, kept: Saved | None) -> None:
        assert not self.ended
        self.finish, self.stats, self.kept = finish, stats, kept

    def fail(self, error: Exception, stats: GenerationStats) -> None:
        assert not self.ended
        self.error, self.stats = error, stats


class Turned:
    """A scheduler turned by hand, which checks its lanes after every cycle."""

    def __init__(
        self,
        decoder: ToyDecoder,
        lanes: int = 4,
        prefill_rows: int = 64,
        cycle_prefill_rows: int | None = None,
        policy: RowPolicy | None = None,
    ):
        self.decoder = decoder
        self.pair = toy_pair(decoder, lanes)
        rows = decoder.settings.verify_rows
        cycle_rows = prefill_rows if cycle_prefill_rows is None else cycle_prefill_rows
        self.scheduler = Scheduler(
            self.pair, decoder.manifest.draft, prefill_rows, cycle_rows, policy or FixedRows(rows), rows
        )
        self.cycles = 0
        self.sinks: list[ToySink] = []

    def admit(
        self,
        prompt: Sequence[int],
        count: int,
        saved: Saved | None = None,
        tokens: int = 0,
        keep: bool = False,
        **options: Any,
    ) -> tuple[ToySink, Running]:
        job = job_from_request(
            Request(prompt, count, **options),
            self.decoder.manifest,
            self.decoder.codec,
            self.decoder.settings.max_length,
        )
        sink = ToySink(now=self.cycles)
        self.sinks.append(sink)
        return sink, self.scheduler.admit(job, sink, keep, saved, tokens)

    def cycle(self) -> None:
        self.cycles += 1
        for sink in self.sinks:
            sink.now = self.cycles
        self.scheduler.cycle()
        check_lanes(self.scheduler)

    def run(self, most: int = 10_000) -> None:
        while self.scheduler.running:
            self.cycle()
            most -= 1
            assert most, "a request starves"
        assert all(sink.ended for sink in self.sinks)
        assert_clean(self.pair)


def check_lanes(scheduler: Scheduler) -> None:
    """Requests that run have the first lanes, the caches know their tokens, other lanes are as new."""
    pair, running = scheduler._pair, scheduler.running
    assert [r.lane.index for r in running] == list(range(len(running)))
    assert [lane.index for lane in pair.lanes] == list(range(len(pair.lanes)))
    target, draft = caches_of(pair)
    for one in running:
        lane, prompt = one.lane, one.job.prompt
        known = min(lane.target.committed, len(prompt))
        assert target[lane.index, :known].tolist() == list(prompt[:known])
        if lane.draft_lost is None:
            assert lane.draft.committed <= lane.target.committed
            known = lane.draft.committed
            assert (draft[lane.index, :known] == target[lane.index, :known]).all()
    for lane in pair.lanes[len(running) :]:
        assert lane.target.committed == lane.draft.committed == 0
        assert lane.recorder is None
        assert not lane.features


def assert_clean(pair: Pair) -> None:
    """Nothing is left of any request, in memory neither."""
    for lane in pair.lanes:
        assert lane.target.committed == lane.target.written == lane.draft.committed == 0
        assert (lane.recorder, lane.features, lane.draft_lost, lane.seen) == (None, [], None, None)
    target, draft = caches_of(pair)
    assert not target.any()
    assert not draft.any()


# A service without its thread.


def still_service(decoder: ToyDecoder, **settings: Any) -> Service:
    settings = {"max_requests": 4, "verify_rows": decoder.settings.verify_rows, **settings}
    return Service(decoder, ServiceSettings(**settings), start=False)


def turn(service: Service, times: int = 1) -> None:
    for _ in range(times):
        service._round()
        check_lanes(service._scheduler)


def turn_until(service: Service, tickets: Sequence[Ticket], most: int = 2000) -> None:
    while not all(ticket.done for ticket in tickets):
        turn(service)
        most -= 1
        assert most, "a request starves"


def read_now(ticket: Ticket) -> list[int]:
    """Tokens that can be read without waiting."""
    ids: list[int] = []
    while (chunk := ticket._entry.poll()) is not None:
        ids += chunk.ids
    return ids


def complete(service: Service, ticket: Ticket) -> Generation:
    turn_until(service, [ticket])
    return ticket.result(0)


# A tokenizer whose text is easily foreseen.


def letters_codec(template: str | None = None) -> TextCodec:
    """Token i is a letter or digit: the vocabulary is VOCAB different characters."""
    tokenizer = Tokenizer(models.WordLevel({letter(i): i for i in range(VOCAB)}, unk_token=letter(0)))
    tokenizer.decoder = decoders.Fuse()
    from tokenizers import Regex, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return TextCodec(tokenizer, template, TokenizerInfo())


def letter(token: int) -> str:
    return chr(0x100 + token)


def letters(ids: Sequence[int]) -> str:
    return "".join(letter(token) for token in ids)
