"""Progress of an export: named stages, and bytes within them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """What long work reports to."""

    def stage(self, name: str, total_bytes: int | None = None) -> AbstractContextManager[None]:
        """Enter a stage; stages follow each other and do not nest."""

    def advance(self, done_bytes: int) -> None:
        """Count bytes of the stage that is on."""

    def detail(self, text: str) -> None:
        """Say what the stage that is on is doing."""


class NullProgress:
    """Reports to nobody."""

    @contextmanager
    def stage(self, name: str, total_bytes: int | None = None) -> Iterator[None]:  # noqa: ARG002
        """Do nothing."""
        yield

    def advance(self, done_bytes: int) -> None:
        """Do nothing."""

    def detail(self, text: str) -> None:
        """Do nothing."""


def _nothing(*_: str) -> None:
    pass


class RichProgress:
    """Shows the running stage live on a terminal, and one line for each stage that ended.

    Attributes:
        stages: (name, seconds, bytes) of the stages that ended.
    """

    def __init__(self, console: Console) -> None:
        """Write to `console`."""
        self._console = console
        self._bytes = 0
        self._update: Callable[[], None] = _nothing
        self._describe: Callable[[str], None] = _nothing
        self.stages: list[tuple[str, float, int]] = []

    @contextmanager
    def stage(self, name: str, total_bytes: int | None = None) -> Iterator[None]:
        """Show a stage with its time and bytes; one that fails is marked."""
        start, self._bytes = time.perf_counter(), 0
        try:
            with self._live(name, total_bytes) if self._console.is_terminal else nullcontext():
                yield
        except BaseException:
            self._line("[red]x[/red]", name, time.perf_counter() - start)
            raise
        seconds = time.perf_counter() - start
        self.stages.append((name, seconds, self._bytes))
        self._line("[green]*[/green]", name, seconds)

    @contextmanager
    def _live(self, name: str, total_bytes: int | None) -> Iterator[None]:
        from rich import progress

        columns: list[progress.ProgressColumn] = [
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
        ]
        if total_bytes:
            columns.append(progress.BarColumn(bar_width=24))
        columns += [progress.DownloadColumn(), progress.TimeElapsedColumn()]
        with progress.Progress(*columns, console=self._console, transient=True) as live:
            task = live.add_task(name, total=total_bytes)
            self._update = lambda: live.update(task, completed=self._bytes)
            self._describe = lambda text: live.update(task, description=f"{name}: {text}")
            try:
                yield
            finally:
                self._update = self._describe = _nothing

    def advance(self, done_bytes: int) -> None:
        """Count bytes and show the sum."""
        self._bytes += done_bytes
        self._update()

    def detail(self, text: str) -> None:
        """Show the text behind the stage's name."""
        self._describe(text)

    def _line(self, mark: str, name: str, seconds: float) -> None:
        size = f"{self._bytes / 1e6:10.1f} MB" if self._bytes else ""
        self._console.print(f" {mark} {name:<44}{seconds:8.1f} s{size}", highlight=False)
