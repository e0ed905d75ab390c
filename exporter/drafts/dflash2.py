"""DFlash2's own options, which both formats name alike."""

from __future__ import annotations

from collections.abc import Mapping

from .fields import Fields
from .spec import ConvSpec, SelectorSpec

KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def dflash2_from_fields(
    fields: Fields, hidden_size: int, block_size: int, vocab_size: int, defaults: Mapping[str, int]
) -> tuple[ConvSpec, SelectorSpec]:
    """Read the convolutions and the candidate selector.

    The bounds are those of speculators' `dflash2.model_definitions` and `dflash2.core`, which raises beyond
    them; z-lab's code fails there too, only later.

    Args:
        fields: where the keys stand.
        hidden_size: must be a multiple of the group size.
        block_size: rows of a block, at least the kernel size.
        vocab_size: at least the selector's top-k.
        defaults: key -> value the format's config class fills in; a key without one is needed.

    Raises:
        CheckpointError: a key is missing or out of its bounds.
    """
    kernel, group, rank, top_k = (
        fields.whole(key, defaults[key]) if key in defaults else fields.whole(key) for key in KEYS
    )
    if kernel > block_size:
        raise fields.error("conv_kernel_size", kernel, f"<= block_size {block_size}")
    if hidden_size % group:
        raise fields.error("conv_group_size", group, f"a divisor of hidden_size {hidden_size}")
    if top_k > vocab_size:
        raise fields.error("selector_top_k", top_k, f"<= vocab_size {vocab_size}")
    return ConvSpec(kernel, group), SelectorSpec(rank, top_k)
