"""The CUDA kernel of ``dflash::GroupedDynamicConv``, written in Triton.

One pass over memory: a program owns a tile of rows x groups x channels, reads the row itself and
the rows before it (which the cache holds), and writes each output once. Groups are an axis of the
tile, so a delta is loaded once per group and not once per channel. With ``TRITON_INTERPRET=1`` set
before the import, the kernel runs on CPU tensors.

Legend: L rows, H channels, K taps, G = H / group_size groups, N = L times the leading axes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_deploy.bundle.errors import EngineBuildError, OpError, field_error
from dflash_deploy.plugins.grouped_dynamic_conv import (
    ConvSpec,
    check_dtypes,
    check_rank,
)

CAPABILITIES = (80, 89, 90, 100, 120)
_POINTER_TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
_ALIGNED_BYTES = 16
_WARP = 32
_TILE_CHANNELS = 256
_TILE_ROWS = 4
_FEW_ROWS = 512


@triton.jit(do_not_specialize=["rows", "length", "block_size"])  # type: ignore[untyped-decorator]
def grouped_dynamic_conv_kernel(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    base,
    output,
    rows,
    length,
    block_size,
    groups,
    hidden_row_stride,
    delta_row_stride,
    delta_tap_stride,
    kernel_size: tl.constexpr,
    group_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_within: tl.constexpr,
):
    """Compute one tile of rows x groups x channels within a group.

    hidden [N, H] and delta [N, K, G] have stride 1 along their last axis; base [K, H] and
    output [N, H] are contiguous. Launched by `grouped_dynamic_conv_triton`.
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
        within = min(_power_of_two(spec.group_size), _TILE_CHANNELS)
        groups = min(_power_of_two(spec.groups), _TILE_CHANNELS // within)
        tile_rows = 1 if rows <= _FEW_ROWS else _TILE_ROWS
        warps = max(1, tile_rows * groups * within // (8 * _WARP))
        return cls(rows=tile_rows, groups=groups, within=within, warps=warps)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def grouped_dynamic_conv_triton(
    hidden: Tensor,
    delta: Tensor,
    base: Tensor,
    *,
    block_size: int,
    group_size: int,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Run the kernel on the device of the inputs.

    Shapes: hidden [..., L, H], delta [..., L, K, G], base [K, H] -> [..., L, H], all of one dtype
    out of float32, float16 and bfloat16. Inputs may be strided views; rows of a view whose leading
    axes do not collapse are copied first. Computes what
    `dflash_deploy.plugins.grouped_dynamic_conv` defines.

    Args:
        hidden: rows to convolve.
        delta: what each row adds to the kernel of each group.
        base: the learned kernel.
        block_size: rows per block.
        group_size: channels per group.
        out: contiguous result tensor like hidden; allocated when absent.
        tile: work of one program; chosen from the shapes when absent.

    Raises:
        OpError: shapes, dtypes or attributes do not fit together.
    """
    check_rank(hidden.dim())
    check_dtypes(*(str(x.dtype).removeprefix("torch.") for x in (hidden, delta, base)))
    spec = ConvSpec.from_shapes(
        hidden.shape, delta.shape, base.shape, block_size=block_size, group_size=group_size
    )
    if out is None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    elif out.shape != hidden.shape or out.dtype != hidden.dtype or not out.is_contiguous():
        raise field_error(
            OpError,
            "out",
            f"{out.dtype} {tuple(out.shape)} with strides {out.stride()}",
            f"contiguous {hidden.dtype} {tuple(hidden.shape)}",
            "allocate it with torch.empty",
        )
    length = hidden.shape[-2]
    rows = hidden.numel() // spec.hidden_size
    if rows == 0:
        return out
    flat_hidden = _last_axis_dense(hidden.reshape(rows, spec.hidden_size))
    flat_delta = _last_axis_dense(delta.reshape(rows, spec.kernel_size, spec.groups))
    tile = tile or Tile.for_shape(spec, rows)
    tiles_in_row = _ceil(spec.groups, tile.groups) * _ceil(group_size, tile.within)
    grouped_dynamic_conv_kernel[(_ceil(rows, tile.rows) * tiles_in_row,)](
        flat_hidden,
        flat_delta,
        base.contiguous(),
        out,
        rows,
        length,
        block_size,
        spec.groups,
        flat_hidden.stride(0),
        flat_delta.stride(0),
        flat_delta.stride(1),
        kernel_size=spec.kernel_size,
        group_size=group_size,
        tile_rows=tile.rows,
        tile_groups=tile.groups,
        tile_within=tile.within,
        num_warps=tile.warps,
        enable_fp_fusion=False,  # rounds like the definition; memory is the limit, not arithmetic
    )
    return out


def _last_axis_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


@dataclass(frozen=True)
class CompiledKernel:
    """The kernel as machine text for one GPU generation, with what the assembler says of it."""

    capability: int
    name: str
    ptx: str
    shared_bytes: int
    registers: int
    spill_bytes: int


def compile_ptx(
    capability: int,
    dtype: str = "float16",
    *,
    spec: ConvSpec,
    tile: Tile | None = None,
) -> CompiledKernel:
    """Compile the kernel for a GPU that need not be present.

    Args:
        capability: compute capability without the dot, as in `CAPABILITIES`.
        dtype: element type, one of `grouped_dynamic_conv.DTYPES`.
        spec: sizes; taps, group size and alignment of H shape the code, block_size does not.
        tile: work of one program; that of a large input when absent.

    Raises:
        OpError: `dtype` is unknown.
        EngineBuildError: Triton is interpreting, or its assembler refuses the kernel.
    """
    check_dtypes(dtype, dtype, dtype)
    if not isinstance(grouped_dynamic_conv_kernel, triton.JITFunction):
        raise EngineBuildError(
            "TRITON_INTERPRET: got a set variable, expected none; unset it and compile again"
        )
    tile = tile or Tile.for_shape(spec, rows=1 << 20)
    strides = {
        "hidden_row_stride": spec.hidden_size,
        "delta_row_stride": 2 * spec.kernel_size * spec.groups,  # one half of the projection
        "delta_tap_stride": spec.groups,
    }
    sizes = {"groups": spec.groups, **strides}
    constants = {
        "kernel_size": spec.kernel_size,
        "group_size": spec.group_size,
        "tile_rows": tile.rows,
        "tile_groups": tile.groups,
        "tile_within": tile.within,
    }
    pointers = ("hidden", "delta", "base", "output")
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], Any] = {}
    for index, name in enumerate(grouped_dynamic_conv_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = _POINTER_TYPES[dtype]
        else:
            signature[name] = "i32"
        if name in pointers or sizes.get(name, 1) % 16 == 0:
            aligned[(index,)] = [["tt.divisibility", _ALIGNED_BYTES]]
    source = triton.compiler.ASTSource(grouped_dynamic_conv_kernel, signature, constants, aligned)
    options = {"num_warps": tile.warps, "enable_fp_fusion": False}
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    registers, spill_bytes = _assembler_report(ptx, capability)
    return CompiledKernel(
        capability=capability,
        name=compiled.metadata.name,
        ptx=ptx,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
    )


def _assembler_report(ptx: str, capability: int) -> tuple[int, int]:
    """Registers per thread and bytes spilled, from the verbose output of Triton's own ptxas."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    flags = ["-v", "--fmad=false", f"--gpu-name={target[1] if target else ''}"]
    refusals = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        # Triton ships two assemblers of different ages; the older one refuses newer text.
        for ptxas in sorted(tools.glob("ptxas*")):
            done = subprocess.run(
                [ptxas, *flags, source, "-o", source.with_suffix(".cubin")],
                capture_output=True,
                text=True,
                check=False,
            )
            registers = re.search(r"Used (\d+) registers", done.stderr)
            if done.returncode == 0 and registers:
                spills = re.findall(r"(\d+) bytes spill", done.stderr)
                return int(registers[1]), sum(map(int, spills))
            refusals.append(f"{ptxas.name}: {done.stderr.strip() or done.stdout.strip()}")
    raise EngineBuildError(
        f"ptxas: got no result for sm_{capability}, expected registers per thread; "
        f"reinstall triton; {'; '.join(refusals) or f'no ptxas in {tools}'}"
    )
