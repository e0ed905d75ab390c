"""The greedy choice, and a sign where there is none."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy_ids(logits: Tensor) -> Tensor:
    """The best token of each row, the lowest id on a tie; -1 where a logit is not finite.

    An argmax over NaN is some token like any other, and the logits themselves stay where they are computed.

    Args:
        logits: [..., V] float32.

    Returns:
        [...] int64.
    """
    total = logits.sum(-1)
    spoilt = torch.isnan(total) | torch.isinf(total)
    best = logits.argmax(-1)
    return torch.where(spoilt, torch.full_like(best, -1), best)
