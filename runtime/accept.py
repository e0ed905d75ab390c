"""Which proposals stand, and where a generation ends. Pure functions of token ids."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one round.

    Attributes:
        accepted: proposals the target agreed with, before stop and budget cut them.
        ids: tokens that join the sequence; the last one is the next anchor.
        finish: set if the generation ends with these tokens.
    """

    accepted: int
    ids: tuple[int, ...]
    finish: FinishReason | None


def accept_greedy(
    proposals: Sequence[int], greedy_ids: Sequence[int], budget: int, stop_ids: Collection[int]
) -> Acceptance:
    """Accept the longest prefix of proposals that greedy decoding would have produced, and one token more.

    The result is by construction what greedy decoding of the target gives, cut behind the first stop id and
    at the budget, whatever was proposed.

    Args:
        proposals: the P tokens verified behind the anchor.
        greedy_ids: the target's choices for the rows [anchor, proposals], P + 1 of them: row i chooses the
            token behind row i.
        budget: tokens that may still be produced, at least 1.
        stop_ids: ids that end the generation; the stop id itself is part of the output.
    """
    if len(greedy_ids) != len(proposals) + 1 or budget < 1:
        raise ValueError(
            f"got {len(proposals)} proposals, {len(greedy_ids)} rows and a budget of {budget}; "
            "expected one row more than proposals, and a budget of at least 1"
        )
    accepted = 0
    for proposal, choice in zip(proposals, greedy_ids, strict=False):
        if proposal != choice:
            break
        accepted += 1
    ids = [int(token) for token in greedy_ids[: min(accepted + 1, budget)]]
    for index, token in enumerate(ids):
        if token in stop_ids:
            return Acceptance(accepted, tuple(ids[: index + 1]), FinishReason.STOP)
    return Acceptance(accepted, tuple(ids), FinishReason.LENGTH if len(ids) == budget else None)
