"""The loop: prefill, then rounds of draft, verify, accept, commit.

L tokens are committed: their keys and values are in the target's cache. Token L, the anchor, is chosen, but
not computed. The draft has seen the target's features of the positions before L.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..bundle.limits import PREFILL_ROWS
from ..bundle.manifest import DraftInfo
from .accept import Acceptance, accept_greedy
from .models import Draft, DraftFailure, Target
from .stats import Phase, Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """What one generation may do.

    Attributes:
        new_tokens: most tokens produced, at least 1.
        verify_rows: most rows the target verifies in a round, at least 2: anchor and proposals.
        stop_ids: tokens that end the generation.
    """

    new_tokens: int
    verify_rows: int
    stop_ids: Collection[int]


def run_loop(
    target: Target,
    draft: Draft | None,
    info: DraftInfo,
    prompt: Sequence[int],
    budget: Budget,
    recorder: Recorder,
) -> Iterator[Acceptance]:
    """Decode greedily and yield what each round commits; the last one has `finish` set.

    Args:
        target: new, with nothing in its cache.
        draft: new; None decodes plainly.
        info: the draft's part of the manifest.
        prompt: at least one token.
        budget: what ends the loop.
        recorder: told about rounds and failures.

    Raises:
        EngineError: the target's engine failed. A failing draft does not raise: the loop goes on plainly.
    """

    def failed(failure: DraftFailure) -> None:
        recorder.draft_failures += 1
        recorder.draft_failure = str(failure)
        logger.warning("draft failed, this request goes on without it: %s", failure)

    # Prefill, in parts if it is long; the last row chooses the first anchor.
    first: list[int] = []
    for begin in range(0, len(prompt), PREFILL_ROWS):
        part = prompt[begin : begin + PREFILL_ROWS]
        first = target.run(part, 1, Phase.PREFILL)
        target.length.commit(len(part))
        if draft is not None and begin + len(part) < len(prompt):
            try:
                draft.absorb(target)
            except DraftFailure as failure:
                failed(failure)
                draft = None
    outcome = accept_greedy((), first, budget.new_tokens, budget.stop_ids)
    recorder.new_tokens = 1
    yield outcome

    while outcome.finish is None:
        # 1. The anchor is the token chosen last; `left` tokens may still be produced behind it.
        anchor, left = outcome.ids[-1], budget.new_tokens - recorder.new_tokens
        # 2.-7. Draft a block over the features of the last pass. The block is cut to the budget, as z-lab
        # cuts it; of its proposals no more are verified than can be used: a verified row gives a token.
        proposals: list[int] = []
        if draft is not None and left > 1:
            try:
                proposals = draft.propose(target, anchor, min(info.proposals, left))
            except DraftFailure as failure:
                failed(failure)
                draft = None
        proposals = proposals[: min(budget.verify_rows, left) - 1]
        # 8. Verify anchor and proposals in one pass, accept, commit; what was not accepted is forgotten.
        rows = len(proposals) + 1
        greedy = target.run([anchor, *proposals], rows, Phase.VERIFY)
        outcome = accept_greedy(proposals, greedy, left, budget.stop_ids)
        target.length.commit(len(outcome.ids))
        recorder.acceptance_lengths.append(len(outcome.ids))
        recorder.new_tokens += len(outcome.ids)
        yield outcome
