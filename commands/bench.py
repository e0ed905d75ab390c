"""`dflash bench`. It parses, checks what can be checked before the work, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import backend_option, provider_option, remark_on_draft, threads_option, verify_rows_option
from .shared import console_on_screen, was_given

if TYPE_CHECKING:
    from ..bench.opened import BenchSettings
    from ..bench.prompts import PromptSet, RandomPrompts

_FILE_COLUMNS = 140
_PEERS_CHOICES = ("all-installed",)


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    if value is None:
        return ()
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        expected = "expected different numbers >= 1 with commas between them"
        raise click.BadParameter(f"got {value!r}, {expected}", context, parameter)
    return counts


@click.command("bench")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option(
    "--prompts",
    metavar="SET|FILE",
    help="demo, humaneval, random (token ids that nothing can foresee), or a text file, one prompt a line "
    "[default: demo]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N prompts only.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of random prompts.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, metavar="N")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs of each prompt and way; the median counts.",
)
@click.option(
    "--context",
    "contexts",
    callback=_counts,
    metavar="N,N,...",
    help="Time a token behind so much context as well.",
)
@click.option("--sweep", is_flag=True, help="Time every number of rows verified in a round instead.")
@click.option("--rows", callback=_counts, metavar="N,N,...", help="Of --sweep [default: all that there are]")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME",
    help="Time another program on the same tokens: transformers, transformers-prompt-lookup, "
    "onnxruntime-genai, onnxruntime-genai-int4 or llama.cpp; may be repeated.",
)
@click.option("--peers", "all_peers", type=click.Choice(_PEERS_CHOICES), help="All of them that are there.")
@click.option(
    "--target", type=click.Path(path_type=Path), metavar="PATH", help="The target, for other programs."
)
@click.option(
    "--peer-cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where other programs keep a model that they build of the target.",
)
@backend_option
@provider_option
@verify_rows_option
@threads_option
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here.")
@click.option("--chart", type=click.Path(path_type=Path), help="Draw tokens/s here: a .png or .svg file.")
def bench_command(
    bundles: tuple[Path, ...],
    prompts: str | None,
    limit: int | None,
    seed: int,
    sweep: bool,
    rows: tuple[int, ...],
    peers: tuple[str, ...],
    all_peers: str | None,
    target: Path | None,
    peer_cache: Path | None,
    json_file: Path | None,
    chart: Path | None,
    **others: Any,
) -> None:
    """Time plain and speculative decoding of the same prompts, of one bundle or several.

    With --peer other programs decode the same tokens in the same run. --sweep finds out where a block pays.
    """
    from ..bench.chart import check_chart
    from ..bench.opened import BenchSettings
    from ..bench.peers import choose_peers
    from ..bench.prompts import RANDOM, prompt_set
    from ..bundle.places import check_place

    asked = [*peers, *([all_peers] if all_peers else [])]
    if sweep and (asked or chart is not None or others["verify_rows"] is not None):
        raise click.UsageError("--sweep: leave --peer, --peers, --chart and --verify-rows out")
    if rows and not sweep:
        raise click.UsageError("--rows: belongs to --sweep; --verify-rows sets the rows of a run")
    if not asked and (target is not None or peer_cache is not None):
        raise click.UsageError("--target, --peer-cache: belong to --peer and --peers")
    if prompts != RANDOM and was_given("seed"):
        raise click.UsageError("--seed: belongs to --prompts random")
    check_place(json_file)
    check_chart(chart)
    chosen_peers = choose_peers(asked, target, peer_cache)
    chosen = prompt_set(prompts, limit, seed)
    settings = BenchSettings(**others)
    if sweep:
        _sweep(bundles, chosen, settings, rows, json_file)
        return
    from ..bench.peers.client import PeerPlace

    place = None if target is None else PeerPlace(target, peer_cache)
    _compare(bundles, chosen, settings, (chosen_peers, place), json_file, chart)


def _compare(
    bundles: tuple[Path, ...],
    prompts: PromptSet | RandomPrompts,
    settings: BenchSettings,
    peers: tuple[list[str], Any],
    json_file: Path | None,
    chart: Path | None,
) -> None:
    from ..bench.chart import write_chart
    from ..bench.compare import compare
    from ..bench.table import report_parts
    from ..bundle.places import write_json

    with _Counter() as counter:
        report = compare(bundles, prompts, settings, *peers, progress=counter.told)
    console = console_on_screen(_FILE_COLUMNS)
    for part in report_parts(report):
        console.print(part, soft_wrap=isinstance(part, str))
    for bundle in report["bundles"]:
        if not bundle["draft_failures"]:
            label = bundle["label"] if len(report["bundles"]) > 1 else ""
            remark_on_draft(bundle["rounds"], bundle["acceptance_length"], label)
    if json_file is not None:
        write_json(json_file, report)
    if chart is not None:
        write_chart(report, chart)


def _sweep(
    bundles: tuple[Path, ...],
    prompts: PromptSet | RandomPrompts,
    settings: BenchSettings,
    rows: tuple[int, ...],
    json_file: Path | None,
) -> None:
    from ..bench.sweep import sweep
    from ..bench.table import sweep_parts
    from ..bundle.places import write_json

    with _Counter() as counter:
        report = sweep(bundles, prompts, settings, rows, progress=counter.told)
    console = console_on_screen(_FILE_COLUMNS)
    for part in sweep_parts(report):
        console.print(part, soft_wrap=isinstance(part, str))
    if json_file is not None:
        write_json(json_file, report)


class _Counter:
    """Counts runs on a terminal's standard error; elsewhere it says nothing."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True, highlight=False).status("opening")

    def told(self, done: int, total: int) -> None:
        """So many runs of so many are done."""
        self._status.update(f"{done} of {total} runs")

    def __enter__(self) -> _Counter:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()
