"""The figures of `compare` and `sweep` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .own import OWN_WAYS, PLAIN_EXACT, SPECULATIVE

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_PLACES = 8  # of a block, in one line


def report_parts(report: dict[str, Any]) -> Iterator[Table | str]:
    """Tables and lines of a report of `compare`, to be printed one after the other."""
    yield _ways(report)
    for bundle in report["bundles"]:
        yield from _bundle_lines(bundle)
    for peer in report["peers"]:
        note = f", {peer['note']}" if peer["note"] else ""
        yield f"{peer['name']}: {peer['version']}, {peer['precision']}, opened in {_seconds(peer)}{note}"
    if report["context"]:
        yield _contexts(report["context"])
    yield _machine(report)


def _ways(report: dict[str, Any]) -> Table:
    from rich.table import Table

    settings = report["settings"]
    length = {"answer": "up to ", "full": ""}[settings["length"]]
    table = Table(
        title=f"{settings['prompt_count']} prompts ({settings['prompts']}), {length}"
        f"{settings['max_new_tokens']} tokens, {settings['verify_rows']} rows verified, "
        f"median of {settings['repeats']}"
    )
    table.add_column("")
    for heading in ("tokens/s", "with prompt", "first ms", "rounds", "target ms", "draft ms", "other"):
        table.add_column(heading, justify="right")
    table.add_column("tokens")
    for bundle in report["bundles"]:
        for way in OWN_WAYS:
            table.add_row(
                f"{bundle['label']} {way.replace('_', ' ')}",
                *_cells(bundle[way]),
                _tokens(report, bundle) if way == PLAIN_EXACT else "",
                style="bold" if way == SPECULATIVE else None,
            )
        table.add_section()
    for peer in report["peers"]:
        table.add_row(peer["name"], *_cells(peer), _unlike(peer["unlike_first_bundle"]))
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    forms = {
        "tokens_per_s": "{:.1f}",
        "end_to_end_tokens_per_s": "{:.1f}",
        "first_token_ms": "{:.0f}",
        "rounds": "{:d}",
        "verify_ms": "{:.2f}",
        "draft_ms": "{:.2f}",
        "other_share": "{:.1%}",
    }
    return [form.format(figures[key]) if key in figures else "" for key, form in forms.items()]


def _tokens(report: dict[str, Any], bundle: dict[str, Any]) -> str:
    first = bundle["label"] == report["bundles"][0]["label"]
    return "the measure" if first else _unlike(bundle["unlike_first_bundle"])


def _unlike(found: dict[str, Any]) -> str:
    """How the tokens compare with the first bundle's exact plain ones."""
    if not found["prompts"]:
        return "the same"
    prompts = len(found["first_tokens"])
    return f"{found['prompts']} of {prompts} prompts differ, from token {found['first_token']} on"


def _bundle_lines(bundle: dict[str, Any]) -> Iterator[str]:
    same = "identical to plain" if bundle["tokens_identical"] else "NOT IDENTICAL to plain"
    yield (
        f"{bundle['label']}: speedup {bundle['speedup']:.2f} ({bundle['bound_reached']:.0%} of the bound "
        f"{bundle['bound']:.2f}), acceptance length {bundle['acceptance_length']:.3f}, tokens {same}, "
        f"opened in {_seconds(bundle)}"
    )
    shares = [f"{share:.0%}" for share in bundle["acceptance_by_position"][:_SHOWN_PLACES]]
    if shares:
        yield f"  accepted by position: {' '.join(shares)}"
    if bundle["draft_failures"]:
        yield f"  the draft failed {bundle['draft_failures']} times; these answers went on plainly"


def _contexts(contexts: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds a token: a row for each way, a column for each length."""
    from rich.table import Table

    table = Table(title="ms a token behind a context of so many tokens")
    table.add_column("")
    rows: dict[str, list[str]] = {}
    for context in contexts:
        table.add_column(str(context["length"]), justify="right")
        for bundle in context["bundles"]:
            for way in OWN_WAYS:
                cells = rows.setdefault(f"{bundle['label']} {way.replace('_', ' ')}", [])
                speedup = f" ({bundle['speedup']:.2f} x)" if way == SPECULATIVE else ""
                cells.append(f"{bundle[way]['ms_per_token']:.2f}{speedup}")
        for peer in context["peers"]:
            rows.setdefault(peer["name"], []).append(f"{peer['ms_per_token']:.2f}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    wrong = [c for c in contexts if not all(b["tokens_identical"] for b in c["bundles"])]
    if wrong:
        table.caption = f"NOT IDENTICAL to plain behind {', '.join(str(c['length']) for c in wrong)} tokens"
    return table


def sweep_parts(report: dict[str, Any]) -> Iterator[Table | str]:
    """Tables and lines of a report of `sweep`: one table a bundle, the fastest number of rows marked."""
    from rich.table import Table

    cells = report["cells"]
    for label in dict.fromkeys(cell["bundle"] for cell in cells):
        own = [cell for cell in cells if cell["bundle"] == label]
        precision = f"int{own[0]['bits']}" if own[0]["quantized"] else own[0]["dtype"]
        table = Table(title=f"{label} ({precision}): tokens/s by rows verified in a round, speedup below")
        for heading in ("context", "plain", *(str(n) for n in dict.fromkeys(cell["rows"] for cell in own))):
            table.add_column(heading, justify="right")
        for length in dict.fromkeys(cell["context"] for cell in own):
            row = [cell for cell in own if cell["context"] == length]
            best = max(row, key=lambda cell: float(cell["tokens_per_s"]))
            texts = [
                f"{cell['tokens_per_s']:.1f}{'*' if cell is best else ''}\n{cell['speedup']:.2f} x"
                for cell in row
            ]
            table.add_row(str(length or "none"), f"{row[0]['plain_tokens_per_s']:.1f}", *texts)
        yield table
    wrong = [cell for cell in cells if not cell["tokens_identical"]]
    same = "identical to plain in all cells" if not wrong else f"NOT IDENTICAL to plain in {len(wrong)} cells"
    yield f"* the fastest of its line; tokens {same}"
    yield _machine(report)


def _machine(report: dict[str, Any]) -> str:
    settings = report["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['cpu']}, {_threads(settings)}; {versions}"


def _threads(settings: dict[str, Any]) -> str:
    if settings["threads"] is None:
        return str(settings["provider"])
    return f"{settings['provider']}, {settings['threads']} threads on {settings['cpus']} CPUs"


def _seconds(part: dict[str, Any]) -> str:
    return f"{part['open_ms'] / 1000.0:.1f} s"
