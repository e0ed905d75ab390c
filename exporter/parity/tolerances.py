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


_SAME = Tolerance(why="settings are equal or they are not")
_EXACT_OPERATOR = Tolerance(
    relative=2e-5, cosine=1e-10, why="float32 in every bundle, given the same inputs; a sum of a few products"
)
_HALF_WHY = (
    "weights and each projection's input carry {bits} bits; errors of layers add up like a random walk"
)


def _half(step: float, bits: int) -> dict[Kind, Tolerance]:
    """Limits for a half precision format with relative rounding `step`."""
    why = _HALF_WHY.format(bits=bits)
    return {
        Kind.SETTINGS: _SAME,
        Kind.TAP: Tolerance(relative=400 * step, cosine=3e3 * step * step, why=why),
        Kind.CONTEXT: Tolerance(
            relative=2e-4, cosine=1e-8, why="fc and its norm stay in float32 in every bundle"
        ),
        Kind.LAYER: Tolerance(relative=200 * step, cosine=3e3 * step * step, why=why),
        Kind.LOGITS: Tolerance(relative=200 * step, cosine=3e3 * step * step, kl=2e4 * step * step, why=why),
        Kind.SCORES: Tolerance(relative=200 * step, why=f"logits, as far as {bits} bits carry them"),
        Kind.OPERATOR: _EXACT_OPERATOR,
        Kind.CHOICE: Tolerance(
            margin=300 * step, why="two logits closer than their own errors may change places"
        ),
        Kind.GENERATION: Tolerance(
            margin=300 * step,
            why="a token may differ where the original has a near-tie; anything else is a fault",
        ),
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
        Kind.CHOICE: Tolerance(margin=1e-3, why="two logits closer than their own errors may change places"),
        Kind.GENERATION: Tolerance(
            margin=1e-3, why="a token may differ where the original has a near-tie; anything else is a fault"
        ),
    },
    DType.FLOAT16: _half(2.0**-11, 11),
    DType.BFLOAT16: _half(2.0**-8, 8),
}
