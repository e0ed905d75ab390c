"""``dflash::GroupedDynamicConv`` as a TensorRT plugin whose kernel is stored in the engine.

TensorRT asks for the kernel while it builds, and keeps its PTX and what to launch it with. The engine
then needs nothing of this package: no Python, and no plugin that is registered when it is loaded.

Legend: L rows, H channels, K taps, G = H / group_size groups.
"""

# No `from __future__ import annotations`: TensorRT looks at the annotations themselves, not at their text.

import functools
from collections.abc import Callable
from typing import Any

from dflash_deploy.bundle.errors import OpError, field_error
from dflash_deploy.plugins.grouped_dynamic_conv import (
    BLOCK_SIZE,
    DOMAIN,
    OP_TYPE,
    ConvSpec,
    check_dtypes,
    check_rank,
)

PLUGIN_ID = f"{DOMAIN}::{OP_TYPE}"
VERSION = "1"  # the only one that `tensorrt.plugin` registers
NODE_ATTRIBUTES: dict[str, str | int] = {"plugin_namespace": DOMAIN, "plugin_version": VERSION, "aot": 1}
"""What the ONNX parser looks for in a node, beside the op's own attributes."""

# By names of TensorRT's data types: its own, and ours.
_TYPES = {"FLOAT": ("FP32", "float32"), "HALF": ("FP16", "float16"), "BF16": ("BF16", "bfloat16")}


def register_plugin(capability: int, failed: Callable[[str], None]) -> None:
    """Register the plugin in the process that builds; a second time changes nothing.

    Args:
        capability: compute capability of the GPU that is built for, without the dot.
        failed: is told what went wrong in a call from TensorRT, which itself says only that something did.

    Raises:
        ImportError: TensorRT, its `plugin` module, or triton is not installed.
    """
    import tensorrt.plugin as trtp

    from dflash_deploy.plugins.triton_compile import NUMBERS, compile_ptx, dense_strides
    from dflash_deploy.plugins.triton_kernel import FEW_ROWS_TILE, MANY_ROWS_TILE, Tile

    if hasattr(getattr(trtp.op, DOMAIN, None), OP_TYPE):
        return

    def describe(
        hidden: trtp.TensorDesc,
        delta: trtp.TensorDesc,  # noqa: ARG001 - TensorRT reads the signature
        base: trtp.TensorDesc,  # noqa: ARG001
        block_size: int,  # noqa: ARG001
        group_size: int,  # noqa: ARG001
    ) -> trtp.TensorDesc:
        return hidden.like()

    def kinds(
        hidden: trtp.TensorDesc,
        delta: trtp.TensorDesc,
        base: trtp.TensorDesc,
        outputs: tuple[trtp.TensorDesc],  # noqa: ARG001
    ) -> list[trtp.AutoTuneCombination]:
        types = _types(hidden, delta, base)
        # A tactic is the number of rows of a tile; TensorRT times them and keeps the faster one.
        tactics = [FEW_ROWS_TILE, MANY_ROWS_TILE]
        return [trtp.AutoTuneCombination(", ".join([types[0]] * 4), "LINEAR", tactics)]

    def kernel(
        hidden: trtp.TensorDesc,
        delta: trtp.TensorDesc,
        base: trtp.TensorDesc,
        block_size: int,
        group_size: int,
        outputs: tuple[trtp.TensorDesc],  # noqa: ARG001
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        dtype = _types(hidden, delta, base)[1]
        check_rank(hidden.ndim)
        # Sizes that move are -1 here.
        shapes = [tuple(desc.shape) for desc in (hidden, delta, base)]
        spec = ConvSpec.from_shapes(*shapes, block_size=block_size, group_size=group_size)
        tile = Tile.of_rows(spec, tactic)
        compiled = compile_ptx(capability, dtype, spec=spec, tile=tile)

        *leading, length, _ = hidden.shape_expr
        rows = length
        for size in leading:
            rows = rows * size
        launch = trtp.KernelLaunchParams()
        launch.grid_x = trtp.cdiv(rows, tile.rows) * tile.programs_across(spec)
        launch.block_x = compiled.threads
        launch.shared_mem = compiled.shared_bytes
        values = {
            "rows": rows,
            "length": length,
            BLOCK_SIZE: block_size,
            "groups": spec.groups,
            **dense_strides(spec),
        }
        numbers = trtp.SymIntExprs.from_tuple([trtp.SymInt32(values[name]) for name in NUMBERS])
        return compiled.name, compiled.ptx, launch, numbers

    trtp.register(PLUGIN_ID)(describe)
    trtp.autotune(PLUGIN_ID)(_telling(kinds, failed))
    trtp.aot_impl(PLUGIN_ID)(_telling(kernel, failed))


def _types(*descs: Any) -> tuple[str, str]:
    """The one element type of all inputs: TensorRT's name for it and ours.

    Raises:
        OpError: there are several, or it is none of ours.
    """
    names = []
    for desc in descs:
        name = desc.dtype.name
        if name not in _TYPES:
            raise field_error(OpError, "dtype", name, f"one of {', '.join(_TYPES)}", "cast the inputs")
        names.append(_TYPES[name])
    check_dtypes(*(ours for _, ours in names))
    return names[0]


def _telling(function: Callable[..., Any], failed: Callable[[str], None]) -> Callable[..., Any]:
    """Pass on what goes wrong before TensorRT drops it; the signature stays, for TensorRT reads it."""

    @functools.wraps(function)
    def told(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as cause:
            failed(f"plugin {PLUGIN_ID}: {cause}")
            raise

    return told
