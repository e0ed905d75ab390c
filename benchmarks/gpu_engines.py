"""Build engines for the GPU at hand, prove them against ONNX Runtime on the CPU, and time them.

    python benchmarks/gpu_engines.py --record docs/runs/2027-01-31-engines-l4.json
    python benchmarks/gpu_engines.py --bundle pair-float16 --backend tensorrt

Without ``--bundle`` it makes its own: a tiny random pair in float32, float16 and bfloat16, and the demo's
pair in float16; that needs the packages that `make test-gpu` installs. With ``--bundle`` it needs one engine
library, cuda-python, onnxruntime, polygraphy and onnx-ir, and no torch. The bundle itself stays as it is:
engines are built in a copy.

For each bundle: every output of each stage (prefill, verify, draft) with the same inputs on both sides,
within the tolerances of parity; whole generations, identical or with the margin of the first difference; and
tokens per second, plain and speculative, with and without CUDA graphs. A bundle in bfloat16 is compared with
one of the same pair in float32: ONNX Runtime does not compute it on the CPU. A run keeps to `--seconds` and
says what it left out.

Exit code: 0 when all checks hold, 1 when one fails or a part breaks, 2 without a usable device.
"""

from __future__ import annotations

import time

_START = time.monotonic()

import argparse  # noqa: E402
import hashlib  # noqa: E402
import importlib.metadata  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

from dflash_deploy.bench.run import bench_decoder  # noqa: E402
from dflash_deploy.bundle.errors import DflashError, ProviderError  # noqa: E402
from dflash_deploy.bundle.manifest import Manifest, manifest_from_bundle  # noqa: E402
from dflash_deploy.bundle.tensors import (  # noqa: E402
    ANCHOR,
    BLOCK_IDS,
    BLOCK_ROWS,
    CANDIDATES,
    DRAFT,
    DRAFT_LOGITS,
    EDGE_SCORES,
    FEATURES,
    INPUT_IDS,
    LOGITS,
    SLOTS,
    START,
    TARGET,
    WANTED_ROWS,
    DType,
)
from dflash_deploy.exporter.engines.backends import BACKENDS  # noqa: E402
from dflash_deploy.exporter.engines.build import build_engines  # noqa: E402
from dflash_deploy.exporter.parity.compare import Choices, Values  # noqa: E402
from dflash_deploy.exporter.parity.tolerances import TOLERANCES, Kind  # noqa: E402
from dflash_deploy.runtime.cuda_device import first_gpu  # noqa: E402
from dflash_deploy.runtime.decoder import Decoder, Settings  # noqa: E402
from dflash_deploy.runtime.engine import GraphRunner  # noqa: E402
from dflash_deploy.runtime.ort_engine import runner_from_onnx  # noqa: E402
from dflash_deploy.runtime.text import TextCodec  # noqa: E402
from dflash_deploy.runtime.trt_engine import runner_from_engine  # noqa: E402
from dflash_deploy.runtime.trt_graphs import CudaGraphs  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*sorted((ROOT / "runtime").glob("trt_*.py")), ROOT / "runtime" / "cuda_device.py"]
PROMPT_IDS = (7, 23, 61)  # lengths of prompts for a pair without a tokenizer


@dataclass(frozen=True)
class Subject:
    """A bundle to look at.

    Attributes:
        name: for the report.
        bundle: the directory.
        reference: a bundle of the same pair that ONNX Runtime computes on the CPU; None if there is none.
        timed: whether its speed says anything.
    """

    name: str
    bundle: Path
    reference: Path | None
    timed: bool = True


@dataclass
class Run:
    """What was asked for, and what was found."""

    backend: str
    seconds: float
    prompts: int
    tokens: int
    build: bool
    errors: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def late(self, what: str, share: float = 1.0) -> bool:
        """Whether there is no time left for something; then it is noted."""
        if time.monotonic() < _START + share * self.seconds:
            return False
        self.left_out.append(what)
        print(f"out of time: {what} is left out")
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, print it, write the record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--backend", choices=tuple(BACKENDS), help="default: what is installed for this GPU")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--seconds", type=float, default=280.0, help="time for the whole run")
    parser.add_argument("--built", action="store_true", help="the bundles have their engines")
    parser.add_argument("--record", type=Path, help="file to write the record of the run to")
    options = parser.parse_args(argv)
    try:
        gpu = first_gpu()
        backend = options.backend or choose_backend(gpu.compute_capability)
    except DflashError as error:
        print(error, file=sys.stderr)
        return 2
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    print(f"{gpu.name}, compute capability {gpu.compute_capability}, {backend}; {versions}")
    run = Run(backend, options.seconds, options.prompts, options.tokens, not options.built)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(options.bundle, Path(folder), run):
            if run.late(subject.name, 0.9):
                continue
            print(f"\n== {subject.name}")
            report: dict[str, Any] = {"name": subject.name}
            found.append(report)
            try:
                examine(subject, Path(folder) / "work", run, report)
            except Exception as error:  # the other bundles still tell something
                traceback.print_exc()
                run.errors.append(f"{subject.name}: {type(error).__name__}: {error}")
            sys.stdout.flush()
    failed = bool(run.errors) or not found or any(not report.get("passed") for report in found)
    if options.record:
        record = {
            "part": "runtime-engines",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": gpu.name,
            "command": "make test-gpu PART=engines",
            "versions": versions,
            "passed": not failed,
            "source": {
                path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in SOURCES
            },
            "figures": {
                "backend": backend,
                "compute_capability": gpu.compute_capability,
                "seconds": round(time.monotonic() - _START, 1),
                "bundles": found,
                "errors": run.errors,
                "left_out": run.left_out,
            },
        }
        options.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\n{'FAILED' if failed else 'ok'} after {time.monotonic() - _START:.0f} s")
    for error in run.errors:
        print(error)
    return int(failed)


# ------------------------------------------------------------------------------------------- what


PACKAGES = ("tensorrt", "tensorrt-rtx-cu13", "cuda-bindings", "onnxruntime", "onnxruntime-gpu", "numpy")


def installed_version(name: str) -> str | None:
    """The version of a distribution that is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_backend(capability: str) -> str:
    """The backend that is installed and builds for a GPU.

    Raises:
        ProviderError: there is none.
    """
    for backend in BACKENDS.values():
        builds = not backend.generations or capability in backend.generations
        if builds and importlib.util.find_spec(backend.module) is not None:
            return backend.name
    raise ProviderError(f"backend: none is installed that builds for compute capability {capability}")


def subjects(given: Sequence[Path], folder: Path, run: Run) -> list[Subject]:
    """The bundles that were given, or new ones."""
    if given:
        halves = {path: manifest_from_bundle(path).dtype for path in given}
        exact = next((path for path, dtype in halves.items() if dtype is DType.FLOAT32), None)
        return [
            Subject(path.name, path, path if dtype is not DType.BFLOAT16 else exact)
            for path, dtype in halves.items()
        ]
    try:
        return [*tiny_subjects(folder), demo_subject(folder)]
    except ImportError as error:
        run.errors.append(f"making bundles: {error}; install what `make test-gpu` does, or give --bundle")
        return []


def tiny_subjects(folder: Path) -> list[Subject]:
    """A tiny random pair in every dtype. Head sizes are multiples of 8, as fused attention wants them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from dflash_deploy.exporter.export import export_bundle
    from originals import tiny_target, zlab_draft

    target, draft = folder / "target", folder / "draft"
    size = {"hidden_size": 32, "vocab_size": 160, "max_position_embeddings": 128, "head_dim": 16}
    model = tiny_target(31, target, num_hidden_layers=2, **size)
    conv = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
    full = {"layer_types": ["full_attention"], "use_sliding_window": False, "head_dim": 16, "block_size": 8}
    zlab_draft(
        31,
        draft,
        target=model.config,
        dflash2=True,
        num_hidden_layers=1,
        target_layer_ids=[0],
        **full,
        **conv,
    )
    made = {}
    for dtype in DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16:
        made[dtype] = folder / f"tiny-{dtype.value}"
        export_bundle(str(target), str(draft), made[dtype], dtype)
    exact = made[DType.FLOAT32]
    return [
        Subject(path.name, path, exact if dtype is DType.BFLOAT16 else path, timed=False)
        for dtype, path in made.items()
    ]


def demo_subject(folder: Path) -> Subject:
    """The demo's pair in float16."""
    from dflash_deploy import demo
    from dflash_deploy.demo.run import find_target
    from dflash_deploy.exporter.export import export_bundle

    bundle = folder / "demo-float16"
    export_bundle(str(find_target()), str(demo.DRAFT), bundle, DType.FLOAT16)
    return Subject(bundle.name, bundle, bundle)


# ------------------------------------------------------------------------------------- one bundle


def examine(subject: Subject, work: Path, run: Run, report: dict[str, Any]) -> None:
    """Build, compare and time one bundle."""
    bundle = subject.bundle
    if run.build:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(bundle, work, copy_function=link)
        bundle = work
        began = time.perf_counter()
        capabilities = (first_gpu().compute_capability,) if BACKENDS[run.backend].generations else ()
        build_engines(bundle, run.backend, capabilities)
        report["build_s"] = round(time.perf_counter() - began, 1)
    manifest = manifest_from_bundle(bundle)
    report["dtype"] = manifest.dtype.value
    ours = {e.graph: e for e in manifest.engines.values() if e.backend == run.backend}
    report["engine_mb"] = {g: round(manifest.files[e.file].bytes / 1e6, 1) for g, e in ours.items()}
    report["flags"] = {g: [flag.value for flag in e.flags] for g, e in ours.items()}
    print(f"{report['dtype']}, engines {report['engine_mb']} MB, built in {report.get('build_s')} s")
    codec = TextCodec.from_bundle(bundle, manifest.tokenizer) if manifest.tokenizer.file else None
    prompts = prompt_ids(manifest, codec, run.prompts)
    passed = True
    with over_engines(bundle, manifest, codec, run.backend, CudaGraphs.ON) as decoder:
        if subject.reference is None:
            run.left_out.append(f"{subject.name}: comparison, it needs the same pair in float32, too")
        else:
            with over_onnx(subject.reference) as reference:
                report["stages"] = compare_stages(manifest, reference, decoder, prompts[0])
                report["tokens"] = compare_tokens(manifest, reference, decoder, prompts, run.tokens)
            passed = all(stage["passed"] for stage in (*report["stages"], report["tokens"]))
        report["graphs"] = {
            name: {"captures": r.graphs.captures, "replays": r.graphs.replays, "problem": r.graphs.problem}
            for name, r in ((TARGET, decoder._target), (DRAFT, decoder._draft))
        }
        print(f"captured passes: {report['graphs']}")
        if subject.timed and not run.late(f"{subject.name}: speed", 0.95):
            report["speed"] = {"graphs on": speed(decoder, prompts, run)}
    if "speed" in report and not run.late(f"{subject.name}: speed without graphs"):
        with over_engines(bundle, manifest, codec, run.backend, CudaGraphs.OFF) as decoder:
            report["speed"]["graphs off"] = speed(decoder, prompts, run)
    report["passed"] = passed


def link(source: str, target: str) -> str:
    """A copy that takes no room, where the disk can make one."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
    return target


def prompt_ids(manifest: Manifest, codec: TextCodec | None, count: int) -> list[list[int]]:
    """Token ids of some prompts."""
    if codec is not None:
        from dflash_deploy.demo import demo_prompts

        return [
            list(codec.encode_prompt(text, codec.has_chat_template, None)) for text in demo_prompts()[:count]
        ]
    draw = np.random.default_rng(5)
    return [draw.integers(0, manifest.target.vocab_size, size).tolist() for size in PROMPT_IDS[:count]]


def decoder_over(
    manifest: Manifest, target: GraphRunner, draft: GraphRunner, codec: TextCodec | None
) -> Decoder:
    """A decoder that verifies every proposal."""
    limits = target.limits
    longest = manifest.max_length if limits is None else limits.max_length
    return Decoder(manifest, target, draft, codec, Settings(manifest.draft.proposals + 1, True, longest))


def over_engines(
    bundle: Path, manifest: Manifest, codec: TextCodec | None, backend: str, graphs: CudaGraphs
) -> Decoder:
    """The bundle over its engines."""
    runners = [
        runner_from_engine(bundle, manifest, graph, backend, cuda_graphs=graphs) for graph in (TARGET, DRAFT)
    ]
    return decoder_over(manifest, *runners, codec)


def over_onnx(bundle: Path) -> Decoder:
    """A bundle over ONNX Runtime on the CPU."""
    manifest = manifest_from_bundle(bundle)
    runners = [runner_from_onnx(bundle, manifest.graphs[graph]) for graph in (TARGET, DRAFT)]
    return decoder_over(manifest, *runners, None)


# ----------------------------------------------------------------------------------------- stages


class Sides:
    """The same passes on both sides, with the reference's features for the draft."""

    def __init__(self, manifest: Manifest, graph: str, reference: GraphRunner, engine: GraphRunner):
        self.limits = TOLERANCES[manifest.dtype]
        self.runners = (reference, engine)
        capacity = manifest.max_length + manifest.slack_slots
        self.caches = [r.new_cache(r.limits.capacity if r.limits else capacity) for r in self.runners]
        self.graph = graph

    def run(self, inputs: dict[str, Any], wanted: list[str]) -> tuple[dict[str, np.ndarray], ...]:
        """Outputs of both by name."""
        return tuple(
            {n: t.to_host().copy() for n, t in zip(wanted, r.run(c, inputs, wanted), strict=True)}
            for r, c in zip(self.runners, self.caches, strict=True)
        )

    def values(self, stage: str, kind: Kind, sides: tuple[dict[str, np.ndarray], ...], name: str) -> Any:
        """Compare one output; gives its stage's report as JSON, and prints it."""
        compared = Values(f"{stage} {name}", self.limits[kind], logits=kind is Kind.LOGITS)
        compared.add(sides[0][name], sides[1][name])
        return shown(compared.report().to_dict())


def shown(stage: dict[str, Any]) -> dict[str, Any]:
    """Print a stage; keeps of it what a record needs."""
    keys = ("name", "passed", "samples", "relative", "cosine", "kl", "agreement", "reasons", "divergences")
    kept = {key: stage[key] for key in keys if stage.get(key) not in (None, [], ())}
    kept.setdefault("passed", False)
    numbers = {k: f"{v:.2e}" for k, v in kept.items() if isinstance(v, float)}
    print(f"  {'ok  ' if kept['passed'] else 'FAIL'} {kept['name']:<24} {numbers} {kept.get('reasons', '')}")
    return kept


def compare_stages(
    manifest: Manifest, reference: Decoder, decoder: Decoder, prompt: list[int]
) -> list[dict[str, Any]]:
    """Prefill, verify and draft, every output of each, with the same inputs on both sides."""
    found = []
    info = manifest.draft
    target = Sides(manifest, TARGET, reference._target, decoder._target)
    draft = Sides(manifest, DRAFT, reference._draft, decoder._draft)
    answer = list(reference.generate(prompt, info.proposals + 2).ids)
    tokens = [*prompt, *answer][: len(prompt) + info.proposals + 1]
    passes = [("prefill", 0, prompt), ("verify", len(prompt), tokens[len(prompt) :])]
    # Rounds come again: the third and fourth verify pass are captured ones, if any are.
    passes += [("replay", len(prompt), tokens[len(prompt) :])] * 3
    slots = np.arange(64 * -(-(len(tokens) + info.block_size + 64) // 64), dtype=np.int64)
    slots = slots[: manifest.max_length + manifest.slack_slots]
    for stage, start, ids in passes:
        wanted = np.arange(max(0, len(ids) - info.proposals - 1), len(ids))
        rows = wanted[-2:] if stage == "prefill" else wanted
        inputs = {
            INPUT_IDS: np.array([ids]),
            START: np.array([start]),
            SLOTS: slots,
            WANTED_ROWS: rows[None],
        }
        sides = target.run(inputs, [LOGITS, FEATURES])
        found.append(target.values(stage, Kind.LOGITS, sides, LOGITS))
        found.append(target.values(stage, Kind.TAP, sides, FEATURES))
        if stage == "replay":
            continue
        anchor = start + len(ids)
        block = np.full((1, info.block_size), info.mask_token_id)
        block[0, 0] = int(sides[0][LOGITS][0, -1].argmax())
        context = {
            FEATURES: sides[0][FEATURES],
            START: np.array([start]),
            ANCHOR: np.array([anchor]),
            BLOCK_IDS: block,
            BLOCK_ROWS: np.array([info.block_size]),
            SLOTS: slots,
        }
        found.append(compare_draft(manifest, draft, context, stage))
    return found


def compare_draft(manifest: Manifest, draft: Sides, context: dict[str, Any], stage: str) -> dict[str, Any]:
    """What the draft's proposals are chosen by: logits, or scores from one row's candidates to the next's."""
    name, kind = f"draft after {stage}", Kind.SCORES
    if manifest.draft.selector is None:
        return draft.values(name, kind, draft.run(context, [DRAFT_LOGITS]), DRAFT_LOGITS)
    one, other = draft.run(context, [CANDIDATES, EDGE_SCORES])
    same = (one[CANDIDATES] == other[CANDIDATES]).all((0, 2))  # [P]
    # A score means something only if the candidates of its row and of the one before are the same ones. Near
    # ties may change places; the stage fails if nothing is left to compare.
    rows = [row for row in range(len(same)) if same[row] and (row == 0 or same[row - 1])]
    sides = tuple({EDGE_SCORES: side[EDGE_SCORES][:, rows]} for side in (one, other))
    return draft.values(f"{name}, {len(rows)} of {len(same)} rows", kind, sides, EDGE_SCORES)


def compare_tokens(
    manifest: Manifest, reference: Decoder, decoder: Decoder, prompts: list[list[int]], count: int
) -> dict[str, Any]:
    """Whole generations: the same tokens, or the margin of the first that differs."""
    compared = Choices("tokens", TOLERANCES[manifest.dtype][Kind.GENERATION])
    for index, prompt in enumerate(prompts):
        expected = reference.generate(prompt, count).ids
        got = decoder.generate(prompt, count).ids
        pairs = enumerate(zip(expected, got, strict=False))
        first = next((place for place, (one, other) in pairs if one != other), None)
        if first is None:
            compared.add(f"prompt {index}", len(expected), len(got))
            continue
        where = f"prompt {index}, token {first}"
        compared.add_scored(where, next_scores(manifest, reference, [*prompt, *expected[:first]]), got[first])
    return shown(compared.report().to_dict())


def next_scores(manifest: Manifest, reference: Decoder, ids: list[int]) -> np.ndarray:
    """The reference's logits behind some tokens."""
    runner = reference._target
    cache = runner.new_cache(manifest.max_length + manifest.slack_slots)
    rows = np.array([[len(ids) - 2, len(ids) - 1]]) if len(ids) > 1 else np.zeros((1, 1), np.int64)
    inputs = {
        INPUT_IDS: np.array([ids]),
        START: np.array([0]),
        SLOTS: np.arange(cache.capacity),
        WANTED_ROWS: rows,
    }
    (logits,) = runner.run(cache, inputs, [LOGITS])
    return logits.to_host()[0, -1].copy()


# ------------------------------------------------------------------------------------------ speed


def speed(decoder: Decoder, prompts: list[list[int]], run: Run) -> dict[str, Any]:
    """Plain and speculative tokens per second, after everything has run once."""
    for prompt in prompts[:2]:
        decoder.generate(prompt, run.tokens)
    figures = bench_decoder(decoder, prompts, run.tokens)
    kept = {
        way: {
            key: round(figures[way][key], 2)
            for key in ("tokens_per_s", "prefill_ms", "verify_ms", "draft_ms", "other_ms")
            if key in figures[way]
        }
        for way in ("plain", "plain_exact", "speculative")
    }
    keys = ("speedup", "bound", "acceptance_length")
    found = {**kept, **{key: round(figures[key], 3) for key in keys}}
    found["tokens_identical"] = figures["tokens_identical"]
    print(f"  graphs {decoder.effective['cuda_graphs']}: {found}")
    return found


if __name__ == "__main__":
    sys.exit(main())
