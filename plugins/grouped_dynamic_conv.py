"""Definition of ``dflash::GroupedDynamicConv``: names, attributes, and checks of shapes.

The op is the token-conditioned local convolution of DFlash2, run before and after attention and
before and after the MLP of every draft layer. It follows `_grouped_dynamic_convolve` of the
``dflash`` package (z-lab) and `grouped_dynamic_conv` of the ``speculators`` package.

Legend: L rows, H channels, K taps, G = H / group_size groups, ``...`` any leading axes.

    inputs    hidden [..., L, H], delta [..., L, K, G], base [K, H], one floating dtype
    output    [..., L, H], the same dtype
    y[..., i, c] = sum over t = 0..K-1 of
                   (base[t, c] + delta[..., i, t, c // group_size]) * x(i - t)
    x(j)     = hidden[..., j, c], or zero when j lies before the first row of the block of row i

Row i sits at position ``i % block_size`` of its block; rows are counted along axis -2, so
leading axes never mix. Zero means selected, not multiplied: a NaN in row j cannot reach an
earlier row or another block. Taps are added in the order 0, 1, ...; half precision inputs are
computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_deploy.bundle.errors import OpError, field_error

DOMAIN = "dflash"
OP_TYPE = "GroupedDynamicConv"
OPSET_VERSION = 1
TORCH_NAME = "dflash::grouped_dynamic_conv"

INPUT_NAMES = ("hidden", "delta", "base")
OUTPUT_NAME = "output"
BLOCK_SIZE = "block_size"
GROUP_SIZE = "group_size"
ATTRIBUTE_NAMES = (BLOCK_SIZE, GROUP_SIZE)

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ConvSpec:
    """The sizes that fix one use of the op; leading axes and the number of rows stay open."""

    hidden_size: int
    kernel_size: int
    block_size: int
    group_size: int

    def __post_init__(self) -> None:
        for name in (BLOCK_SIZE, GROUP_SIZE, "kernel_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise field_error(OpError, name, getattr(self, name), ">= 1", f"give the {name} of the draft")
        if self.hidden_size % self.group_size:
            raise field_error(
                OpError,
                "hidden_size",
                self.hidden_size,
                f"a multiple of group_size {self.group_size}",
                "give the group_size the draft was trained with",
            )
        if self.kernel_size > self.block_size:
            raise field_error(
                OpError,
                "kernel_size",
                self.kernel_size,
                f"<= block_size {self.block_size}",
                "give the block_size of the draft; a tap cannot look past the start of a block",
            )

    @property
    def groups(self) -> int:
        """Number of channel groups G."""
        return self.hidden_size // self.group_size

    @classmethod
    def from_shapes(
        cls,
        hidden: Sequence[int],
        delta: Sequence[int],
        base: Sequence[int],
        *,
        block_size: int,
        group_size: int,
    ) -> ConvSpec:
        """Check the shapes of the three inputs against each other and the attributes.

        Shapes are hidden [..., L, H], delta [..., L, K, G], base [K, H]; symbolic sizes are
        accepted on the leading axes and L. Refuses what `grouped_dynamic_conv` of
        ``speculators`` refuses.

        Raises:
            OpError: H is no multiple of group_size, K exceeds block_size, or base or delta has
                another shape.
        """
        if len(hidden) < 1:
            raise field_error(OpError, "hidden", tuple(hidden), "shape [..., L, H]", "add the missing axes")
        if len(base) != 2 or base[1] != hidden[-1]:
            raise field_error(
                OpError,
                "base",
                tuple(base),
                f"shape [kernel_size, {hidden[-1]}]",
                "pass one half of base_kernel, one row per tap",
            )
        spec = cls(
            hidden_size=hidden[-1],
            kernel_size=base[0],
            block_size=block_size,
            group_size=group_size,
        )
        expected = (*hidden[:-1], spec.kernel_size, spec.groups)
        if len(delta) != len(expected) or any(a != b for a, b in zip(delta, expected, strict=True)):
            raise field_error(
                OpError,
                "delta",
                tuple(delta),
                f"shape {expected}",
                "split the kernel projection into [2, kernel_size, groups] and pass one half",
            )
        return spec


def check_rank(rank: int) -> None:
    """Refuse a `hidden` without a row axis.

    Raises:
        OpError: `rank` is below 2.
    """
    if rank < 2:
        raise field_error(OpError, "hidden", f"rank {rank}", "rank >= 2, [..., L, H]", "add a row axis")


def check_dtypes(hidden: str, delta: str, base: str) -> None:
    """Refuse mixed or unsupported element types, given by name (``"float32"``).

    Raises:
        OpError: the names differ or are not among `DTYPES`.
    """
    if hidden not in DTYPES:
        raise field_error(OpError, "hidden dtype", hidden, f"one of {', '.join(DTYPES)}", "cast the inputs")
    for name, dtype in (("delta", delta), ("base", base)):
        if dtype != hidden:
            raise field_error(OpError, f"{name} dtype", dtype, hidden, f"cast {name} to the dtype of hidden")
