"""A DFlash or DFlash2 draft in deployment form: one call per round, context and block together.

Counterpart of z-lab's `dflash.model.DFlashDraftModel` / `DFlash2DraftModel` and of speculators'
`DFlashDraftModel` / `DFlash2DraftModel`.
Shapes: B batch, T new context rows, Q block rows, P proposal rows, K slots looked at, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...bundle import tensors as t
from ...plugins.torch_op import grouped_dynamic_conv_op
from ..drafts.spec import ConvSpec, DraftSpec, LayerSpec, WindowOrigin
from . import ops
from .layer_calls import InputInfo, LayerCall, Layered, LayerFunction
from .layers import MLP, Linear, RMSNorm, RopeSet, attention_scale, merge_heads, split_heads
from .selector import Selector
from .softcap import softcap

_LAYER = "DraftLayer"
_SEEN = "seen"  # axis of what a row may see: slots looked at and block rows


class Conv(nn.Module):
    """The pair of convolutions around one sublayer; both kernels come from the pre-conv input."""

    def __init__(self, spec: ConvSpec, hidden_size: int, block_size: int, dtype: torch.dtype):
        super().__init__()
        self.spec, self.block_size = spec, block_size
        self.groups = hidden_size // spec.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, spec.kernel_size, hidden_size), requires_grad=False)
        self.kernel_projection = Linear(hidden_size, 2 * spec.kernel_size * self.groups, dtype)

    def _convolve(self, hidden: Tensor, delta: Tensor, which: int) -> Tensor:
        blocks = hidden.reshape(-1, self.block_size, hidden.shape[-1])
        out = grouped_dynamic_conv_op(
            blocks, delta, self.base_kernel[which], self.block_size, self.spec.group_size
        )
        return out.reshape(hidden.shape)

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B * Q, H] -> the convolved rows, and the output kernel's delta [B, Q, kernel, groups]."""
        deltas = self.kernel_projection(hidden)
        deltas = deltas.reshape(-1, self.block_size, 2, self.spec.kernel_size, self.groups)
        return self._convolve(hidden, deltas[:, :, 0], 0), deltas[:, :, 1]

    def finish(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """[B * Q, H] -> [B * Q, H]."""
        return self._convolve(hidden, delta, 1)


class _Attention(nn.Module):
    def __init__(self, spec: DraftSpec, dtype: torch.dtype):
        super().__init__()
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.attention_bias
        self.spec = spec
        self.q_proj = Linear(spec.hidden_size, heads, dtype, bias)
        self.k_proj = Linear(spec.hidden_size, kv, dtype, bias)
        self.v_proj = Linear(spec.hidden_size, kv, dtype, bias)
        self.o_proj = Linear(heads, spec.hidden_size, dtype, bias, guard_range=True)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def _key(self, rows: Tensor, batch: int, tables: tuple[Tensor, ...]) -> Tensor:
        spec = self.spec
        return ops.rotary(
            self.k_norm(split_heads(self.k_proj(rows), batch, spec.num_kv_heads, spec.head_dim)), *tables
        )

    def _value(self, rows: Tensor, batch: int) -> Tensor:
        return split_heads(self.v_proj(rows), batch, self.spec.num_kv_heads, self.spec.head_dim)

    def forward(
        self,
        block: Tensor,
        keys: Tensor,
        values: Tensor,
        context: Tensor,
        start: Tensor,
        slots: Tensor,
        visible: Tensor,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        block_tables, context_tables = tables[:2], tables[2:]
        spec, batch, dtype = self.spec, start.shape[0], keys.dtype
        q = self.q_norm(split_heads(self.q_proj(block), batch, spec.num_heads, spec.head_dim))
        q = ops.rotary(q, *block_tables).to(dtype)
        keys = ops.scatter_rows(keys, self._key(context, batch, context_tables).to(dtype), start)
        values = ops.scatter_rows(values, self._value(context, batch).to(dtype), start)
        block_keys = self._key(block, batch, block_tables).to(dtype)
        k = torch.cat([ops.first_slots(keys, slots), block_keys], dim=2)  # [B, N_kv, K + Q, D]
        v = torch.cat([ops.first_slots(values, slots), self._value(block, batch).to(dtype)], dim=2)
        mixed = ops.attention(q, k, v, visible, attention_scale(spec.head_dim))
        return self.o_proj(merge_heads(mixed).to(torch.float32)), keys, values


class _Layer(nn.Module):
    def __init__(self, spec: DraftSpec, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = _Attention(spec, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.hidden_act, dtype)
        self.attention_conv: Conv | None = None
        self.mlp_conv: Conv | None = None
        if spec.conv is not None:
            self.attention_conv = Conv(spec.conv, spec.hidden_size, spec.block_size, dtype)
            self.mlp_conv = Conv(spec.conv, spec.hidden_size, spec.block_size, dtype)

    def forward(self, x: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        h = self.input_layernorm(x)
        if self.attention_conv is not None:
            h, delta = self.attention_conv.prepare(h)
        h, keys, values = self.self_attn(h, *args)
        if self.attention_conv is not None:
            h = self.attention_conv.finish(h, delta)
        x = x + h
        h = self.post_attention_layernorm(x)
        if self.mlp_conv is not None:
            h, delta = self.mlp_conv.prepare(h)
        h = self.mlp(h)
        if self.mlp_conv is not None:
            h = self.mlp_conv.finish(h, delta)
        return x + h, keys, values


class _TargetParts(nn.Module):
    """What a draft borrows from its target; the names are keys of the target's stored weights."""

    def __init__(self, spec: DraftSpec, embedding_rows: int, tied: bool, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = nn.Embedding(embedding_rows, spec.hidden_size, dtype=dtype).requires_grad_(False)
        borrows_head = spec.draft_vocab_size is None and not tied
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, dtype) if borrows_head else None


def _layer_function(spec: DraftSpec, dtype: torch.dtype) -> LayerFunction:
    """All layers are of one kind: windows and RoPEs come in as masks and tables."""
    hidden, half, block = spec.hidden_size, spec.head_dim // 2, spec.block_size
    cache = InputInfo(dtype, (t.BATCH, spec.num_kv_heads, t.CAPACITY, spec.head_dim))
    block_table = InputInfo(torch.float32, (t.BATCH, block, half))
    context_table = InputInfo(torch.float32, (t.BATCH, t.CONTEXT_ROWS, half))
    inputs = (
        InputInfo(torch.float32, (t.BATCH, block, hidden), flat=True),  # x
        cache,
        cache,
        InputInfo(torch.float32, (t.BATCH, t.CONTEXT_ROWS, hidden), flat=True),  # context
        InputInfo(torch.int64, (t.BATCH,)),  # start
        InputInfo(torch.int64, (t.KV,)),  # slots
        InputInfo(torch.bool, (t.BATCH, 1, block, _SEEN)),  # visible
        *(block_table, block_table, context_table, context_table),
    )
    return LayerFunction(partial(_Layer, spec, dtype), inputs)


class DraftModule(Layered):
    """The whole draft; see `bundle.tensors.draft_io` for its inputs and outputs.

    The embedding and, unless the draft has its own, the head are the target's: parameters under
    ``target.``, which share the target graph's stored weights.
    """

    def __init__(self, spec: DraftSpec, embedding_rows: int, tied: bool, ropes: RopeSet, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        hidden = spec.hidden_size
        self.target = _TargetParts(spec, embedding_rows, tied, dtype)
        self.lm_head: Linear | None = None
        if spec.draft_vocab_size is not None:
            self.lm_head = Linear(hidden, spec.draft_vocab_size, dtype)
            self.d2t = nn.Parameter(
                torch.empty(spec.draft_vocab_size, dtype=torch.int64), requires_grad=False
            )
        if spec.learned_mask:
            self.mask_embedding = nn.Parameter(torch.empty(hidden), requires_grad=False)
        # fc sees raw target features, whose outliers leave float16's range: it stays float32.
        self.fc = Linear(len(spec.taps) * spec.target_hidden_size, hidden, torch.float32)
        self.hidden_norm = RMSNorm(hidden, spec.rms_norm_eps)
        self.functions = {_LAYER: _layer_function(spec, dtype)}
        self.layers = nn.ModuleList(_Layer(spec, dtype) for _ in spec.layers)
        self.norm = RMSNorm(hidden, spec.rms_norm_eps)
        self.candidate_selector = (
            None if spec.selector is None else Selector(spec.selector, spec.vocab_size, hidden)
        )
        self.ropes = ropes.modules()
        self.rope_of_layer = [rope for rope in ropes.of_layer if rope is not None]  # every layer has one

    def forward(
        self,
        features: Tensor,
        start: Tensor,
        anchor: Tensor,
        block_ids: Tensor,
        block_rows: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run one round; the outputs of `draft_io` but for the caches, then the stages of `stage_names`."""
        spec = self.spec
        batch, new_rows, _ = features.shape
        context = self.hidden_norm(self.fc(features.reshape(batch * new_rows, -1)))  # [B * T, H]
        context_positions = start[:, None] + torch.arange(new_rows)[None, :]  # [B, T]
        block_positions = anchor[:, None] + torch.arange(spec.block_size)[None, :]  # [B, Q]
        tables = [(*rope(block_positions), *rope(context_positions)) for rope in self.ropes]
        masks = {
            layer: _visible(layer, spec.block_size, anchor, block_rows, slots)
            for layer in dict.fromkeys(spec.layers)
        }
        x = self._embed(block_ids)  # [B * Q, H]
        calls = []
        for layer, rope in zip(spec.layers, self.rope_of_layer, strict=True):
            calls.append(LayerCall(_LAYER, (context, start, slots, masks[layer], *tables[rope])))
        outputs = self.run_layers(x, calls, range(len(calls)))
        stages = [context, *outputs.values()]
        first = spec.first_proposal_row
        rows = stages[-1].reshape(batch, spec.block_size, -1)[:, first:]  # [B, P, H]
        hidden = self.norm(rows.reshape(batch * spec.proposals, -1))  # [B * P, H]
        logits = self._logits(hidden).reshape(batch, spec.proposals, -1)
        sums = logits.sum(-1)
        if self.candidate_selector is None:
            ids = logits.argmax(-1)
            if spec.draft_vocab_size is not None:
                ids = ids + F.embedding(ids, self.d2t[:, None])[..., 0]
            return (ids, sums, logits, *stages, hidden)
        hidden = hidden.reshape(batch, spec.proposals, -1)
        path, candidates, scores = self.candidate_selector(hidden, logits, block_ids[:, 0])
        return (path, sums, candidates, scores, *stages, hidden, logits)

    def stage_names(self) -> tuple[str, ...]:
        """Names of the intermediate values behind the outputs, in order."""
        layers = tuple(f"layer.{i}" for i in range(len(self.layers)))
        logits = () if self.candidate_selector is None else ("logits",)
        return ("context", *layers, "hidden", *logits)

    def _embed(self, block_ids: Tensor) -> Tensor:
        spec = self.spec
        ids = block_ids.reshape(-1)
        x = F.embedding(ids, self.target.embed_tokens.weight).to(torch.float32)
        if spec.learned_mask:
            x = torch.where((ids == spec.mask_token_id)[:, None], self.mask_embedding, x)
        return x if spec.input_embedding_scale == 1.0 else x * spec.input_embedding_scale

    def _logits(self, hidden: Tensor) -> Tensor:
        spec = self.spec
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        elif self.target.lm_head is not None:
            logits = self.target.lm_head(hidden)
        else:
            weight = self.target.embed_tokens.weight
            logits = F.linear(hidden.to(weight.dtype), weight).to(torch.float32)
        if spec.output_multiplier != 1.0:
            logits = logits * spec.output_multiplier
        return softcap(logits, spec.logit_softcap)


def _visible(layer: LayerSpec, block_size: int, anchor: Tensor, block_rows: Tensor, slots: Tensor) -> Tensor:
    """Which keys (context slots, then block rows) each block row sees: bool [B, 1, Q, K + Q].

    A row always sees itself, so that no row is empty: a padding row's result is finite and unused.
    """
    row = torch.arange(block_size)
    context = slots[None, None, :] < anchor[:, None, None]  # [B, 1, K]
    context = context.expand(-1, block_size, -1)
    block = row[None, None, :] < block_rows[:, None, None]  # [B, 1, Q]
    block = block.expand(-1, block_size, -1)
    offset = row[:, None] - row[None, :]  # [Q, Q], query minus key
    if layer.causal:
        block = block & (offset >= 0)[None]
    if layer.window is not None:
        if layer.window_origin is WindowOrigin.QUERY:
            distance = (anchor[:, None] + row[None, :])[:, :, None] - slots[None, None, :]
            context = context & (distance < layer.window)
            block = block & (offset.abs() < layer.window)[None]
        else:
            distance = anchor[:, None, None] - slots[None, None, :]  # [B, 1, K]
            context = context & (distance <= layer.window)
    block = block | (offset == 0)[None]
    return torch.cat([context, block], dim=2)[:, None]
