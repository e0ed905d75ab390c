"""Products of four-bit weights, in blocks with a scale each.

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
ZERO = 8
"""The step that stands for 0; steps are 0 to 15."""

_LOW, _HIGH = -ZERO, 15 - ZERO
_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level
_RANGES = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a block: its end may be worth less than its middle
_TURNED = (
    -1.14,
    -1.07,
    -1.0,
    -0.95,
    -0.9,
    -0.85,
)  # likewise, with the end on the highest step
_FITS = 2  # times that a scale is fitted to its steps


@dataclass(frozen=True)
class Blocks:
    """A rounded weight: ``(steps - ZERO) * scales``.

    Attributes:
        steps: [N, B, BLOCK], 0 to 15.
        scales: [N, B], of either sign.
    """

    steps: NDArray[np.uint8]
    scales: Array

    def numbers(self, channels: int) -> Array:
        """The weight that they stand for, [N, K]."""
        whole = (self.steps.astype(np.float32) - ZERO) * self.scales[..., None]
        return whole.reshape(len(whole), -1)[:, :channels]


def rounded(weight: Array, power: Array | None = None) -> Blocks:
    """Round a weight [N, K] so that what it computes changes little.

    Of a few ranges each block takes the one with the least squared error, each channel weighted by its power,
    and the scale that fits the steps best.

    Args:
        weight: [N, K].
        power: [K], mean square of each channel of the activations; None weights all alike.
    """
    blocks = _in_blocks(weight)  # [N, B, BLOCK]
    weights = _in_blocks(np.ones((1, weight.shape[1]), np.float32) if power is None else power[None])
    weights = weights + np.float32(1e-8) * weights.mean() + np.float32(1e-30)
    largest = np.abs(blocks).argmax(-1)[..., None]
    whole = np.take_along_axis(blocks, largest, -1)[..., 0] / np.float32(_LOW)
    whole[whole == 0.0] = 1.0
    best, scales = np.full(whole.shape, np.inf, np.float32), whole
    for factor in (*_RANGES, *_TURNED):
        scale = whole * np.float32(factor)
        for _ in range(_FITS):
            steps = _steps(blocks, scale)
            scale = _fitted(blocks, steps, weights, scale)
            error = (weights * (steps * scale[..., None] - blocks) ** 2).sum(-1)
            better = error < best
            best, scales = np.where(better, error, best), np.where(better, scale, scales)
    return Blocks((_steps(blocks, scales) + ZERO).astype(np.uint8), scales.astype(np.float32))


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


def _steps(blocks: Array, scales: Array) -> Array:
    return np.clip(np.rint(blocks / scales[..., None]), _LOW, _HIGH)


def _fitted(blocks: Array, steps: Array, weights: Array, scales: Array) -> Array:
    """The scale of each block that makes the weighted squared error least."""
    weighted = weights * steps
    below, above = (weighted * steps).sum(-1), (weighted * blocks).sum(-1)
    usable = (below > 0) & (above != 0)
    return np.where(usable, above / np.where(usable, below, 1.0), scales)


def _in_blocks(rows: Array) -> Array:
    """[N, K] -> [N, B, BLOCK]."""
    padding = -rows.shape[1] % BLOCK
    return np.pad(rows.astype(np.float32), ((0, 0), (0, padding))).reshape(len(rows), -1, BLOCK)


def _packed(steps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two neighbours on the last axis in a byte, the first one low."""
    high = np.left_shift(steps[..., 1::2], 4, dtype=np.uint8)
    return np.bitwise_or(steps[..., 0::2], high, dtype=np.uint8)
