"""Parts that target and draft share. Rows are flat, [B * S, H], so that every projection is one Gemm.

Shapes: B batch, S rows, N heads, D head size, H hidden size, I intermediate size.

Precision: the residual stream, the norms, RoPE and everything between a projection's output and the next
projection's input are float32; weights and caches have the export dtype. In a float32 export the casts
vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..rope import RopeSpec, rope_tables
from . import ops

# A float16 product may leave float16's range (65504) where float32 would not: outputs of down_proj and
# o_proj carry the outliers that language models are known for. Dividing the input by a power of two and
# multiplying the float32 output moves the range, and rounds nothing but subnormal numbers.
_RANGE_SHIFT = 32.0


class Linear(nn.Module):
    """x W^T + b in the export dtype; takes and gives float32.

    `guard_range` shifts a float16 product by `_RANGE_SHIFT`.
    """

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False, guard_range: bool = False
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=torch.float32), requires_grad=False) if bias else None
        )
        self.shift = _RANGE_SHIFT if guard_range and dtype is torch.float16 else None

    def forward(self, x: Tensor) -> Tensor:
        """[R, inputs] -> [R, outputs]."""
        if self.shift is not None:
            x = x * (1.0 / self.shift)
        y = F.linear(x.to(self.weight.dtype), self.weight).to(torch.float32)
        if self.shift is not None:
            y = y * self.shift
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """RMS normalisation with a float32 weight."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Any shape whose last axis is `size`."""
        return ops.rms_norm(x, self.weight, self.epsilon)


@dataclass(frozen=True)
class RopeSet:
    """The different RoPEs of a model and which one each layer uses.

    Made before tracing, since fake tensors hold no numbers: `constants` are the initialisers that the
    module's ``ropes.{i}.inv_freq`` parameters get.
    """

    inv_freqs: tuple[np.ndarray, ...]
    scalings: tuple[float, ...]
    of_layer: tuple[int | None, ...]

    @classmethod
    def from_specs(cls, specs: Sequence[RopeSpec | None]) -> RopeSet:
        """One spec a layer, None for a layer without; equal specs share a table."""
        different = list(dict.fromkeys(spec for spec in specs if spec is not None))
        tables = [rope_tables(spec) for spec in different]
        return cls(
            tuple(np.asarray(inv_freq, dtype=np.float32) for inv_freq, _ in tables),
            tuple(float(scaling) for _, scaling in tables),
            tuple(None if spec is None else different.index(spec) for spec in specs),
        )

    def modules(self) -> nn.ModuleList:
        """A `Rope` for each table."""
        return nn.ModuleList(
            Rope(f.size, scaling) for f, scaling in zip(self.inv_freqs, self.scalings, strict=True)
        )

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Parameter name -> values."""
        return {f"ropes.{i}.inv_freq": f for i, f in enumerate(self.inv_freqs)}


class Rope(nn.Module):
    """cos and sin tables computed from positions."""

    def __init__(self, frequencies: int, scaling: float):
        super().__init__()
        self.inv_freq = nn.Parameter(torch.empty(frequencies, dtype=torch.float32), requires_grad=False)
        self.scaling = scaling

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, S] -> cos, sin [B, S, D / 2] float32."""
        angle = positions[:, :, None].to(torch.float32) * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.scaling == 1.0 else (cos * self.scaling, sin * self.scaling)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, act: str, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, dtype, bias)
        self.up_proj = Linear(hidden, intermediate, dtype, bias)
        self.down_proj = Linear(intermediate, hidden, dtype, bias, guard_range=True)
        self.act = ACTIVATIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def split_heads(x: Tensor, batch: int, heads: int, head_dim: int) -> Tensor:
    """[B * S, N * D] -> [B, N, S, D]."""
    return x.reshape(batch, -1, heads, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, N, S, D] -> [B * S, N * D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])


def attention_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)
