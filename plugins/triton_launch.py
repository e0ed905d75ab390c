"""The CUDA kernel of ``dflash::GroupedDynamicConv`` called with PyTorch tensors.

Legend: L rows, H channels, K taps, G = H / group_size groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_deploy.bundle.errors import OpError, field_error
from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec, check_dtypes, check_rank
from dflash_deploy.plugins.triton_kernel import Tile, grouped_dynamic_conv_kernel


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
    programs = -(-rows // tile.rows) * tile.programs_across(spec)
    grouped_dynamic_conv_kernel[(programs,)](
        flat_hidden,
        flat_delta,
        base.contiguous(),
        rows,
        length,
        block_size,
        spec.groups,
        flat_hidden.stride(0),
        flat_delta.stride(0),
        flat_delta.stride(1),
        out,
        **tile.constants(spec),
        num_warps=tile.warps,
        enable_fp_fusion=False,  # rounds like the definition; memory is the limit, not arithmetic
    )
    return out


def _last_axis_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
