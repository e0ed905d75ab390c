"""The wheel: exactly one package, its data, and no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("bench", "bundle", "commands", "demo", "exporter", "plugins", "runtime", "tests")

pytestmark = pytest.mark.slow


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        *ROOT.glob("*.py"),
        *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed")),
    ):
        shutil.copy(file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        meta = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    modules = {f"dflash_deploy/{file.relative_to(source)}" for file in source.rglob("*.py")}
    modules = {m for m in modules if not m.startswith(("dflash_deploy/tests", "dflash_deploy/build"))}
    data = {"py.typed", *(f"demo/{f}" for f in ("draft/config.json", "draft/model.safetensors"))}
    data |= {"demo/prompts.txt", "demo/reference.json", "exporter/quantize/text.txt"}
    assert names == modules | {f"dflash_deploy/{name}" for name in data}
    assert {"licenses/LICENSE", "entry_points.txt"} <= meta
