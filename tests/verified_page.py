"""docs/verified.md, made from the runs that are kept in docs/runs.

    python tests/verified_page.py        writes the page

A run is a JSON file with

    part       what ran: a key in `PARTS`
    date       yyyy-mm-dd
    device     the GPU's name, as its driver says it
    command    how to do it again
    versions   of what it ran with, by package
    passed     whether all its checks held
    source     SHA-256 of the files that were measured, by path, so that the page can say that they changed
    figures    numbers, as the part's own table takes them

`benchmarks/gpu_kernel.py --record` writes one. A part without a run on a GPU says so by itself. What ran on
CPUs is what the tests of a part run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verified.md"
RUNS = ROOT / "docs" / "runs"
COMMAND = "python tests/verified_page.py"
NOT_YET = "not run on a GPU yet"
NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Part:
    """A row of the table.

    Attributes:
        title: what it is.
        tests: paths of the tests that run it on a CPU; empty if none does.
        cpu: what they do, or why there are none.
        needs_gpu: whether a GPU is left to be tried.
    """

    title: str
    tests: tuple[str, ...]
    cpu: str
    needs_gpu: bool = True


PARTS = {
    "export": Part(
        "export, parity against the originals",
        ("tests/exporter/test_export.py", "tests/exporter/parity"),
        "z-lab's `dflash` and `speculators` compute the same",
        needs_gpu=False,
    ),
    "onnxruntime": Part(
        "loop over ONNX Runtime",
        ("tests/runtime", "tests/demo"),
        "the CPU provider; on a GPU `--provider cuda`",
    ),
    "conv-function": Part(
        "`GroupedDynamicConv`, ONNX function body",
        ("tests/plugins/test_onnx_function.py", "tests/plugins/test_tensorrt_rtx.py"),
        "ONNX Runtime; TensorRT-RTX builds it",
    ),
    "conv-kernel": Part(
        "`GroupedDynamicConv`, Triton kernel",
        ("tests/plugins/test_triton_kernel.py",),
        "Triton's interpreter, and PTX for sm_80, 89, 90, 100, 120",
    ),
    "conv-plugin": Part(
        "`GroupedDynamicConv`, TensorRT plugin",
        ("tests/plugins/test_tensorrt_plugin.py", "tests/exporter/engines/test_plugin.py"),
        "NVIDIA's bindings take it and ask it for its kernels, without the library behind them; what they "
        "would launch runs in the interpreter",
    ),
    "engines-tensorrt-rtx": Part(
        "TensorRT-RTX engines of target, draft and whole round",
        (
            "tests/exporter/engines/test_build.py",
            "tests/exporter/engines/test_kernels.py",
            "tests/exporter/engines/test_families.py",
        ),
        "built, and read; no GPU is needed for that",
    ),
    "engines-tensorrt": Part(
        "TensorRT engines of target and draft",
        (),
        "not built yet: its libraries are not on the package index, and it builds on the GPU it is for",
    ),
    "runtime-engines": Part(
        "runtime over TensorRT and TensorRT-RTX engines",
        (
            "tests/runtime/test_trt_engine.py",
            "tests/runtime/test_trt_load.py",
            "tests/exporter/test_engine_runtime.py",
        ),
        "over a strict stand-in for the libraries",
    ),
}


@dataclass(frozen=True)
class Run:
    """One recorded run; the module says what the fields mean."""

    part: str
    date: str
    device: str
    command: str
    versions: Mapping[str, str]
    passed: bool
    source: Mapping[str, str]
    figures: Mapping[str, Any]

    def changed(self) -> list[str]:
        """Files that are no longer those that were measured, or of which the record says nothing."""
        files = SOURCES.get(self.part, ())
        return [
            name
            for name in files
            if self.source.get(name) != hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        ]


SOURCES = {"conv-kernel": ("plugins/triton_kernel.py",)}


def run_from_text(text: str, name: str) -> Run:
    """Read a record strictly.

    Raises:
        ValueError: a field is missing, unknown, or of another kind.
    """
    data = json.loads(text)
    kinds = {"versions": dict, "passed": bool, "source": dict, "figures": dict}
    names = [f.name for f in fields(Run)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        raise ValueError(f"{name}: got {sorted(data)}, expected the fields {sorted(names)}")
    for field in names:
        kind = kinds.get(field, str)
        if not isinstance(data[field], kind):
            raise ValueError(f"{name}: {field}: got {data[field]!r}, expected a {kind.__name__}")
    if data["part"] not in PARTS:
        raise ValueError(f"{name}: part: got {data['part']!r}, expected one of {', '.join(PARTS)}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", data["date"]):
        raise ValueError(f"{name}: date: got {data['date']!r}, expected yyyy-mm-dd")
    return Run(**data)


def all_runs() -> list[Run]:
    """The records, newest first."""
    runs = [
        run_from_text(path.read_text(encoding="utf-8"), path.name) for path in sorted(RUNS.glob("*.json"))
    ]
    return sorted(runs, key=lambda run: (run.date, run.device), reverse=True)


def verified_page(runs: Sequence[Run]) -> str:
    """The whole page."""
    parts = [
        "# What was verified where\n",
        _text(
            f"Made by `{COMMAND}` from the runs that are kept in [runs](runs); a test compares. `make test` "
            "and `make test-slow` run everything in the column CPU. To add a GPU: `make test-gpu PART=kernel "
            "RECORD=docs/runs/NAME.json`, then that command."
        ),
        _table(["part", "CPU", "GPU"], [_row(key, part, runs) for key, part in PARTS.items()]),
    ]
    for run in runs:
        write = FIGURES.get(run.part)
        if write is not None:
            parts += write(run)
    return "\n".join(parts)


def _row(key: str, part: Part, runs: Sequence[Run]) -> list[str]:
    done = [run for run in runs if run.part == key]
    tests = ", ".join(f"`{path}`" for path in part.tests)
    gpu = "; ".join(
        f"{run.device}, {run.date}: `{run.command}`{'' if run.passed else ' **failed**'}" for run in done
    )
    cpu = f"{tests}: {part.cpu}" if tests else part.cpu
    return [part.title, cpu, gpu or (NOT_YET if part.needs_gpu else NOT_NEEDED)]


def _kernel(run: Run) -> Iterator[str]:
    """The figures of `benchmarks/gpu_kernel.py`."""
    figures = run.figures
    yield f"## The Triton kernel on an {run.device}\n"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    checks = (
        f"{figures['cases']} random cases in float32, float16 and bfloat16 agree with a float64 reference "
        f"within one rounding, and {figures['bit_identical']} of them are bit-identical to float32 steps "
        "rounded one by one."
        if run.passed
        else "The checks FAILED."
    )
    yield _text(
        f"{run.date}, {versions}. {checks} Bandwidth counts each byte read or written once; `copy` is a "
        "device-to-device copy of as many bytes."
    )
    rows = []
    for kind in ("large", "decoding"):
        for row in figures[kind]:
            unit = ("kernel_gb_s", "copy_gb_s", "GB/s") if kind == "large" else ("kernel_us", "copy_us", "us")
            size = f"{row['batch']} x {row['rows']} x {row['channels']}"
            rows.append(
                [
                    row["dtype"],
                    size,
                    f"{row[unit[0]]:g} {unit[2]}",
                    f"{row[unit[1]]:g} {unit[2]}",
                    f"{row['kernel_of_copy']:.2f}",
                    f"{row['eager_over_kernel']:.1f} x",
                ]
            )
    head = [
        "dtype",
        "batch x rows x H",
        "kernel",
        "copy",
        "copy's time / kernel's",
        "faster than eager torch",
    ]
    yield _table(head, rows)
    for name in run.changed():
        yield _text(f"`{name}` has changed since this run.")


FIGURES: dict[str, Callable[[Run], Iterator[str]]] = {"conv-kernel": _kernel}


def _text(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(verified_page(all_runs()), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
