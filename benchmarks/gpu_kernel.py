"""Check and time the CUDA kernel of ``dflash::GroupedDynamicConv`` on the GPU at hand.

    python benchmarks/gpu_kernel.py --record docs/runs/2027-01-31-kernel-a100.json
    python benchmarks/gpu_kernel.py --resources

Needs torch, triton and this checkout; nothing has to be installed from it. First the kernel is
compared with a float64 reference over random shapes, views and values; then its bandwidth is set
against a device-to-device copy of the same number of bytes and against eager PyTorch. A run keeps
to `--seconds` and skips what no longer fits. ``TRITON_INTERPRET=1 ... --device cpu`` runs the
checks without a GPU. ``--record`` writes what docs/verified.md is made from, ``--resources`` prints
registers and spills of the kernel for each GPU generation and needs no GPU.

Exit code: 0 when all checks hold, 1 when one fails or a part breaks, 2 without a usable device.
"""

from __future__ import annotations

import time

_START = time.monotonic()

import argparse  # noqa: E402
import hashlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
import triton.testing  # noqa: E402
from torch import Tensor  # noqa: E402

# The checkout itself, under the package's name, without its `__init__` and its dependencies.
_PACKAGE = types.ModuleType("dflash_deploy")
ROOT = Path(__file__).resolve().parents[1]
_PACKAGE.__path__ = [str(ROOT)]
sys.modules["dflash_deploy"] = _PACKAGE

from dflash_deploy.plugins.grouped_dynamic_conv import ConvSpec  # noqa: E402
from dflash_deploy.plugins.triton_compile import CAPABILITIES, compile_ptx  # noqa: E402
from dflash_deploy.plugins.triton_kernel import FEW_ROWS_TILE, MANY_ROWS_TILE, Tile  # noqa: E402
from dflash_deploy.plugins.triton_launch import grouped_dynamic_conv_triton  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GUARD = 64  # elements before and after a checked output; keeps it 128-byte aligned
POISON = 777.0

# (taps, channels, channels per group): published sizes, one group, one channel per group, odd
# channel counts, group sizes that are no power of two, groups wider than a tile.
CHECK_SIZES = (
    (2, 576, 16),
    (4, 60, 15),
    (2, 33, 33),
    (1, 64, 16),
    (4, 37, 1),
    (2, 1100, 550),
    (3, 256, 64),
)
BLOCK_SIZES = (1, 2, 5, 8, 16)
# The last count, times a batch of 3, takes the tile of large inputs; too slow to interpret.
ROW_COUNTS = {"cuda": (1, 2, 7, 8, 16, 33, 400), "cpu": (1, 2, 7, 8)}
VIEWS = ("dense", "half of a projection", "slice of wider rows", "transposed batch")

# (batch, rows, channels)
DECODING_SIZES = (
    (1, 8, 576),
    (1, 16, 4096),
    (8, 16, 2048),
    (32, 8, 576),
    (32, 16, 4096),
)
# (batch, rows, channels, dtype): each many times the last-level cache
LARGE_SIZES = (
    (8192, 16, 4096, "float16"),
    (8192, 16, 4096, "bfloat16"),
    (4096, 16, 4096, "float32"),
    (65536, 16, 576, "float16"),
    (32768, 8, 2048, "bfloat16"),
)
TILES = (
    Tile(4, 16, 16, 4),
    Tile(2, 16, 16, 2),
    Tile(8, 16, 16, 8),
    Tile(8, 16, 16, 4),
    Tile(16, 16, 16, 8),
    Tile(4, 32, 16, 8),
    Tile(2, 32, 16, 4),
    Tile(1, 32, 16, 2),
)
KERNEL_SIZE, GROUP_SIZE = 2, 16
RESOURCE_SIZES = ((4096, 16), (60, 15))  # (channels, channels per group)
SOURCE = "plugins/triton_kernel.py"


def main() -> int:
    """Run all parts, print tables, write the JSON report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--record", type=Path, help="file to write the record of the run to")
    parser.add_argument("--resources", action="store_true", help="print registers and spills, run nothing")
    parser.add_argument("--seconds", type=float, default=38.0, help="time for the whole run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="repeat the checks of a former run")
    options = parser.parse_args()
    if options.resources:
        print("\n".join(resources()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("device: got no CUDA GPU, expected one; run this on a GPU machine", file=sys.stderr)
        return 2

    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if options.device == "cuda" else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seed": seed,
        "errors": [],
    }
    print(f"card {report['card']}, torch {report['torch']}, triton {report['triton']}, seed {seed}")
    parts: list[tuple[str, float, Callable[[Clock], Any]]] = [
        ("checks", 0.5, lambda clock: run_checks(options.device, seed, clock))
    ]
    if options.device == "cuda":
        parts += [
            ("large", 0.75, time_large_sizes),
            ("decoding", 0.9, time_decoding_sizes),
            ("tiles", 1.0, time_tiles),
        ]
    for name, share, part in parts:
        try:
            report[name] = part(Clock(_START + share * options.seconds))
        except Exception as error:  # the other parts still tell something
            traceback.print_exc()
            report["errors"].append(f"{name}: {type(error).__name__}: {error}")
        sys.stdout.flush()
    report["seconds"] = round(time.monotonic() - _START, 1)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = bool(report["errors"] or report.get("checks", {}).get("failures", True))
    if options.record:
        options.record.write_text(json.dumps(record(report, not failed), indent=2) + "\n", encoding="utf-8")
    print(f"{'FAILED' if failed else 'ok'} after {report['seconds']} s")
    return int(failed)


def record(report: dict[str, Any], passed: bool) -> dict[str, Any]:
    """What docs/verified.md needs of a run; tests/verified_page.py says what the fields mean."""
    checks = report.get("checks", {})

    def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in r.items()} for r in found]

    return {
        "part": "conv-kernel",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": report["card"],
        "command": "make test-gpu PART=kernel",
        "versions": {"torch": report["torch"], "triton": report["triton"]},
        "passed": passed,
        "source": {SOURCE: hashlib.sha256((ROOT / SOURCE).read_bytes()).hexdigest()},
        "figures": {
            "cases": checks.get("cases", 0),
            "bit_identical": checks.get("bit_identical", 0),
            "large": rows(report.get("large", [])),
            "decoding": rows(report.get("decoding", {}).get("sizes", [])),
        },
    }


def resources() -> list[str]:
    """Registers per thread and bytes spilled, as the assembler says, in a table."""
    lines = [
        "| sm | dtype | H, group | rows of a tile | threads | registers | spilled bytes |",
        "|" + "---|" * 7,
    ]
    for capability, (channels, group_size), dtype in itertools.product(CAPABILITIES, RESOURCE_SIZES, DTYPES):
        spec = ConvSpec(channels, KERNEL_SIZE, max(KERNEL_SIZE, 16), group_size)
        for rows in (FEW_ROWS_TILE, MANY_ROWS_TILE):
            kernel = compile_ptx(capability, dtype, spec=spec, tile=Tile.of_rows(spec, rows))
            cells = (
                capability, dtype, f"{channels}, {group_size}", rows,
                kernel.threads, kernel.registers, kernel.spill_bytes,
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


@dataclass(frozen=True)
class Clock:
    """The moment at which a part has to stop."""

    end: float

    def __bool__(self) -> bool:
        return time.monotonic() < self.end


# ---------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Case:
    """One comparison with the reference."""

    dtype: str
    batch: int
    rows: int
    taps: int
    channels: int
    group_size: int
    block_size: int
    view: str
    nan_row: bool


def run_checks(device: str, seed: int, clock: Clock) -> dict[str, Any]:
    """Compare the kernel with the reference on random cases until the clock runs out."""
    choose = random.Random(seed)  # noqa: S311 - draws test cases
    torch.manual_seed(seed)
    done, exact, failures = 0, 0, []
    combinations = itertools.product(CHECK_SIZES, DTYPES)
    planned = itertools.chain(combinations, iter(lambda: None, 0))
    for plan in planned:
        if done and not clock:
            break
        taps, channels, group_size = plan[0] if plan else choose.choice(CHECK_SIZES)
        case = Case(
            dtype=plan[1] if plan else choose.choice(list(DTYPES)),
            batch=choose.choice((1, 3)),
            rows=choose.choice(ROW_COUNTS[device]),
            taps=taps,
            channels=channels,
            group_size=group_size,
            block_size=choose.choice([b for b in BLOCK_SIZES if b >= taps]),
            view=choose.choice(VIEWS),
            nan_row=choose.random() < 0.3,
        )
        problem, identical = check(case, device)
        done += 1
        exact += identical
        if problem:
            failures.append({"case": asdict(case), "problem": problem})
            print("FAIL", problem, case)
            if len(failures) >= 5:
                break
    covered = done >= len(CHECK_SIZES) * len(DTYPES)
    print(
        f"checks: {done} cases, {len(failures)} failures, {exact} bit-identical to separately "
        f"rounded float32 steps{'' if covered else '; NOT all sizes and dtypes were reached'}"
    )
    return {"cases": done, "bit_identical": exact, "covered": covered, "failures": failures}


def check(case: Case, device: str) -> tuple[str, bool]:
    """Run one case; return what is wrong ('' if nothing) and whether it is bit-identical."""
    dtype = DTYPES[case.dtype]
    groups = case.channels // case.group_size
    leading = (case.batch, case.rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    hidden = draw(*leading, case.channels)
    delta = draw(*leading, case.taps, groups)
    base = draw(case.taps, case.channels)
    if case.view == "half of a projection":
        delta = draw(*leading, 2, case.taps, groups)[..., 1, :, :]
    elif case.view == "slice of wider rows":
        hidden = draw(*leading, case.channels + 3)[..., 1:-2]
    elif case.view == "transposed batch":
        hidden = draw(case.rows, case.batch, case.channels).transpose(0, 1)
    if case.nan_row:
        hidden[:, case.rows // 2] = float("nan")

    buffer = torch.full((hidden.numel() + 2 * GUARD,), POISON, device=device).to(dtype)
    out = buffer[GUARD:-GUARD].view(*leading, case.channels)
    out.fill_(float("inf"))
    grouped_dynamic_conv_triton(
        hidden, delta, base, block_size=case.block_size, group_size=case.group_size, out=out
    )
    guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
    if not torch.equal(guards, torch.full_like(guards, POISON)):
        return "wrote outside the output", False

    wide = [x.double() for x in (hidden, delta, base)]
    expected = reference(*wide, block_size=case.block_size)
    # Two roundings in a coefficient's product and one per addition, each relative to a partial sum
    # no larger than the sum of magnitudes; then one rounding to the output type.
    magnitude = reference(*(x.abs() for x in wide), block_size=case.block_size)
    bound = (case.taps + 2) * 2.0**-24 * magnitude
    if dtype != torch.float32:
        # Rounded to the nearest on a GPU; Triton's interpreter cuts bfloat16 off instead.
        rounding = torch.finfo(dtype).eps / (2 if device == "cuda" else 1)
        bound = bound * 1.01 + rounding * expected.abs()
        bound = bound + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    got = out.double()
    wrong_nan = got.isnan() != expected.isnan()
    if wrong_nan.any():
        where = wrong_nan.nonzero()[0].tolist()
        return f"{int(wrong_nan.sum())} NaN too many or too few, the first at {where}", False
    excess = ((got - expected).abs() - bound).nan_to_num(nan=-1.0)
    if excess.max() > 0:
        where = (excess == excess.max()).nonzero()[0].tolist()
        return f"off by {float(excess.max()):.3g} more than the bound at {where}", False
    steps = reference(*(x.float() for x in (hidden, delta, base)), block_size=case.block_size).to(dtype)
    return "", torch.equal(out.nan_to_num(nan=POISON), steps.nan_to_num(nan=POISON))


def reference(hidden: Tensor, delta: Tensor, base: Tensor, *, block_size: int) -> Tensor:
    """Sum the taps one by one, in the dtype of the inputs, as the op's definition says."""
    rows = hidden.shape[-2]
    width = hidden.shape[-1] // delta.shape[-1]
    position = torch.arange(rows, device=hidden.device)
    total = torch.zeros_like(hidden)
    for tap in range(base.shape[0]):
        inside = (position % block_size >= tap)[:, None]  # [L, 1]
        earlier = hidden[..., (position - tap).clamp(min=0), :]  # [..., L, H]
        earlier = torch.where(inside, earlier, torch.zeros_like(earlier))
        coefficient = base[tap] + delta[..., tap, :].repeat_interleave(width, -1)
        total = total + coefficient * earlier
    return total


# ---------------------------------------------------------------------------------------- timing


def eager(hidden: Tensor, delta: Tensor, base: Tensor, group_size: int) -> Tensor:
    """The op in plain PyTorch calls, in the order of z-lab's `_grouped_dynamic_convolve`."""
    grouped = hidden.unflatten(-1, (-1, group_size))  # [B, L, G, group_size]
    total = torch.zeros_like(grouped)
    for tap in range(base.shape[0]):
        shifted = F.pad(grouped[:, :-tap], (0, 0, 0, 0, tap, 0)) if tap else grouped
        total = total + base[tap].unflatten(-1, (-1, group_size)) * shifted
        total = torch.addcmul(total, delta[:, :, tap, :, None], shifted)
    return total.flatten(-2)


@dataclass(frozen=True)
class Inputs:
    """One set of tensors of a timed call."""

    hidden: Tensor
    delta: Tensor
    base: Tensor
    out: Tensor

    @classmethod
    def random(cls, batch: int, rows: int, channels: int, dtype: str) -> Inputs:
        """Draw [batch, rows, channels] with `KERNEL_SIZE` taps and groups of `GROUP_SIZE`."""
        kind: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[dtype]}
        hidden = torch.randn(batch, rows, channels, **kind)
        delta = torch.randn(batch, rows, KERNEL_SIZE, channels // GROUP_SIZE, **kind)
        base = torch.randn(KERNEL_SIZE, channels, **kind)
        return cls(hidden, delta, base, torch.empty_like(hidden))

    @property
    def bytes(self) -> int:
        """Bytes a perfect kernel reads and writes."""
        tensors = (self.hidden, self.delta, self.base, self.out)
        return sum(x.numel() * x.element_size() for x in tensors)

    def run_kernel(self, tile: Tile | None = None) -> None:
        """Call the kernel."""
        grouped_dynamic_conv_triton(
            self.hidden,
            self.delta,
            self.base,
            block_size=self.hidden.shape[1],
            group_size=GROUP_SIZE,
            out=self.out,
            tile=tile,
        )

    def run_eager(self) -> None:
        """Call the eager form."""
        eager(self.hidden, self.delta, self.base, GROUP_SIZE)


def median_us(calls: list[Callable[[], object]], *, graph: bool) -> float:
    """Time one call, taking the calls in turn, so that none finds its inputs in the cache.

    With `graph`, calls are replayed from a CUDA graph, which leaves the host out of the number;
    otherwise the cache is flushed before each.
    """
    turn = itertools.cycle(calls)

    def call() -> None:
        next(turn)()

    for one in calls:
        one()
    torch.cuda.synchronize()
    if graph:
        return 1e3 * float(triton.testing.do_bench_cudagraph(call, rep=5, return_mode="median"))
    return 1e3 * float(triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median"))


def time_case(batch: int, rows: int, channels: int, dtype: str, sets: int, graph: bool) -> dict[str, Any]:
    """Time kernel, copy and eager form of one size."""
    inputs = [Inputs.random(batch, rows, channels, dtype) for _ in range(sets)]
    half = inputs[0].bytes // 2  # a copy moves each byte twice
    pairs = [
        tuple(torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2)) for _ in range(sets)
    ]
    kernel = median_us([one.run_kernel for one in inputs], graph=graph)
    copy = median_us([partial(to.copy_, of) for to, of in pairs], graph=graph)
    eager_us = median_us([one.run_eager for one in inputs], graph=graph)
    row: dict[str, Any] = {
        "batch": batch,
        "rows": rows,
        "channels": channels,
        "dtype": dtype,
        "bytes": inputs[0].bytes,
        "kernel_us": kernel,
        "copy_us": copy,
        "eager_us": eager_us,
        "kernel_gb_s": inputs[0].bytes / kernel / 1e3,
        "copy_gb_s": 2 * half / copy / 1e3,
        "kernel_of_copy": copy / kernel,
        "eager_over_kernel": eager_us / kernel,
    }
    print(
        f"{dtype:>9} {batch:>6} {rows:>5} {channels:>5} {row['bytes'] / 1e6:>9.2f}"
        f" {kernel:>10.2f} {copy:>10.2f} {eager_us:>10.2f} {row['kernel_gb_s']:>8.0f}"
        f" {row['copy_gb_s']:>8.0f} {row['kernel_of_copy']:>8.2f} {row['eager_over_kernel']:>8.2f}"
    )
    return row


def print_header(title: str) -> None:
    """Print the head of a table of `time_case` rows."""
    print(
        f"{title}\n    dtype  batch  rows     H        MB  kernel us    copy us   eager us"
        "     GB/s     copy  of copy  vs eager"
    )


def time_large_sizes(clock: Clock) -> list[dict[str, Any]]:
    """Time sizes far beyond the cache: the bandwidth reached."""
    print_header("large sizes, cache flushed, median:")
    results = []
    for batch, rows, channels, dtype in LARGE_SIZES:
        if not clock:
            print("  out of time, rest skipped")
            break
        results.append(time_case(batch, rows, channels, dtype, sets=2, graph=False))
        torch.cuda.empty_cache()
    return results


def time_decoding_sizes(clock: Clock) -> dict[str, Any]:
    """Time one decoding round's sizes, replayed from a graph, and the launch from Python."""
    print_header("decoding sizes, replayed from a CUDA graph, inputs in turn, median:")
    results = []
    for batch, rows, channels in DECODING_SIZES:
        if not clock:
            print("  out of time, rest skipped")
            break
        results.append(time_case(batch, rows, channels, "float16", sets=8, graph=True))
    one = Inputs.random(*DECODING_SIZES[0], "float16")
    one.run_kernel()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(300):
        one.run_kernel()
    host_us = (time.perf_counter() - begin) / 300 * 1e6
    torch.cuda.synchronize()
    print(f"host time of one launch from Python: {host_us:.1f} us")
    return {"sizes": results, "host_us": host_us}


def time_tiles(clock: Clock) -> list[dict[str, Any]]:
    """Time other tiles than the chosen one on the first large size."""
    batch, rows, channels, dtype = LARGE_SIZES[0]
    inputs = [Inputs.random(batch, rows, channels, dtype) for _ in range(2)]
    results = []
    for tile in TILES:
        if not clock:
            print("  out of time, rest skipped")
            break
        us = median_us([partial(one.run_kernel, tile) for one in inputs], graph=False)
        gb_s = inputs[0].bytes / us / 1e3
        print(f"tile {tile}: {us:.1f} us, {gb_s:.0f} GB/s")
        results.append({**asdict(tile), "kernel_us": us, "kernel_gb_s": gb_s})
    return results


if __name__ == "__main__":
    sys.exit(main())
