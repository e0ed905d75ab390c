"""What the loop of a request asks of the two models, and what it gets.

Whoever runs the loop decides with which other requests a pass is computed. Shapes: R rows of a pass, W rows
whose logits are wanted, P proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stats import Phase


@dataclass(frozen=True)
class TargetPass:
    """Compute tokens behind the committed ones; commits nothing.

    Attributes:
        ids: R tokens.
        logit_rows: W, how many rows, counted from the last, are wanted.
        phase: where to book the time.
        features: whether the draft will want to know what the target computed at its taps.
        logits: whether logits are wanted and not the greedy choices alone.
    """

    ids: Sequence[int]
    logit_rows: int
    phase: Phase
    features: bool
    logits: bool = False


@dataclass(frozen=True)
class TargetRows:
    """What a `TargetPass` gave.

    Attributes:
        greedy: the greedy choice behind each of the last W rows.
        logits: [W, V] float32, if asked for; valid until the next pass.
    """

    greedy: Sequence[int]
    logits: NDArray[np.float32] | None


@dataclass(frozen=True)
class DraftPass:
    """Take features of the committed tokens into the draft's context, and draft a block behind the anchor.

    Attributes:
        anchor: the token chosen last; its position is the committed length.
        count: proposals wanted, at most `DraftInfo.proposals`; 0 takes the context in and no more. The block
            is that much shorter, which is not the same as proposing more and dropping some: rows of a block
            see each other.
        wanted: names of the outputs.
        phase: where to book the time.
    """

    anchor: int
    count: int
    wanted: tuple[str, ...]
    phase: Phase


Drafted = Mapping[str, NDArray[Any]]
"""What a `DraftPass` gave: each output's rows of this request, cut to `count`; valid until the next pass."""


@dataclass(frozen=True)
class DraftFailure:
    """The draft gave nothing usable. Not an error of the request, which goes on without it."""

    cause: str
