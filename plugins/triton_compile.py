"""The CUDA kernel of ``dflash::GroupedDynamicConv`` as PTX, for GPUs that need not be present.

Loads no torch. The text is made to be kept, in an engine or a file:

- it asks for the oldest PTX version that knows the GPU, so that every driver which knows the GPU
  takes it;
- it names no source files, and takes the kernel's own arguments only, without the two scratch
  buffers that Triton puts behind them;
- products and sums are marked as rounded, so that no later assembler makes one operation of two.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from dflash_deploy.bundle.errors import EngineBuildError
from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec, check_dtypes
from dflash_deploy.plugins.triton_kernel import WARP, Tile, grouped_dynamic_conv_kernel

CAPABILITIES = (80, 89, 90, 100, 120)
READ = ("hidden", "delta", "base")
NUMBERS = (
    "rows",
    "length",
    "block_size",
    "groups",
    "hidden_row_stride",
    "delta_row_stride",
    "delta_tap_stride",
)
WRITTEN = "output"
_POINTER_TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNED_BYTES = 16
_OLD_PTX = 80  # knows GPUs up to 90; newer ones are in the table, and the rest is left to Triton
_PTX = {100: 86, 101: 86, 103: 88, 110: 90, 120: 87, 121: 88}
_UNROUNDED = re.compile(r"^\s*(?:(?:mul|add|sub)(?:\.ftz)?|fma\.\S+?)\.f32(?:x2)?\s.*$", re.MULTILINE)


@dataclass(frozen=True)
class CompiledKernel:
    """The kernel as machine text for one GPU generation, with what the assembler says of it.

    Its arguments are `READ`, `NUMBERS` (32-bit integers) and `WRITTEN`, in this order.
    """

    capability: int
    name: str
    ptx: str
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int


def dense_strides(spec: ConvSpec) -> dict[str, int]:
    """Strides, in elements, of inputs without gaps."""
    return {
        "hidden_row_stride": spec.hidden_size,
        "delta_row_stride": spec.kernel_size * spec.groups,
        "delta_tap_stride": spec.groups,
    }


@functools.cache
def compile_ptx(
    capability: int,
    dtype: str = "float16",
    *,
    spec: ConvSpec,
    tile: Tile | None = None,
) -> CompiledKernel:
    """Compile the kernel for inputs without gaps.

    Args:
        capability: compute capability without the dot, as in `CAPABILITIES`.
        dtype: element type, one of `grouped_dynamic_conv.DTYPES`.
        spec: sizes; taps, group size and alignment of H shape the code, block_size does not.
        tile: work of one program; that of a large input when absent.

    Raises:
        OpError: `dtype` is unknown.
        EngineBuildError: Triton is interpreting, its assembler refuses the kernel, or the text is
            not what the caller of the kernel counts on.
    """
    check_dtypes(dtype, dtype, dtype)
    if not isinstance(grouped_dynamic_conv_kernel, triton.JITFunction):
        raise EngineBuildError(
            "TRITON_INTERPRET: got a set variable, expected none; unset it and compile again"
        )
    tile = tile or Tile.for_shape(spec, rows=1 << 20)
    constants = tile.constants(spec)
    numbers = {"groups": spec.groups, **dense_strides(spec)}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], Any] = {}
    for index, name in enumerate(grouped_dynamic_conv_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            signature[name] = _POINTER_TYPES[dtype]
        if _is_aligned(name, dtype, spec, numbers):
            aligned[(index,)] = [["tt.divisibility", _ALIGNED_BYTES]]
    source = triton.compiler.ASTSource(grouped_dynamic_conv_kernel, signature, constants, aligned)
    options = {
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
        "ptx_version": _PTX.get(capability, _OLD_PTX if capability <= 90 else None),
    }
    target = triton.backends.compiler.GPUTarget("cuda", capability, WARP)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=target, options=options)
    metadata = compiled.metadata
    ptx = _own_arguments(compiled.asm["ptx"], metadata.name)
    unrounded = _UNROUNDED.findall(ptx)
    if unrounded:
        raise EngineBuildError(
            f"PTX for sm_{capability}: got {unrounded[0].strip()!r}, expected products and sums with .rn; "
            "use the Triton version of the requirements"
        )
    registers, spill_bytes = _assembler_report(ptx, capability)
    return CompiledKernel(
        capability=capability,
        name=metadata.name,
        ptx=ptx,
        threads=metadata.num_warps * WARP,
        shared_bytes=metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
    )


def _is_aligned(name: str, dtype: str, spec: ConvSpec, numbers: Mapping[str, int]) -> bool:
    """Whether the compiler may count on an argument being a multiple of 16: bytes, or the number.

    A tensor starts at an allocation or at a row of it. The former are aligned far wider, the latter
    only if whole rows are.
    """
    if name in numbers:
        return numbers[name] % 16 == 0
    row = {"hidden": spec.hidden_size, "base": spec.hidden_size, WRITTEN: spec.hidden_size}
    row["delta"] = spec.kernel_size * spec.groups
    return name in row and row[name] * _ELEMENT_BYTES[dtype] % _ALIGNED_BYTES == 0


def _own_arguments(ptx: str, name: str) -> str:
    """Drop the arguments that Triton adds, which a caller other than Triton does not pass.

    Raises:
        EngineBuildError: there are fewer than the kernel's own, or an added one is used.
    """
    wanted = len(READ) + len(NUMBERS) + 1
    entry = re.search(rf"\.entry {re.escape(name)}\((.*?)\n?\)", ptx, re.DOTALL)
    arguments = [line.strip() for line in entry[1].split(",")] if entry else []
    body = ptx[entry.end() :] if entry else ""
    used = [a for a in arguments[wanted:] if re.search(rf"\b{re.escape(a.split()[-1])}\b", body)]
    if entry is None or len(arguments) < wanted or used:
        got = f"{len(arguments)} arguments" + (f" and uses of {', '.join(used)}" if used else "")
        raise EngineBuildError(
            f"PTX of {name}: got {got}, expected {wanted} and others that are not used; "
            "use the Triton version of the requirements"
        )
    own = ",\n".join(f"\t{argument}" for argument in arguments[:wanted])
    return f"{ptx[: entry.start(1)]}\n{own}\n{ptx[entry.end() - 1 :]}"


def _assembler_report(ptx: str, capability: int) -> tuple[int, int]:
    """Registers per thread and bytes spilled, from the verbose output of Triton's own ptxas."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    flags = ["-v", f"--gpu-name={target[1] if target else ''}"]
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
