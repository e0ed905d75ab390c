"""The decoder layer of a DFlash draft, eagerly.

Counterpart of ``speculators.models.dflash.model_definitions``. Parameters have the originals' names, so
that their state dicts load.
Shapes: B batch, C context rows, Q block rows, H hidden size, N heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..modules.layers import ACTIVATIONS, attention_scale, split_heads

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [B, C + Q, D], of the rows' positions."""


class RMSNorm(nn.Module):
    """RMS normalisation over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DFlashAttention(nn.Module):
    """The block's rows ask; the context's rows and the block's answer."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or hidden // self.heads
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, target_hidden: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        """hidden [B, Q, H], target_hidden [B, C, H], mask added to scores [B, 1, Q, C + Q] -> [B, Q, H]."""
        batch, rows, _ = hidden.shape

        def both(projection: nn.Linear) -> Tensor:  # [B, K, C + Q, D]
            joined = torch.cat([projection(target_hidden), projection(hidden)], dim=1)
            return split_heads(joined, batch, self.kv_heads, self.head_dim)

        q = self.q_norm(split_heads(self.q_proj(hidden), batch, self.heads, self.head_dim))
        q = _rotate(q, (rope[0][:, -rows:], rope[1][:, -rows:]))  # [B, N, Q, D]
        k = _rotate(self.k_norm(both(self.k_proj)), rope)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, both(self.v_proj)))
        scores = q @ k.transpose(2, 3) * attention_scale(self.head_dim)  # [B, N, Q, C + Q]
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, rows, -1))


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [B, heads, S, D], halves rotated; cos and sin [B, S, D]."""
    cos, sin = (table[:, None] for table in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DFlashDecoderLayer(nn.Module):
    """One layer of a DFlash draft. Counterpart of `Qwen3DFlashDecoderLayer`.

    `config` has the attributes of transformers' Qwen3Config: hidden_size, intermediate_size,
    num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, hidden_act and attention_bias.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        target_hidden: Tensor,
        position_embeddings: Rope,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over one block a request.

        Args:
            hidden_states: [B, Q, H], the block's rows.
            target_hidden: [B, C, H], the context's rows: the same for every layer.
            position_embeddings: of the context's rows and then the block's.
            attention_mask: added to the scores, [B, 1, Q, C + Q]; None: every row sees every row.

        Returns:
            [B, Q, H].
        """
        x = self.input_layernorm(hidden_states)
        x = hidden_states + self._attend(x, target_hidden, position_embeddings, attention_mask)
        return x + self._feed_forward(self.post_attention_layernorm(x))

    def _attend(self, x: Tensor, target_hidden: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        return self.self_attn(x, target_hidden, rope, mask)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)
