"""A dense decoder-only target in deployment form.

Computes what transformers' causal language models of the families in `targets.families` compute.
Shapes: B batch, S rows, W wanted rows, H hidden size, C capacity, K slots looked at, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...bundle import tensors as t
from ..targets.spec import NormPlace, TargetSpec
from . import ops
from .greedy import greedy_ids
from .layer_calls import InputInfo, LayerCall, Layered, LayerFunction
from .layers import MLP, Linear, RMSNorm, RopeSet, merge_heads, split_heads
from .softcap import capped_attention, softcap


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
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        slots: Tensor,
        visible: Tensor,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, batch = self.spec, start.shape[0]
        q = self.q_norm(split_heads(self.q_proj(x), batch, spec.num_heads, spec.head_dim))
        k = self.k_norm(split_heads(self.k_proj(x), batch, spec.num_kv_heads, spec.head_dim))
        v = split_heads(self.v_proj(x), batch, spec.num_kv_heads, spec.head_dim)
        if tables:
            q, k = ops.rotary(q, *tables), ops.rotary(k, *tables)
        q = q.to(keys.dtype)
        keys = ops.scatter_rows(keys, k.to(keys.dtype), start)
        values = ops.scatter_rows(values, v.to(values.dtype), start)
        seen_keys, seen_values = ops.first_slots(keys, slots), ops.first_slots(values, slots)
        if spec.attention_softcap is None:
            mixed = ops.attention(q, seen_keys, seen_values, visible, spec.attention_scale)
        else:
            mixed = capped_attention(
                q, seen_keys, seen_values, visible, spec.attention_scale, spec.attention_softcap
            )
        return self.o_proj(merge_heads(mixed).to(torch.float32)), keys, values


class _Layer(nn.Module):
    """Norms before attention and MLP."""

    def __init__(self, spec: TargetSpec, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = _Attention(spec, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.hidden_act, dtype, spec.mlp_bias)

    def forward(self, x: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        mixed, keys, values = self.self_attn(self.input_layernorm(x), *args)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class _SandwichLayer(_Layer):
    """Norms before and behind attention and MLP."""

    def __init__(self, spec: TargetSpec, dtype: torch.dtype):
        super().__init__(spec, dtype)
        self.pre_feedforward_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        mixed, keys, values = self.self_attn(self.input_layernorm(x), *args)
        x = x + self.post_attention_layernorm(mixed)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), keys, values


_ROPE, _NO_ROPE = "Layer", "LayerWithoutRope"
_LAYERS = {NormPlace.BEFORE: _Layer, NormPlace.AROUND: _SandwichLayer}


def _layer_functions(spec: TargetSpec, dtype: torch.dtype) -> dict[str, LayerFunction]:
    """Windows and RoPEs come in as masks and tables, so that layers differ in whether they have a RoPE."""
    cache = InputInfo(dtype, (t.BATCH, spec.num_kv_heads, t.CAPACITY, spec.head_dim))
    table = InputInfo(torch.float32, (t.BATCH, t.ROWS, spec.head_dim // 2))
    inputs = (
        InputInfo(torch.float32, (t.BATCH, t.ROWS, spec.hidden_size), flat=True),  # x
        cache,
        cache,
        InputInfo(torch.int64, (t.BATCH,)),  # start
        InputInfo(torch.int64, (t.KV,)),  # slots
        InputInfo(torch.bool, (t.BATCH, 1, t.ROWS, t.KV)),  # visible
    )
    make = partial(_LAYERS[spec.norm_place], spec, dtype)
    return {
        _ROPE: LayerFunction(make, (*inputs, table, table)),
        _NO_ROPE: LayerFunction(make, inputs),
    }


class TargetModule(Layered):
    """The whole target; see `bundle.tensors.target_io` for its inputs and outputs."""

    def __init__(self, spec: TargetSpec, taps: tuple[int, ...], ropes: RopeSet, dtype: torch.dtype):
        super().__init__()
        self.spec, self.taps = spec, taps
        self.embed_tokens = nn.Embedding(spec.embedding_rows, spec.hidden_size, dtype=dtype)
        self.functions = _layer_functions(spec, dtype)
        self.layers = nn.ModuleList(_LAYERS[spec.norm_place](spec, dtype) for _ in spec.layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = None if spec.tied else Linear(spec.hidden_size, spec.vocab_size, dtype)
        self.ropes = ropes.modules()
        self.rope_of_layer = ropes.of_layer

    def forward(
        self, input_ids: Tensor, start: Tensor, slots: Tensor, wanted_rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one pass: greedy_ids [B, W], logits [B, W, V], features [B, S, taps * H]."""
        batch, rows = input_ids.shape
        positions = start[:, None] + torch.arange(rows)[None, :]  # [B, S]
        windows = dict.fromkeys(layer.window for layer in self.spec.layers)
        masks = {window: _visible(window, positions, slots) for window in windows}
        tables = [rope(positions) for rope in self.ropes]
        x = F.embedding(input_ids.reshape(-1), self.embed_tokens.weight).to(torch.float32)  # [B * S, H]
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        calls = []
        for layer, rope in zip(self.spec.layers, self.rope_of_layer, strict=True):
            table = () if rope is None else tables[rope]
            shared = (start, slots, masks[layer.window], *table)
            calls.append(LayerCall(_NO_ROPE if rope is None else _ROPE, shared))
        last = len(calls) - 1
        outputs = self.run_layers(x, calls, {*self.taps, last})
        features = torch.cat([outputs[tap] for tap in self.taps], dim=-1).reshape(batch, rows, -1)
        flat_rows = (torch.arange(batch)[:, None] * rows + wanted_rows).reshape(-1)  # [B * W]
        logits = self._logits(self.norm(outputs[last].index_select(0, flat_rows)))
        logits = logits.reshape(batch, wanted_rows.shape[1], -1)
        return greedy_ids(logits), logits, features

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B * W, H] -> [B * W, V]."""
        if self.lm_head is None:
            weight = self.embed_tokens.weight
            logits = F.linear(hidden.to(weight.dtype), weight).to(torch.float32)
        else:
            logits = self.lm_head(hidden)
        return softcap(logits, self.spec.logit_softcap)


def _visible(window: int | None, positions: Tensor, slots: Tensor) -> Tensor:
    """Which slots each row sees: bool [B, 1, S, K]."""
    distance = positions[:, :, None] - slots[None, None, :]  # [B, S, K]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return visible[:, None]
