"""Move the size of an activation's channels into the weights, where rounding is finer.

A row of activations has one scale, so a channel that is much larger than the others takes their precision.
Divided by a factor a channel, which the weights are multiplied by, the product is the same (Xiao et al.,
SmoothQuant, arXiv 2211.10438). The division is folded into the norm before it. Factors are powers of two, so
that folding rounds nothing.

Shapes: N outputs, K channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .linear import Array

ALPHA = 0.5
"""How much of a channel's size goes to the weights; 0.5 evens both out."""


def smoothing_factors(activations: Array, weights: Sequence[Array]) -> Array:
    """Factors of the channels.

    Args:
        activations: [K], the largest absolute value of each channel.
        weights: [N, K] each.

    Returns:
        [K], powers of two around 1; activations are to be divided by them, weights multiplied.
    """
    columns = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    tiny = np.float32(1e-5)
    wanted = np.log2(np.maximum(activations, tiny)) * ALPHA - np.log2(np.maximum(columns, tiny)) * (1 - ALPHA)
    return np.exp2(np.rint(wanted - wanted.mean())).astype(np.float32)
