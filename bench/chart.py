"""A chart of `compare`'s figures. The same figures give the same file."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

from ..bundle.errors import OutputError, ProviderError, field_error
from ..bundle.files import atomic_file
from ..bundle.places import check_place
from .own import PLAIN, SPECULATIVE

SUFFIXES = (".png", ".svg")
_COLOURS = {PLAIN: "#9db8d9", SPECULATIVE: "#1f5fa8"}
_PEER_COLOUR = "#c4c4c4"
_HASH_SALT = "dflash"  # ids inside an SVG come from it, else from chance
_CAPTION_LETTERS = 110


def check_chart(file: Path | None) -> None:
    """Refuse a chart that cannot be drawn before the work that should end in it; None is none.

    Raises:
        OutputError: its name ends in something else, or it cannot be written.
        ProviderError: matplotlib is not installed.
    """
    if file is None:
        return
    if file.suffix not in SUFFIXES:
        raise field_error(OutputError, "chart", str(file), f"a name that ends in {' or '.join(SUFFIXES)}")
    check_place(file)
    if importlib.util.find_spec("matplotlib") is None:
        raise ProviderError("chart: matplotlib is not installed; pip install 'dflash-deploy[bench]'")


def write_chart(report: dict[str, Any], file: Path) -> None:
    """Draw tokens/s of plain and speculative decoding of each bundle, and of other programs.

    Raises:
        OutputError: it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bars = chart_bars(report)
    height = 1.5 + 0.42 * len(bars)
    with mpl.rc_context({"svg.hashsalt": _HASH_SALT, "font.size": 10}):
        figure = Figure(figsize=(8.0, height), layout="constrained")
        axes = figure.add_subplot()
        drawn = axes.barh(
            [name for name, _, _ in bars], [value for _, value, _ in bars], color=[c for _, _, c in bars]
        )
        axes.bar_label(drawn, fmt="%.1f", padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title("tokens per second, decoding (more is better)", loc="left", fontsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        figure.supxlabel(
            textwrap.fill(chart_caption(report), _CAPTION_LETTERS),
            fontsize=7.5,
            color="#555555",
            x=0.01,
            ha="left",
        )
        # What varies from run to run, or names this library's release, stays out of the file.
        metadata = {"Date": None, "Creator": None} if file.suffix == ".svg" else {"Software": None}
        try:
            with atomic_file(file) as path:
                figure.savefig(path, format=file.suffix[1:], dpi=150, metadata=metadata)
        except OSError as cause:
            raise OutputError(f"chart: cannot write {str(file)!r} ({cause.strerror})") from cause


def chart_bars(report: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Name, tokens/s and colour of each bar: bundles in their order, then programs, the fastest first."""
    bars = [
        (f"{bundle['label']}, {way}", bundle[way]["tokens_per_s"], _COLOURS[way])
        for bundle in report["bundles"]
        for way in (PLAIN, SPECULATIVE)
    ]
    peers = sorted(report["peers"], key=lambda peer: -float(peer["tokens_per_s"]))
    return bars + [(peer["name"], peer["tokens_per_s"], _PEER_COLOUR) for peer in peers]


def chart_caption(report: dict[str, Any]) -> str:
    """The machine and the settings."""
    settings = report["settings"]
    threads = "" if settings["threads"] is None else f", {settings['threads']} threads"
    speedups = "; ".join(f"{b['label']}: {b['speedup']:.2f} x plain" for b in report["bundles"])
    return (
        f"{report['cpu']}{threads}. {settings['prompt_count']} prompts ({settings['prompts']}), "
        f"{settings['new_tokens']} tokens in all, greedy, median of {settings['repeats']}. {speedups}."
    )
