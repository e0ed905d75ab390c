"""How a request's tokens are chosen: greedily from the engine's own argmax, or sampled from logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ..bundle.errors import EngineError
from ..bundle.manifest import ProposalLaw
from ..bundle.tensors import CANDIDATES, DRAFT_LOGITS, EDGE_SCORES, LOGIT_SUMS, PROPOSALS
from .accept import accept_greedy
from .choose import Accepted, Chooser, Proposed
from .passes import Drafted, TargetRows


class Choice(Protocol):
    """Chooses the tokens of one request; has state, and is used once."""

    @property
    def nothing(self) -> Proposed:
        """No proposals."""

    @property
    def draft_outputs(self) -> tuple[str, ...]:
        """What is wanted of the draft."""

    @property
    def needs_logits(self) -> bool:
        """Whether the next token needs the target's logits."""

    def propose(self, drafted: Drafted, most: int) -> Proposed:
        """Make at most `most` proposals from what the draft gave.

        Raises:
            ProposalError: there is nothing to draw from in it.
        """

    def accept(self, proposed: Proposed, rows: TargetRows, budget: int) -> Accepted:
        """Choose the round's tokens; commits nothing. `rows` are those of the anchor and each proposal."""

    def commit(self, ids: Sequence[int]) -> None:
        """Make tokens part of the output."""


_NOTHING = Proposed()
_DRAFT_OUTPUTS = {
    ProposalLaw.ROWS: (DRAFT_LOGITS, LOGIT_SUMS),
    ProposalLaw.CANDIDATES: (CANDIDATES, EDGE_SCORES, LOGIT_SUMS),
    ProposalLaw.FIXED: (PROPOSALS, LOGIT_SUMS),
}


class GreedyChoice:
    """The target's argmax; proposals are compared with it. No logits leave the engine."""

    nothing = _NOTHING
    draft_outputs = (PROPOSALS, LOGIT_SUMS)
    needs_logits = False

    def __init__(self, stop_ids: Collection[int]):
        self._stop_ids = stop_ids

    def propose(self, drafted: Drafted, most: int) -> Proposed:
        """See `Choice`."""
        return Proposed(tuple(drafted[PROPOSALS][:most].tolist()))

    def accept(self, proposed: Proposed, rows: TargetRows, budget: int) -> Accepted:
        """See `Choice`."""
        got = accept_greedy(proposed.ids, rows.greedy, budget, self._stop_ids)
        if min(got.ids) < 0:
            raise EngineError(
                f"target logits: row {got.ids.index(min(got.ids))} of the round holds NaN or infinity; the "
                "engine overflows or the bundle is damaged: run `dflash parity`, or export in float32"
            )
        return Accepted(got.accepted, got.ids, got.finish)

    def commit(self, ids: Sequence[int]) -> None:
        """See `Choice`."""


class SampledChoice:
    """Tokens drawn from the target's law. What the draft is asked for depends on what law it has itself."""

    nothing = _NOTHING

    def __init__(self, chooser: Chooser, law: ProposalLaw, stop_ids: Collection[int]):
        self._chooser = chooser
        self._greedy = GreedyChoice(stop_ids)
        self.draft_outputs = _DRAFT_OUTPUTS[law]

    @property
    def needs_logits(self) -> bool:
        """See `Choice`."""
        return self._chooser.needs_logits

    def propose(self, drafted: Drafted, most: int) -> Proposed:
        """See `Choice`."""
        if CANDIDATES in drafted:
            return self._chooser.propose_candidates(drafted[CANDIDATES][:most], drafted[EDGE_SCORES][:most])
        if DRAFT_LOGITS in drafted:
            return self._chooser.propose_rows(drafted[DRAFT_LOGITS][:most])
        return self._chooser.propose_fixed(drafted[PROPOSALS][:most].tolist())

    def accept(self, proposed: Proposed, rows: TargetRows, budget: int) -> Accepted:
        """See `Choice`."""
        if rows.logits is None:
            return self._greedy.accept(proposed, rows, budget)
        return self._chooser.accept(proposed, rows.logits, budget)

    def commit(self, ids: Sequence[int]) -> None:
        """See `Choice`."""
        self._chooser.commit(ids)
