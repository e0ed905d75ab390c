"""A dense decoder-only target in deployment form.

Computes what transformers' LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM compute.
Shapes: B batch, S rows, W wanted rows, H hidden size, C capacity, K slots looked at, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..targets.spec import TargetSpec
from . import ops
from .layers import MLP, Linear, RMSNorm, RopeSet, attention_scale, merge_heads, split_heads


class _Attention(nn.Module):
    def __init__(self, spec: TargetSpec, dtype: torch.dtype):
        super().__init__()
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.spec = spec
        self.q_proj = Linear(spec.hidden_size, heads, dtype, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, kv, dtype, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, kv, dtype, bias=spec.qkv_bias)
        self.o_proj = Linear(heads, spec.hidden_size, dtype, bias=spec.o_bias, guard_range=True)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        visible: Tensor,
        start: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, batch = self.spec, start.shape[0]
        q = self.q_norm(split_heads(self.q_proj(x), batch, spec.num_heads, spec.head_dim))
        k = self.k_norm(split_heads(self.k_proj(x), batch, spec.num_kv_heads, spec.head_dim))
        v = split_heads(self.v_proj(x), batch, spec.num_kv_heads, spec.head_dim)
        q = ops.rotary(q, *tables).to(keys.dtype)
        keys = ops.scatter_rows(keys, ops.rotary(k, *tables).to(keys.dtype), start)
        values = ops.scatter_rows(values, v.to(values.dtype), start)
        mixed = ops.attention(
            q,
            ops.first_slots(keys, slots),
            ops.first_slots(values, slots),
            visible,
            attention_scale(spec.head_dim),
        )
        return self.o_proj(merge_heads(mixed).to(torch.float32)), keys, values


class _Layer(nn.Module):
    def __init__(self, spec: TargetSpec, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = _Attention(spec, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.hidden_act, dtype)

    def forward(self, x: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        mixed, keys, values = self.self_attn(self.input_layernorm(x), *args)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class TargetModule(nn.Module):
    """The whole target; see `bundle.tensors.target_io` for its inputs and outputs."""

    def __init__(self, spec: TargetSpec, taps: tuple[int, ...], ropes: RopeSet, dtype: torch.dtype):
        super().__init__()
        self.taps = taps
        self.embed_tokens = nn.Embedding(spec.embedding_rows, spec.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(_Layer(spec, dtype) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = None if spec.tied else Linear(spec.hidden_size, spec.vocab_size, dtype)
        self.ropes = ropes.modules()

    def forward(
        self, input_ids: Tensor, start: Tensor, slots: Tensor, wanted_rows: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run one pass: greedy_ids [B, W], logits [B, W, V], features [B, S, taps * H], caches."""
        batch, rows = input_ids.shape
        positions = start[:, None] + torch.arange(rows)[None, :]  # [B, S]
        visible = (slots[None, None, :] <= positions[:, :, None])[:, None]  # [B, 1, S, K]
        tables = self.ropes[0](positions)
        x = F.embedding(input_ids.reshape(-1), self.embed_tokens.weight).to(torch.float32)  # [B * S, H]
        updated: list[Tensor] = []
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x, keys, values = layer(
                x, tables, visible, start, slots, caches[2 * index], caches[2 * index + 1]
            )
            updated += [keys, values]
            if index in self.taps:
                outputs[index] = x
        features = torch.cat([outputs[tap] for tap in self.taps], dim=-1).reshape(batch, rows, -1)
        flat_rows = (torch.arange(batch)[:, None] * rows + wanted_rows).reshape(-1)  # [B * W]
        hidden = self.norm(x.index_select(0, flat_rows))
        if self.lm_head is None:
            weight = self.embed_tokens.weight
            logits = F.linear(hidden.to(weight.dtype), weight).to(torch.float32)
        else:
            logits = self.lm_head(hidden)
        logits = logits.reshape(batch, wanted_rows.shape[1], -1)
        return (logits.argmax(-1), logits, features, *updated)
