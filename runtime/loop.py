"""The loop of one request: prefill, then rounds of draft, verify, accept, commit.

It is a generator that yields the passes it needs and is sent what they gave, so that it reads like the
algorithm whether it runs alone (`run_alone`) or its passes are computed together with those of others
(`scheduler`). What a round commits is yielded too, as a `Step`.

L tokens are committed: their keys and values are in the target's cache. Token L, the anchor, is chosen, but
not computed. The draft has seen the target's features of the positions before L.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from ..bundle.limits import KV_BUCKET
from ..bundle.manifest import DraftInfo
from .accept import FinishReason
from .choice import Choice
from .choose import Accepted, ProposalError, TokenLogprob
from .lane import Lane
from .pair import Pair
from .passes import Drafted, DraftFailure, DraftPass, TargetPass, TargetRows
from .policy import RowPolicy
from .stats import Phase, Recorder
from .stops import TextWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What a round adds to a request.

    Attributes:
        ids: tokens that join the sequence; the last one is the next anchor.
        text: what may be shown now.
        logprobs: one for each of `ids`, if they were asked for.
        finish: set if the request ends with these tokens.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None


@dataclass(frozen=True)
class Job:
    """A request, ready to run.

    Attributes:
        prompt: at least one token.
        new_tokens: most tokens produced, at least 1.
        choice: how tokens are chosen; its state belongs to this run.
        watch: text and stop strings; its state belongs to this run.
        speculative: whether to draft.
        rows_are_free: whether the tokens are the same however many proposals are verified in a round.
        recorder: told about rounds and failures.
    """

    prompt: Sequence[int]
    new_tokens: int
    choice: Choice
    watch: TextWatch
    speculative: bool
    rows_are_free: bool
    recorder: Recorder


RowsNow = Callable[[], int]
"""Most rows that the target verifies in the round that begins now, the anchor included; 1 decodes plainly."""

Ask = TargetPass | DraftPass
Reply = TargetRows | Drafted | DraftFailure | None
Loop = Generator[Ask | Step, Reply, None]


def request_loop(job: Job, lane: Lane, info: DraftInfo, prefill_rows: int, rows_now: RowsNow) -> Loop:
    """Run a request; the last `Step` has `finish` set.

    Args:
        job: the request.
        lane: its place in the caches. What is committed there already are the first tokens of the prompt, not
            all of them.
        info: the draft's part of the manifest.
        prefill_rows: most rows of the prompt in one pass.
        rows_now: asked once a round.

    Raises:
        EngineError: a row of the target that was needed is not finite. A failing draft does not raise: the
            loop goes on plainly.
    """
    choice, recorder = job.choice, job.recorder
    drafting = job.speculative

    def failed(cause: str) -> None:
        nonlocal drafting
        drafting = False
        lane.draft_lost = cause  # what spoilt it may stand in the context, which a session would keep
        recorder.draft_failures += 1
        recorder.draft_failure = cause
        logger.warning("draft failed, this request goes on without it: %s", cause)

    # Prefill, in parts if it is long; the last row chooses the first anchor.
    rows = TargetRows((), None)
    while lane.target.committed < len(job.prompt):
        begin = lane.target.committed
        part = job.prompt[begin : begin + prefill_rows]
        last = begin + len(part) == len(job.prompt)
        reply = yield TargetPass(part, 1, Phase.PREFILL, drafting, last and choice.needs_logits)
        rows = cast("TargetRows", reply)
        lane.target.commit(len(part))
        if drafting and not last:
            reply = yield DraftPass(0, 0, (), Phase.PREFILL)
            if isinstance(reply, DraftFailure):
                failed(reply.cause)
    step = _step(job, choice.accept(choice.nothing, rows, job.new_tokens))
    recorder.new_tokens = 1
    yield step

    while step.finish is None:
        # 1. The anchor is the token chosen last; `left` tokens may still be produced behind it.
        anchor, left = step.ids[-1], job.new_tokens - recorder.new_tokens
        # 2.-7. Draft a block over the features of the last pass. The block is cut to the budget, as z-lab
        # cuts it; of its proposals no more are verified than can be used: a verified row gives a token.
        proposed = choice.nothing
        most_rows = min(rows_now(), left) if left > 1 else 1
        if drafting and most_rows > 1:
            count = min(info.proposals, left)
            reply = yield DraftPass(anchor, count, choice.draft_outputs, Phase.DRAFT)
            if isinstance(reply, DraftFailure):
                failed(reply.cause)
            else:
                try:
                    proposed = choice.propose(cast("Drafted", reply), most_rows - 1)
                except ProposalError as cause:
                    failed(str(cause))
        elif drafting and lane.target.committed - lane.draft.committed >= min(KV_BUCKET, prefill_rows):
            # Plain rounds leave features behind: taken in now and then, they fit into one pass.
            reply = yield DraftPass(0, 0, (), Phase.DRAFT)
            if isinstance(reply, DraftFailure):
                failed(reply.cause)
        # 8. Verify anchor and proposals in one pass, accept, commit; what was not accepted is forgotten.
        ids = [anchor, *proposed.ids]
        reply = yield TargetPass(ids, len(ids), Phase.VERIFY, drafting, choice.needs_logits)
        accepted = choice.accept(proposed, cast("TargetRows", reply), left)
        step = _step(job, accepted)
        lane.target.commit(len(step.ids))
        recorder.round(len(proposed.ids), accepted.accepted, len(step.ids))
        yield step


def _step(job: Job, accepted: Accepted) -> Step:
    """Cut a round's tokens behind a stop string, and let them join the sequence."""
    ids, finish = accepted.ids, accepted.finish
    for index, token in enumerate(ids):
        if job.watch.push(token):
            ids, finish = ids[: index + 1], FinishReason.STOP
            break
    job.choice.commit(ids)
    text = job.watch.take() if finish is None else job.watch.close()
    if finish is FinishReason.LENGTH and job.watch.stopped is not None:
        finish = FinishReason.STOP  # the last character came to light only now
    return Step(ids, text, accepted.logprobs[: len(ids)], finish)


def run_alone(loop: Loop, job: Job, pair: Pair, lane: Lane, policy: RowPolicy) -> Iterator[Step]:
    """Run a loop by itself, each pass as it is asked for; tell a policy what passes cost and what stood.

    Raises:
        EngineError: the target's engine failed.
    """
    reply: Reply = None
    accepted = rows = 0
    while True:
        began = perf_counter()
        try:
            asked = loop.send(reply)
        except StopIteration:
            return
        reply = None
        if isinstance(asked, TargetPass):
            reply = pair.run_target([(lane, asked)])[0]
            if asked.phase is Phase.VERIFY:
                rows = len(asked.ids)
                policy.verified(1, rows, (perf_counter() - began) * 1000.0)
        elif isinstance(asked, DraftPass):
            reply = pair.run_draft([(lane, asked)])[0]
            if asked.count:
                policy.drafted(1, (perf_counter() - began) * 1000.0)
        else:
            if rows:
                stood = sum(job.recorder.accepted)
                policy.accepted(rows - 1, stood - accepted)
                accepted, rows = stood, 0
            yield asked
