"""Standard ONNX operators that torch has no equal for, as torch functions that trace to one node each.

They compute nothing in eager mode (torch.onnx.ops.symbolic returns empty tensors of the given shape): the
modules built from them exist to be traced. What they compute is defined by the ONNX operator
specification, and checked against the PyTorch originals by running the graphs.

Shapes: B batch, S rows, N heads, K slots looked at, C capacity, D head size, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

OPSET = 24  # the first opset with TensorScatter, the in-place cache update
IR_VERSION = 11  # the lowest that may carry opset 24's siblings; every runtime that has opset 24 reads it


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNormalization over the last axis; x and weight float32, so that large rows keep their range."""
    return symbolic(
        "RMSNormalization",
        (x, weight),
        attrs={"axis": -1, "epsilon": epsilon},
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RotaryEmbedding, halves rotated (not interleaved).

    Args:
        x: [B, N, S, D].
        cos: [B, S, D / 2].
        sin: [B, S, D / 2].
    """
    return symbolic(
        "RotaryEmbedding",
        (x, cos, sin),
        attrs={"interleaved": 0},
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )


def scatter_rows(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """TensorScatter: write rows [B, N, S, D] into cache [B, N, C, D] at slots start[b] + 0..S-1."""
    return symbolic(
        "TensorScatter",
        (cache, rows, start),
        attrs={"axis": 2, "mode": "linear"},
        dtype=cache.dtype,
        shape=cache.shape,
        version=24,
    )


def first_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Slice: the first K slots of cache [B, N, C, D], K being the length of `slots`."""
    length = symbolic("Shape", (slots,), dtype=torch.int64, shape=(1,), version=24)
    zero = torch.zeros(1, dtype=torch.int64)
    axis = torch.full((1,), 2, dtype=torch.int64)
    return symbolic(
        "Slice",
        (cache, zero, length, axis),
        dtype=cache.dtype,
        shape=(cache.shape[0], cache.shape[1], slots.shape[0], cache.shape[3]),
        version=13,
    )


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention with a boolean mask and grouped heads.

    The attribute softmax_precision is left to the engine: TensorRT-RTX refuses it, and its fused kernels
    sum in float32 anyway.

    Args:
        q: [B, N, S, D].
        k: [B, N_kv, K, D].
        v: [B, N_kv, K, D].
        visible: bool [B, 1, S, K]; every row must see at least one slot.
        scale: the factor on q k^T.

    Returns:
        [B, N, S, D].
    """
    return symbolic(
        "Attention",
        (q, k, v, visible),
        attrs={"scale": scale},
        dtype=q.dtype,
        shape=q.shape,
        version=24,
    )
