"""Options of every command that runs a bundle, and what such a command remarks upon."""

from __future__ import annotations

import click

BACKENDS = ("tensorrt-rtx", "tensorrt")
PROVIDERS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
_TELLING_ROUNDS = 8  # so many without an accepted proposal are no chance

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="CPU threads [default: physical cores]"
)
backend_option = click.option(
    "--backend",
    type=click.Choice(("onnxruntime", *BACKENDS)),
    default="onnxruntime",
    show_default=True,
    help="Run the graphs, or the engines that were built into the bundle.",
)
provider_option = click.option("--provider", type=click.Choice(PROVIDERS), default="cpu", show_default=True)
verify_rows_option = click.option(
    "--verify-rows",
    type=click.IntRange(min=2),
    metavar="N",
    help="Rows the target verifies in a round, the anchor included [default: chosen in each round]",
)


def remark_on_draft(rounds: int, acceptance_length: float, label: str = "") -> None:
    """Say so if a draft is of no use: its text is right all the same, so nothing else would show it."""
    if rounds >= _TELLING_ROUNDS and acceptance_length <= 1.0:
        click.echo(
            f"dflash: {label and f'{label}: '}no proposal of the draft was accepted in {rounds} rounds; "
            "`dflash parity BUNDLE` says whether the bundle computes what the original draft does, `dflash "
            "inspect DRAFT --target TARGET` whether the two belong together",
            err=True,
        )
