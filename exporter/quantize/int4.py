"""Products of four-bit weights, in blocks with a scale and a zero point each.

ONNX Runtime's MatMulNBits rounds the activations by itself: each row, in blocks of the same width, to int8.
With blocks of 32 its kernels sum a row in one order, however many rows there are, a lone one included; with
blocks of 64 they did not.

Shapes: N outputs, K channels, B blocks of `BLOCK` channels, the last one padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .int8 import DOMAIN, Place, replace_products
from .linear import Array, Group

BLOCK = 32
TOP = 15  # steps are 0 to 15
_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level
_SHRINK = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8)  # of a block's range: its ends may be worth less than its middle
_SHIFT = (-1, 0, 1)  # of its zero point


@dataclass(frozen=True)
class Blocks:
    """A rounded weight: ``(steps - zeros) * scales``.

    Attributes:
        steps: [N, B, BLOCK], 0 to `TOP`.
        scales: [N, B].
        zeros: [N, B], 0 to `TOP`.
    """

    steps: NDArray[np.uint8]
    scales: Array
    zeros: NDArray[np.uint8]

    def numbers(self, channels: int) -> Array:
        """The weight that they stand for, [N, K]."""
        whole = (self.steps.astype(np.float32) - self.zeros[..., None]) * self.scales[..., None]
        return whole.reshape(len(whole), -1)[:, :channels]


def rounded(weight: Array, power: Array | None = None) -> Blocks:
    """Round a weight [N, K] so that what it computes changes little.

    Of a few ranges and zero points each block takes the one with the least squared error, each channel
    weighted by its power, and the scale that fits the steps best.

    Args:
        weight: [N, K].
        power: [K], mean square of each channel of the activations; None weights all alike.
    """
    blocks = _in_blocks(weight)  # [N, B, BLOCK]
    weights = _in_blocks(np.ones((1, weight.shape[1]), np.float32) if power is None else power[None])
    weights = weights + np.float32(1e-8) * weights.mean() + np.float32(1e-30)
    low, high = np.minimum(blocks.min(-1), 0.0), np.maximum(blocks.max(-1), 0.0)
    span = (high - low) / TOP
    span[span == 0.0] = 1.0
    best = np.full(span.shape, np.inf, np.float32)
    scales, zeros = span.copy(), np.zeros(span.shape, np.float32)
    for factor in _SHRINK:
        step = span * np.float32(factor)
        middle = np.rint(-low / step) - np.rint(max(1.0 - factor, 0.0) * TOP / 2)
        for shift in _SHIFT:
            zero = np.clip(middle + shift, 0, TOP)
            steps = np.clip(np.rint(blocks / step[..., None]) + zero[..., None], 0, TOP) - zero[..., None]
            fitted = _fitted(blocks, steps, weights, step)
            error = (weights * (steps * fitted[..., None] - blocks) ** 2).sum(-1)
            better = error < best
            best = np.where(better, error, best)
            scales, zeros = np.where(better, fitted, scales), np.where(better, zero, zeros)
    steps = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, TOP)
    return Blocks(steps.astype(np.uint8), scales.astype(np.float32), zeros.astype(np.uint8))


def replace_group(
    graph: ir.Graph, group: Group, weights: Sequence[Array], power: Array | None, place: Place
) -> None:
    """Put a four-bit product in the place of a group's products.

    Args:
        graph: changed in place.
        group: found in it.
        weights: [N, K] each, what to round.
        power: see `rounded`.
        place: stores the rounded ones.
    """
    parts = [rounded(weight, power) for weight in weights]
    name = "+".join(group.names)
    steps = np.concatenate([part.steps for part in parts])
    node = ir.node(
        "MatMulNBits",
        [
            group.source,
            place(f"{name}.int4", _packed(steps)),
            place(f"{name}.scale", np.concatenate([part.scales for part in parts])),
            place(f"{name}.zero", _packed(np.concatenate([part.zeros for part in parts]))),
        ],
        {
            "K": weights[0].shape[1],
            "N": len(steps),
            "bits": 4,
            "block_size": BLOCK,
            "accuracy_level": _INT8_ACTIVATIONS,
        },
        domain=DOMAIN,
        name=f"{name}.MatMulNBits",
    )
    replace_products(graph, group, [node], node.outputs[0], [len(part.steps) for part in parts], place)


def _fitted(blocks: Array, steps: Array, weights: Array, step: Array) -> Array:
    """The scale of each block that makes the weighted squared error least."""
    weighted = weights * steps
    below, above = (weighted * steps).sum(-1), (weighted * blocks).sum(-1)
    usable = (below > 0) & (above > 0)
    return np.where(usable, above / np.where(usable, below, 1.0), step)


def _in_blocks(rows: Array) -> Array:
    """[N, K] -> [N, B, BLOCK]."""
    padding = -rows.shape[1] % BLOCK
    return np.pad(rows.astype(np.float32), ((0, 0), (0, padding))).reshape(len(rows), -1, BLOCK)


def _packed(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two neighbours on the last axis in a byte, the first one low."""
    even = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, numbers.shape[-1] % 2)])
    high = np.left_shift(even[..., 1::2], 4, dtype=np.uint8)
    return np.bitwise_or(even[..., 0::2], high, dtype=np.uint8)
