import io

import pytest
from rich.console import Console

from dflash_deploy.exporter.progress import NullProgress, RichProgress


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_is_shown_with_its_time_and_bytes(terminal):
    out = io.StringIO()
    progress = RichProgress(Console(file=out, force_terminal=terminal, width=100, color_system=None))
    with progress.stage("write target", 3_000_000):
        progress.advance(1_000_000)
        progress.advance(2_000_000)
    with progress.stage("trace draft"):
        pass
    progress.advance(5)  # between stages: nobody's
    ((name, seconds, size), last) = progress.stages
    assert (name, size) == ("write target", 3_000_000)
    assert seconds >= 0
    assert last[0] == "trace draft"
    assert last[2] == 0
    assert "write target" in out.getvalue()
    assert "3.0 MB" in out.getvalue()


def test_a_failed_stage_is_marked_and_not_counted():
    out = io.StringIO()
    progress = RichProgress(Console(file=out, width=100))
    with pytest.raises(KeyboardInterrupt), progress.stage("hash files"):
        raise KeyboardInterrupt
    assert progress.stages == []
    assert out.getvalue().startswith(" x hash files")


def test_nobody_may_be_told():
    progress = NullProgress()
    with progress.stage("anything", 1):
        progress.advance(1)
