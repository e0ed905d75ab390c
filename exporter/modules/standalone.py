"""Parts of the draft as graphs of their own, for parity and for reuse."""

from __future__ import annotations

from torch import Tensor, nn

from ...plugins.torch_op import grouped_dynamic_conv_op


class ConvAlone(nn.Module):
    """One ``dflash::GroupedDynamicConv``."""

    def __init__(self, block_size: int, group_size: int):
        super().__init__()
        self.block_size, self.group_size = block_size, group_size

    def forward(self, hidden: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        """hidden [B, S, H], delta [B, S, K, G], base [K, H] -> [B, S, H]."""
        out: Tensor = grouped_dynamic_conv_op(hidden, delta, base, self.block_size, self.group_size)
        return out
