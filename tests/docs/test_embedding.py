"""The embedding guide's program, block by block in one interpreter, and its figures."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from dflash_deploy.bundle.tensors import CacheShape, DType
from text_bundle import write_text_bundle

GUIDE = Path(__file__).parents[2] / "docs" / "embedding.md"
_BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _run_guide(bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "demo-output").mkdir()
    (folder / "demo-output" / "bundle").symlink_to(bundle)
    monkeypatch.chdir(folder)
    names: dict = {}
    try:
        for block in _BLOCKS.finditer(GUIDE.read_text(encoding="utf-8")):
            line = GUIDE.read_text(encoding="utf-8")[: block.start(1)].count("\n")
            exec(compile("\n" * line + block[1], str(GUIDE), "exec"), names)
    finally:
        if "service" in names:
            names["service"].close()
    assert names["late"].finish_reason.value in ("deadline", "length", "stop")
    assert not any(thread.name == "dflash-service" for thread in threading.enumerate())


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    write_text_bundle(tmp_path / "bundle", max_length=1200)
    _run_guide(tmp_path / "bundle", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert re.search(r"\d+ of \d+ prompt tokens were not computed again", printed)
    assert "top_p: got 1.5, expected 0 < top_p <= 1" in printed


def test_its_figures_of_memory():
    """They follow from the demo's shapes."""
    text = GUIDE.read_text(encoding="utf-8")
    target = CacheShape(30, 3, 64, DType.FLOAT32).bytes(1, 1)
    draft = CacheShape(2, 3, 64, DType.FLOAT32).bytes(1, 1)
    assert f"{target + draft:,} bytes a token (target {target:,}, draft {draft:,})" in text
    for length, megabytes in ((1024, 51), (8192, 403)):
        assert round((length + 9) * (target + draft) / 1e6) == megabytes
        assert f"{megabytes} MB for" in text
        assert f"{length:,}" in text


@pytest.mark.slow
def test_the_guide_runs_over_the_real_pair(demo_bundle, tmp_path, monkeypatch):
    from dflash_deploy.bundle.manifest import manifest_alone

    manifest = manifest_alone(demo_bundle)
    assert (manifest.target.cache.layers, manifest.draft.cache.layers, manifest.slack_slots) == (30, 2, 9)
    _run_guide(demo_bundle, tmp_path, monkeypatch)
