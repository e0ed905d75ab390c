"""`dflash export`, `quantize` and `parity`: bundles, and the proof of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .shared import (
    bundle_argument,
    let_torch_sleep,
    progress_on_screen,
    prompts_from_file,
    text_from_file,
    was_given,
)

_DTYPES = ("float32", "float16", "bfloat16")

_perplexity = click.option(
    "--max-perplexity-ratio",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.02,
    show_default=True,
    help="Refuse rounded weights that make the target's perplexity more than so many times larger.",
)


@click.command("export")
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
@click.option(
    "--round-graph",
    is_flag=True,
    help="Also write one graph for a whole round, for a loop of your own; see docs/round.md.",
)
@click.option("--dry-run", is_flag=True, help="Print sizes and what would be refused; write nothing.")
def export_command(
    target: str,
    draft: str,
    output: Path,
    dtype: str,
    max_length: int | None,
    quantize: str | None,
    max_perplexity_ratio: float,
    round_graph: bool,
    dry_run: bool,
) -> None:
    """Turn a target and its draft into a bundle."""
    from ..bundle.tensors import DType

    if quantize is not None and dtype != "float32":
        raise click.UsageError(f"--quantize {quantize} rounds float32 weights; leave --dtype {dtype} out")
    if quantize is None and was_given("max_perplexity_ratio"):
        raise click.UsageError("--max-perplexity-ratio: belongs to --quantize")
    if dry_run:
        from ..exporter.export import check_space
        from ..exporter.forecast import forecast_export

        forecast = forecast_export(target, draft, output, DType(dtype), max_length, progress_on_screen())
        click.echo("\n".join(forecast.lines(rounded=quantize is not None)))
        check_space(forecast.bytes, forecast.free_bytes)
        return
    if quantize is not None:
        from ..exporter.quantize.bundle import export_quantized

        bits = int(quantize.removeprefix("int"))
        manifest = export_quantized(
            target, draft, output, max_length, max_perplexity_ratio, progress_on_screen(), bits, round_graph
        )
        _print_quality(output, manifest)
        return
    from ..exporter.export import export_bundle

    manifest = export_bundle(
        target, draft, output, DType(dtype), max_length, progress_on_screen(), round_graph
    )
    _print_size(output, manifest)


@click.command("quantize")
@bundle_argument
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
    help="Of the weights of the target's layers; 4 is faster for single tokens, and less exact. 32 leaves "
    "the target as it is, for a cheaper draft alone.",
)
@click.option(
    "--draft-bits",
    type=click.Choice(["8", "32"]),
    help="Of the draft's weights [default: 8, or 32 with --bits 32].",
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
    draft_bits: str | None,
    max_perplexity_ratio: float,
    draft_vocabulary: int | None,
    draft_vocabulary_text: Path | None,
) -> None:
    """Make a float32 bundle smaller and faster for the CPU: int8 or int4 weights, or a cheaper draft."""
    from ..exporter.quantize.bundle import FLOAT_BITS, quantize_bundle

    if draft_vocabulary is None and draft_vocabulary_text is not None:
        raise click.UsageError("--draft-vocabulary-text: say with --draft-vocabulary how many tokens to keep")
    drafts = None if draft_bits is None else int(draft_bits)
    if int(bits) == FLOAT_BITS:
        if draft_vocabulary is None and drafts in (None, FLOAT_BITS):
            raise click.UsageError(
                f"--bits {bits} leaves the target as it is: give --draft-bits 8 or --draft-vocabulary"
            )
        if was_given("max_perplexity_ratio"):
            raise click.UsageError(
                f"--max-perplexity-ratio: --bits {bits} leaves the target as it is; leave it out"
            )
    elif drafts == FLOAT_BITS:
        raise click.UsageError(f"--draft-bits {drafts}: belongs to --bits {FLOAT_BITS}")
    words, said = (None if file is None else text_from_file(file) for file in (text, draft_vocabulary_text))
    manifest = quantize_bundle(
        bundle,
        output,
        words,
        max_perplexity_ratio,
        progress_on_screen(),
        int(bits),
        draft_vocabulary,
        said,
        drafts,
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


@click.command("parity")
@bundle_argument
@click.option("--target", metavar="PATH|ID", help="The target's checkpoint [default: where the bundle says].")
@click.option("--draft", metavar="PATH|ID", help="The draft's checkpoint [default: where the bundle says].")
@click.option("--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the whole report here.")
def parity_command(
    bundle: Path, target: str | None, draft: str | None, prompts: Path | None, json_file: Path | None
) -> None:
    """Compare a bundle with the originals; exit code 1 if it differs."""
    let_torch_sleep()
    from ..bundle.errors import ParityError
    from ..bundle.places import check_place, write_json
    from ..exporter.parity.run import parity_report

    check_place(json_file)
    texts = prompts_from_file(prompts)
    chosen = {} if prompts is None else {"most_prompts": len(texts)}  # of the demo's, the first few will do
    report = parity_report(bundle, target, draft, texts, progress_on_screen(), **chosen)
    for line in report.lines():
        click.echo(line)
    if json_file is not None:
        write_json(json_file, report.to_dict())
    if not report.passed:
        sys.exit(ParityError.exit_code)
