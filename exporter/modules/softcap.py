"""Soft caps: values squeezed into -cap..cap, on logits and on attention scores.

Shapes: B batch, S rows, N heads, N_kv key and value heads, G query heads a key head, K slots, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Compute cap * tanh(x / cap); a cap of None changes nothing."""
    return x if cap is None else torch.tanh(x / cap) * cap


def capped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float) -> Tensor:
    """Attention with capped scores, in plain products; see `ops.attention` for the arguments.

    The ONNX operator has an attribute for this, which cannot be used: ONNX Runtime before 1.32 caps the
    mask together with the scores, so that hidden slots are seen again, and TensorRT refuses it. The scale
    goes into the queries, in float32, so that scores keep float16's range; cap and softmax are float32.
    """
    batch, heads, rows, size = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    q = (q.to(torch.float32) * scale).to(k.dtype).reshape(batch, kv_heads, -1, size)  # [B, N_kv, G * S, D]
    scores = (q @ k.transpose(2, 3)).to(torch.float32)  # [B, N_kv, G * S, K]
    scores = softcap(scores, cap).reshape(batch, kv_heads, groups, rows, -1)
    # Every row sees a slot, so the hidden ones' share is exactly 0.
    scores = torch.where(visible[:, :, None], scores, torch.finfo(torch.float32).min)
    share = scores.softmax(-1).to(v.dtype).reshape(batch, kv_heads, groups * rows, -1)
    return (share @ v).reshape(batch, heads, -1, size)
