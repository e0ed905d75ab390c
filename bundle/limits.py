"""The largest sizes that the loop asks an engine for: written by whoever plans, kept by whoever decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manifest import Manifest

KV_BUCKET = 64
"""Lengths looked at are multiples of this: a pass costs more the more it looks at, and an engine likes to
see few different shapes."""

PREFILL_ROWS = 512
"""Longest prefill pass in rows. Attention scores take rows x slots, so a longer prompt goes in parts."""

EXACT_ROWS = 2
"""Engines compute a lone row with another kernel, which sums in another order than the one for several
rows. Exact decoding pads a lone row to two: then a row's result does not depend on its company."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ShapeLimits:
    """The largest sizes the loop asks an engine for; an engine plan has to cover them.

    Attributes:
        max_length: longest sequence in tokens, prompt and output.
        capacity: most slots a cache may have.
        rows: most rows in one pass of the target, and context rows in one pass of the draft.
        logit_rows: most rows whose logits are asked for.
        batch: most requests in one pass.
    """

    max_length: int
    capacity: int
    rows: int
    logit_rows: int
    batch: int = 1

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest,
        max_length: int | None = None,
        prefill_rows: int = PREFILL_ROWS,
        batch: int = 1,
    ) -> ShapeLimits:
        """Limits of a bundle, or tighter ones for a shorter `max_length` or shorter parts of a prompt."""
        length = manifest.max_length if max_length is None else max_length
        verify = max(manifest.draft.proposals + 1, EXACT_ROWS)
        capacity = length + manifest.slack_slots
        return cls(length, capacity, min(capacity, max(prefill_rows, verify)), verify, batch)

    def capacity_for(self, tokens: int) -> int:
        """Slots to allocate for a request of `tokens` tokens, prompt and output: these and the slack."""
        if not 0 < tokens <= self.max_length:
            raise ValueError(f"request of {tokens} tokens, expected 1..{self.max_length}")
        slack = self.capacity - self.max_length
        return min(round_up(tokens + slack, KV_BUCKET), self.capacity)
