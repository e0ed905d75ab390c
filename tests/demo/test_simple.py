"""The demo of the simple family: the seed program's experiment, the same tokens both ways."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.errors import RequestError
from dflash_deploy.cli import cli
from dflash_deploy.demo.simple import PROMPT, RUNS, prompt_ids


def test_the_whole_demo(tmp_path):
    options = ["--output", str(tmp_path / "out"), "--max-new-tokens", "20"]
    result = CliRunner().invoke(cli, ["demo", "--family", "simple", *options])
    assert result.exit_code == 0, result.output
    # What the seed program's own baseline says if it takes the likeliest token instead of drawing one.
    assert f"tokens       {[661] * 20}" in result.output
    assert result.output.count(f"{[661] * 20}") == 2
    assert "every token is the same" in result.output
    assert result.output.count(f"mean of {RUNS} runs") == 2


def test_prompts():
    assert prompt_ids(None) == list(PROMPT)
    assert prompt_ids("7, 8 9,10") == [7, 8, 9, 10]
    with pytest.raises(RequestError, match="prompt: got 'Hello', expected token ids"):
        prompt_ids("Hello")


def test_text_is_refused_without_a_traceback(tmp_path):
    options = ["--output", str(tmp_path / "out"), "--prompt", "Hello"]
    result = CliRunner().invoke(cli, ["demo", "--family", "simple", *options])
    assert result.exit_code == 2
    assert "expected token ids" in result.output
    assert not (tmp_path / "out").exists()
