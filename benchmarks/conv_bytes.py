"""Count the bytes of a draft pass, and what a kernel wider than the convolution would save of them.

    python benchmarks/conv_bytes.py

Prints the table of docs/engines.md. Counted: weights and caches once, and every tensor between two kernels
once written and once read by each kernel that takes it. Element-wise steps belong to the kernel before them,
attention is one kernel. Matrices and caches have 2 bytes an element, rows between kernels 4, as in a bundle
of half precision. All of it is counted as memory traffic: what stays in a cache makes the saving smaller.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

MATRIX_BYTES, ROW_BYTES = 2, 4
BATCHES = (1, 32)


@dataclass(frozen=True)
class Draft:
    """Sizes of a draft. `context` is the number of cached rows that a layer reads."""

    name: str
    block: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    taps: int
    context: int
    kernel_size: int = 2
    group_size: int = 16

    @property
    def delta(self) -> int:
        """Elements of one half of the kernel projection, a row."""
        return self.kernel_size * self.hidden // self.group_size


DRAFTS = (
    Draft("block 16, hidden 4096", 16, 4096, 12288, 5, 32, 8, 128, 151936, 5, 2048),
    Draft("block 8, hidden 5120", 8, 5120, 17408, 5, 32, 8, 128, 248320, 5, 2048),
    Draft("the demo's: block 8, hidden 576", 8, 576, 1536, 2, 9, 3, 64, 49152, 5, 2048),
)


def weight_bytes(d: Draft) -> int:
    """Bytes of all matrices that a pass reads: layers, projection of the features, head."""
    query, keys = d.heads * d.head_dim, d.kv_heads * d.head_dim
    attention = d.hidden * (2 * query + 2 * keys)
    convolutions = 2 * (2 * d.delta + 2 * d.kernel_size) * d.hidden
    layer = attention + 3 * d.hidden * d.intermediate + convolutions
    return MATRIX_BYTES * (d.layers * layer + d.taps * d.hidden * d.hidden + d.vocabulary * d.hidden)


def row_elements(d: Draft) -> int:
    """Elements that one row of a block has written and read between kernels, all layers."""
    h, query, keys = d.hidden, d.heads * d.head_dim, d.kv_heads * d.head_dim
    pair = (
        (h + 2 * d.delta)  # projection: reads the normed row, writes both halves
        + (2 * h + d.delta)  # first convolution: reads row and delta, writes the row
        + (2 * h + d.delta)  # second one, behind the sublayer
        + 4 * h  # residual and norm: reads both, writes the sum and the normed row
    )
    attention = 3 * h + 2 * (query + 2 * keys) + 2 * query + h  # q, k, v; attention; output projection
    mlp = h + 2 * d.intermediate + h  # gate and up in one kernel; down
    return d.layers * (2 * pair + attention + mlp) + h + d.vocabulary  # and the logits


def pass_bytes(d: Draft, batch: int) -> int:
    """Bytes of one draft pass over a block of each of `batch` requests."""
    caches = d.layers * d.context * 2 * d.kv_heads * d.head_dim * MATRIX_BYTES
    return weight_bytes(d) + batch * (caches + d.block * row_elements(d) * ROW_BYTES)


def saved_by_projection(d: Draft, batch: int) -> int:
    """Projection and first convolution in one kernel: the row is read once, its own half stays inside."""
    return 2 * d.layers * batch * d.block * (d.hidden + 2 * d.delta) * ROW_BYTES


def saved_by_norm(d: Draft, batch: int) -> int:
    """Second convolution, residual and norm in one kernel: the convolved row stays inside."""
    return 2 * d.layers * batch * d.block * 2 * d.hidden * ROW_BYTES


def table() -> list[str]:
    """The lines of the table."""
    lines = [
        "| draft | requests | a pass | projection + conv saves | conv + residual + norm saves | both |",
        "|---|---|---|---|---|---|",
    ]
    for draft in DRAFTS:
        for batch in BATCHES:
            total = pass_bytes(draft, batch)
            first, second = saved_by_projection(draft, batch), saved_by_norm(draft, batch)
            cells = [
                draft.name,
                str(batch),
                f"{total / 1e6:.0f} MB",
                f"{first / 1e6:.1f} MB",
                f"{second / 1e6:.1f} MB",
                f"{100 * (first + second) / total:.1f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
