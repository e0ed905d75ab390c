"""How far a bundle may be from its originals: one table, with a reason for every number.

The originals always run in float32 with the checkpoint's own weights. A float32 bundle differs from them by
the order of sums alone, a half precision one by the rounding of weights and of each projection's input.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...bundle.tensors import DType


class Kind(enum.Enum):
    """What a stage compares."""

    SETTINGS = "settings"
    TAP = "tap"
    CONTEXT = "context"
    LAYER = "layer"
    LOGITS = "logits"
    SCORES = "scores"
    OPERATOR = "operator"
    CHOICE = "choice"
    GENERATION = "generation"


@dataclass(frozen=True)
class Tolerance:
    """Limits of one kind of stage; None = not measured.

    Attributes:
        relative: largest |bundle - original| of a row over the root mean square of the original's row.
        cosine: largest 1 - cosine between the two sides of a row.
        kl: largest Kullback-Leibler divergence of a row's two distributions, in nats.
        margin: a different choice is excused while the original scores it at most this much, in logits,
            below its own.
        why: the reason.
    """

    relative: float | None = None
    cosine: float | None = None
    kl: float | None = None
    margin: float | None = None
    why: str = ""


SAME_BITS = Tolerance(
    relative=0.0,
    why="tuned graphs and the whole round: the same operations on the same numbers, sums in the same order; "
    "the tokens must be the same, too",
)
"""For graphs of one bundle that are held against each other, whatever its dtype."""

_SAME = Tolerance(why="settings are equal or they are not")
_EXACT_OPERATOR = Tolerance(
    relative=2e-5, cosine=1e-10, why="float32 in every bundle, given the same inputs; a sum of a few products"
)
_NEAR_TIE = "two logits closer than their own errors may change places; anything else is a fault"


def _half(bits: int) -> dict[Kind, Tolerance]:
    """Limits for a half precision format with `bits` significant bits.

    The factors are a few times what real and random pairs show in float16; a tap of the neighbouring layer
    is a hundred times beyond them.
    """
    step = 2.0**-bits
    why = f"weights and each projection's input carry {bits} bits; errors of layers add up like a random walk"
    massive = "; the largest outliers of a row of rounded products decide the relative error"
    return {
        Kind.SETTINGS: _SAME,
        Kind.TAP: Tolerance(relative=min(400 * step, 0.5), cosine=100 * step**2, why=why + massive),
        Kind.CONTEXT: Tolerance(
            relative=2e-4, cosine=1e-8, why="fc and its norm stay float32 in every bundle"
        ),
        Kind.LAYER: Tolerance(relative=min(100 * step, 0.5), cosine=100 * step**2, why=why),
        Kind.LOGITS: Tolerance(
            relative=min(100 * step, 0.5), cosine=1000 * step**2, kl=4000 * step**2, why=why
        ),
        Kind.SCORES: Tolerance(relative=min(50 * step, 0.5), why=f"sums of logits that carry {bits} bits"),
        Kind.OPERATOR: _EXACT_OPERATOR,
        Kind.CHOICE: Tolerance(margin=300 * step, why=_NEAR_TIE),
        Kind.GENERATION: Tolerance(margin=300 * step, why=_NEAR_TIE),
    }


TOLERANCES: dict[DType, dict[Kind, Tolerance]] = {
    DType.FLOAT32: {
        Kind.SETTINGS: _SAME,
        Kind.TAP: Tolerance(
            relative=5e-4, cosine=1e-9, why="float32 sums in another order, over all layers up to the tap"
        ),
        Kind.CONTEXT: Tolerance(relative=1e-4, cosine=1e-9, why="one float32 projection and a norm"),
        Kind.LAYER: Tolerance(
            relative=2e-4, cosine=1e-8, why="float32 sums in another order, over a few layers"
        ),
        Kind.LOGITS: Tolerance(
            relative=2e-4,
            cosine=1e-8,
            kl=1e-6,
            why="float32 sums in another order, over all layers and the head",
        ),
        Kind.SCORES: Tolerance(relative=2e-4, why="the logits' error, and a float32 product of small rank"),
        Kind.OPERATOR: _EXACT_OPERATOR,
        Kind.CHOICE: Tolerance(margin=1e-3, why=_NEAR_TIE),
        Kind.GENERATION: Tolerance(margin=1e-3, why=_NEAR_TIE),
    },
    DType.FLOAT16: _half(11),
    DType.BFLOAT16: _half(8),
}
