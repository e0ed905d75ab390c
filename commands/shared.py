"""What commands share: arguments, files that a user names, and the screen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from rich.console import Console

    from ..exporter.progress import Progress

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


def let_torch_sleep() -> None:
    """Have torch's threads wait asleep, before it is imported, unless the user has set how they wait.

    They wait in a busy loop by default, which takes several times longer where other processes use the cores
    (parity of the demo pair beside two busy ones: 164 s asleep, more than 240 s not), and gains nothing here.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def prompts_from_file(file: Path | None) -> Sequence[str]:
    """Read one prompt a line; without a file, the demo's."""
    from ..bench.prompts import demo_texts, texts_from_file

    return demo_texts() if file is None else texts_from_file(file)


def text_from_file(file: Path) -> str:
    """Read a whole file as text."""
    from ..bundle.errors import RequestError

    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        raise RequestError(f"text: {str(file)!r} cannot be read ({cause})") from cause


def was_given(name: str) -> bool:
    """Whether a parameter of the command that runs was given, not left at its default.

    Args:
        name: as the command's function calls it.
    """
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def console_on_screen(file_columns: int = 120) -> Console:
    """Standard output.

    Args:
        file_columns: the width, in a file or a pipe.
    """
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = file_columns
    return console


def progress_on_screen() -> Progress:
    """Stages and bars on standard error."""
    from rich.console import Console

    from ..exporter.progress import RichProgress

    return RichProgress(Console(stderr=True, highlight=False))
