"""The ways of decoding that a bundle has, and what a prompt becomes before it is timed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.accept import FinishReason
from ..runtime.decoder import Decoder
from ..runtime.request import Prompt, Request, prompt_ids
from ..runtime.stats import Mode
from .measure import Sample, Task

PLAIN, PLAIN_EXACT, SPECULATIVE = "plain", "plain_exact", "speculative"
OWN_WAYS = (PLAIN, PLAIN_EXACT, SPECULATIVE)
"""`plain` is the fastest plain decoding there is; `plain_exact` is plain decoding whose bits do not depend on
how many rows are computed together; `speculative` is exact, too, and is compared token by token with it."""


class Length(enum.Enum):
    """How many tokens an answer has."""

    ANSWER = "answer"
    """Until the model ends it, at most as many as are allowed. That end is found before anything is timed."""
    FULL = "full"
    """As many as are allowed, whatever the model says."""


@dataclass(frozen=True)
class OwnWay:
    """One way of one bundle.

    Attributes:
        name: unique in a run.
        decoder: set up for it.
        mode: with the draft or without.
    """

    name: str
    decoder: Decoder
    mode: Mode

    def run(self, task: Task) -> Sample:
        """See `Way`."""
        stream = self.decoder.stream(list(task.ids), task.new_tokens, mode=self.mode, stop_token_ids=())
        first_tokens = 0
        for chunk in stream:
            first_tokens = first_tokens or len(chunk.ids)
        stats = stream.result.stats
        return Sample(stream.result.ids, first_tokens, stats.first_token_ms, stats.total_ms, stats)


def own_ways(decoder: Decoder, label: str = "") -> list[OwnWay]:
    """`OWN_WAYS` of a bundle, in this order; their names begin with the label."""
    modes = {PLAIN: Mode.PLAIN, PLAIN_EXACT: Mode.PLAIN, SPECULATIVE: Mode.SPECULATIVE}
    return [
        OwnWay(way_name(label, name), decoder.with_settings(exact=name != PLAIN), mode)
        for name, mode in modes.items()
    ]


def way_name(label: str, name: str) -> str:
    """The name of a bundle's way in a run."""
    return f"{label} {name}" if label else name


def uses_chat(decoder: Decoder) -> bool:
    """Whether texts are put into a chat template."""
    return decoder.codec is not None and decoder.codec.has_chat_template


def encode(decoder: Decoder, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Token ids of prompts.

    Raises:
        RequestError: a prompt is not possible.
    """
    chat, longest = uses_chat(decoder), decoder.settings.max_length
    return [
        tuple(prompt_ids(Request(prompt, chat=chat), decoder.manifest, decoder.codec, longest))
        for prompt in prompts
    ]


def tasks_from_prompts(
    decoder: Decoder, prompts: Sequence[Prompt], max_new_tokens: int, length: Length = Length.ANSWER
) -> list[Task]:
    """Find out how long the answers are, and ask for exactly so much of every way.

    The token that ends an answer is left out of it: some programs never give it, and it would be no part of
    what is timed.

    Raises:
        RequestError: a prompt is not possible, or leaves no room.
    """
    exact = decoder.with_settings(exact=True)
    tasks = []
    for ids in encode(decoder, prompts):
        room = min(max_new_tokens, decoder.settings.max_length - len(ids))
        if length is Length.ANSWER:
            answer = exact.generate(list(ids), room)
            ended = answer.finish_reason is FinishReason.STOP
            room = max(len(answer.ids) - ended, 1)
        tasks.append(Task(ids, room))
    return tasks
