"""The CUDA kernel of ``dflash::GroupedDynamicConv``, written in Triton. Loads no torch.

One pass over memory: a program owns a tile of rows x groups x channels, reads the row itself and
the rows before it (which the cache holds), and writes each output once. Groups are an axis of the
tile, so a delta is loaded once per group and not once per channel. With ``TRITON_INTERPRET=1`` set
before the import, the kernel runs on CPU tensors.

Legend: L rows, H channels, K taps, G = H / group_size groups, N = L times the leading axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec

WARP = 32
FEW_ROWS_TILE, MANY_ROWS_TILE = 1, 4  # rows of a tile
_THREAD_OUTPUTS = 8
_TILE_CHANNELS = 256
_FEW_ROWS = 512


@triton.jit(do_not_specialize=["rows", "length", "block_size"])  # type: ignore[untyped-decorator]
def grouped_dynamic_conv_kernel(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    base,
    rows,
    length,
    block_size,
    groups,
    hidden_row_stride,
    delta_row_stride,
    delta_tap_stride,
    output,
    kernel_size: tl.constexpr,
    group_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_within: tl.constexpr,
):
    """Compute one tile of rows x groups x channels within a group.

    hidden [N, H] and delta [N, K, G] have stride 1 along their last axis; base [K, H] and
    output [N, H] are contiguous. Tensors read, numbers, the tensor written: the order in which
    TensorRT passes arguments.
    """
    tiles_in_group: tl.constexpr = (group_size + tile_within - 1) // tile_within
    tiles_in_row = tl.cdiv(groups, tile_groups) * tiles_in_group
    pid = tl.program_id(0)
    tile = pid % tiles_in_row  # neighbouring programs share rows, so they read whole rows together

    row = (pid // tiles_in_row) * tile_rows + tl.arange(0, tile_rows)  # [tile_rows]
    group = (tile // tiles_in_group) * tile_groups + tl.arange(0, tile_groups)  # [tile_groups]
    within = (tile % tiles_in_group) * tile_within + tl.arange(0, tile_within)  # [tile_within]
    channel = group[:, None] * group_size + within[None, :]  # [tile_groups, tile_within]

    row_exists = row < rows
    group_exists = group < groups
    channel_exists = group_exists[:, None] & (within < group_size)[None, :]
    position = (row % length) % block_size
    wide_row = row.to(tl.int64)  # row * H may pass 2**31

    hidden_size = groups * group_size
    # Read per row, like hidden, `base` lands in the registers that need it; read once, it would
    # pass through shared memory behind a barrier.
    every_row = tl.zeros([tile_rows, 1, 1], dtype=tl.int32)
    total = tl.zeros([tile_rows, tile_groups, tile_within], dtype=tl.float32)
    for tap in tl.static_range(kernel_size):
        # A row before the start of the block is never read, so its NaN cannot spread.
        inside = row_exists & (position >= tap)
        x = tl.load(
            hidden + ((wide_row - tap) * hidden_row_stride)[:, None, None] + channel[None, :, :],
            mask=inside[:, None, None] & channel_exists[None, :, :],
            other=0.0,
        )
        dynamic = tl.load(
            delta + (wide_row * delta_row_stride + tap * delta_tap_stride)[:, None] + group[None, :],
            mask=row_exists[:, None] & group_exists[None, :],
            other=0.0,
        )
        static = tl.load(
            base + tap * hidden_size + channel[None, :, :] + every_row,
            mask=row_exists[:, None, None] & channel_exists[None, :, :],
            other=0.0,
        )
        coefficient = static.to(tl.float32) + dynamic.to(tl.float32)[:, :, None]
        total += x.to(tl.float32) * coefficient

    tl.store(
        output + (wide_row * hidden_size)[:, None, None] + channel[None, :, :],
        total.to(output.dtype.element_ty),
        mask=row_exists[:, None, None] & channel_exists[None, :, :],
    )


@dataclass(frozen=True)
class Tile:
    """What one program computes: `rows` x `groups` x `within` outputs, all powers of two."""

    rows: int
    groups: int
    within: int
    warps: int = 4

    @classmethod
    def for_shape(cls, spec: ConvSpec, rows: int) -> Tile:
        """Choose a tile for `rows` rows of all leading axes together.

        Eight outputs a thread are one 16-byte access in half precision, and leave fewer deltas
        than threads, which the compiler then loads where they are used. The few rows of a decoding
        round get one-row tiles, so that more multiprocessors take part.
        """
        return cls.of_rows(spec, FEW_ROWS_TILE if rows <= _FEW_ROWS else MANY_ROWS_TILE)

    @classmethod
    def of_rows(cls, spec: ConvSpec, rows: int) -> Tile:
        """Choose a tile of `rows` rows, a power of two."""
        within = min(_power_of_two(spec.group_size), _TILE_CHANNELS)
        groups = min(_power_of_two(spec.groups), _TILE_CHANNELS // within)
        return cls(rows, groups, within, max(1, rows * groups * within // (_THREAD_OUTPUTS * WARP)))

    def programs_across(self, spec: ConvSpec) -> int:
        """Programs that one row of tiles takes."""
        return -(-spec.groups // self.groups) * -(-spec.group_size // self.within)

    def constants(self, spec: ConvSpec) -> dict[str, int]:
        """The compile-time arguments of the kernel."""
        return {
            "kernel_size": spec.kernel_size,
            "group_size": spec.group_size,
            "tile_rows": self.rows,
            "tile_groups": self.groups,
            "tile_within": self.within,
        }


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
