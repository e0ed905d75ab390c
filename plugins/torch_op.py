"""The PyTorch form of ``dflash::GroupedDynamicConv`` and its translation to ONNX.

Legend: L rows, H channels, K taps, G = H / group_size groups, R = product of leading axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from dflash_deploy.plugins.grouped_dynamic_conv import (
    ATTRIBUTE_NAMES,
    DOMAIN,
    OP_TYPE,
    OPSET_VERSION,
    TORCH_NAME,
    ConvSpec,
    check_dtypes,
    check_rank,
)


def _checked_spec(hidden: Tensor, delta: Tensor, base: Tensor, block_size: int, group_size: int) -> ConvSpec:
    check_rank(hidden.dim())
    check_dtypes(*(str(x.dtype).removeprefix("torch.") for x in (hidden, delta, base)))
    return ConvSpec.from_shapes(
        hidden.shape, delta.shape, base.shape, block_size=block_size, group_size=group_size
    )


@torch.library.custom_op(TORCH_NAME, mutates_args=())
def grouped_dynamic_conv_op(
    hidden: Tensor, delta: Tensor, base: Tensor, block_size: int, group_size: int
) -> Tensor:
    """Convolve each block of rows with its token-conditioned kernel.

    Shapes: hidden [..., L, H], delta [..., L, K, H / group_size], base [K, H] -> [..., L, H], all
    of one dtype out of float32, float16 and bfloat16. Computes what
    `dflash_deploy.plugins.grouped_dynamic_conv` defines.

    Raises:
        OpError: shapes, dtypes or attributes do not fit together.
    """
    spec = _checked_spec(hidden, delta, base, block_size, group_size)
    x = hidden.float().reshape(*hidden.shape[:-1], spec.groups, group_size)  # [..., L, G, group_size]
    static = base.float().reshape(spec.kernel_size, spec.groups, group_size)  # [K, G, group_size]
    coefficient = static + delta.float().unsqueeze(-1)  # [..., L, K, G, group_size]
    row = torch.arange(hidden.shape[-2], device=hidden.device)  # [L]
    output = x * coefficient[..., 0, :, :]  # [..., L, G, group_size]
    for tap in range(1, spec.kernel_size):
        # Selecting, not scaling by zero: a NaN must stop at the start of its block.
        inside = (row % block_size >= tap)[:, None, None]  # [L, 1, 1]
        earlier = x.index_select(-3, (row - tap).clamp(min=0))  # [..., L, G, group_size]
        output += torch.where(inside, earlier, 0.0) * coefficient[..., tap, :, :]
    return output.reshape(hidden.shape).to(hidden.dtype)


@grouped_dynamic_conv_op.register_fake
def _(hidden: Tensor, delta: Tensor, base: Tensor, block_size: int, group_size: int) -> Tensor:
    _checked_spec(hidden, delta, base, block_size, group_size)
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


def grouped_dynamic_conv(
    hidden: Tensor, delta: Tensor, base: Tensor, *, block_size: int, group_size: int
) -> Tensor:
    """Convolve all rows of all leading axes as one run of blocks.

    Counterpart of `grouped_dynamic_conv` of ``speculators``: the leading axes are flattened
    before rows are counted, so a sequence whose length is no multiple of `block_size` shifts the
    blocks of the next one.

    Shapes: hidden [..., H], delta [..., K, H / group_size], base [K, H] -> [..., H]; base is cast
    to the dtype of hidden.

    Raises:
        OpError: (a ValueError) H is no multiple of group_size, K exceeds block_size, base is not
            [K, H], delta does not fit hidden, or delta has another dtype than hidden.
    """
    spec = ConvSpec.from_shapes(
        hidden.shape, delta.shape, base.shape, block_size=block_size, group_size=group_size
    )
    output = grouped_dynamic_conv_op(
        hidden.reshape(-1, spec.hidden_size),
        delta.reshape(-1, spec.kernel_size, spec.groups),
        base.to(hidden.dtype),
        block_size,
        group_size,
    )
    return cast("Tensor", output.reshape(hidden.shape))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Give the ``custom_translation_table`` with which `torch.onnx.export` keeps the op whole.

    An exported module then holds one node ``dflash::GroupedDynamicConv`` per call; give the model
    its body with `dflash_deploy.plugins.onnx_function.add_function`.
    """
    from onnxscript.values import Op, Opset

    from dflash_deploy.plugins.onnx_function import op_schema

    op = Op(Opset(DOMAIN, OPSET_VERSION), OP_TYPE, op_schema())

    def translate(hidden: Any, delta: Any, base: Any, block_size: int, group_size: int) -> Any:
        attributes = dict(zip(ATTRIBUTE_NAMES, (block_size, group_size), strict=True))
        return op(hidden, delta, base, **attributes)

    return {torch.ops.dflash.grouped_dynamic_conv.default: translate}
