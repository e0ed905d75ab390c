"""`dflash inspect`, `doctor` and `demo`: what there is, and what it can do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from .shared import console_on_screen, let_torch_sleep, progress_on_screen

_DEMOS = ("dflash2", "simple")


@click.command("inspect")
@click.argument("source", metavar="BUNDLE|CHECKPOINT")
@click.option("--target", metavar="PATH|ID", help="Say whether this target and the draft SOURCE fit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(source: str, target: str | None, as_json: bool) -> None:
    """Say what it is, and what would go wrong with it.

    The exit code is 2 for a checkpoint that cannot be exported, and for a target that does not fit.
    """
    from ..bundle.errors import UserError
    from ..bundle.manifest import MANIFEST

    unfit = False
    if (Path(source) / MANIFEST).is_file():
        from ..runtime.inspect_bundle import describe_bundle, description_lines

        if target is not None:
            raise click.UsageError(
                f"--target: {source} is a bundle and holds its target; leave the option out"
            )
        found = describe_bundle(Path(source))
        lines = description_lines(found)
    else:
        from ..exporter.inspect import inspect_checkpoint, stands_in_the_way
        from ..exporter.inspect_lines import inspection_lines

        found = inspect_checkpoint(source, target)
        lines = inspection_lines(found)
        unfit = stands_in_the_way(found)
    click.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else "\n".join(lines))
    if unfit:
        sys.exit(UserError.exit_code)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(as_json: bool) -> None:
    """Say which engines this machine really has."""
    from ..runtime.doctor import examine_machine

    report = examine_machine()
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        click.echo(f"{finding.status.mark:<3} {finding.name:<{width}}  {finding.text}")


@click.command("demo")
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
    let_torch_sleep()
    if family == "simple":
        from ..demo.simple import run_simple_demo

        run_simple_demo(output, prompt, max_new_tokens, console_on_screen(), progress_on_screen())
        return
    from ..demo.run import run_demo

    run_demo(output, prompt, max_new_tokens, console_on_screen(), progress_on_screen())
