"""Checkpoints as they lie on disks: in shards, and as a hub's cache of links into blobs; and forecasts."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from dflash_deploy.bundle.errors import OutputError, PairError
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter import export as export_module
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.forecast import forecast_export
from originals import tiny_target, zlab_draft


def to_hub_cache(folder: Path, repository: Path) -> Path:
    """Lay a checkpoint out as a hub's cache: files by hash in blobs/, and a snapshot of relative links."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123456789abcdef"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """A sharded target and its sharded draft, both in a hub's cache."""
    model = tiny_target(5, tmp_path / "one", num_hidden_layers=2, hidden_size=32, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "target", max_shard_size="20KB")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    zlab_draft(
        5,
        tmp_path / "draft",
        target=model.config,
        dflash2=False,
        num_hidden_layers=1,
        target_layer_ids=[0],
        max_shard_size="10KB",
    )
    target, draft = (to_hub_cache(tmp_path / n, tmp_path / f"models--org--{n}") for n in ("target", "draft"))
    return str(target), str(draft)


@pytest.fixture
def remembered_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a graph once, however often the same pair is exported."""
    real, known = export_module.graph_from_module, {}

    def remember(build: object, io: object, **options: object) -> ir.Model:
        if io not in known:
            known[io] = real(build, io, **options)  # type: ignore[arg-type]
        return known[io].clone()

    monkeypatch.setattr(export_module, "graph_from_module", remember)


@pytest.mark.usefixtures("remembered_graphs")
def test_links_and_shards_give_plain_files_of_the_sizes_that_were_forecast(
    sources: tuple[str, str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    bundle = tmp_path / "new" / "bundle"
    forecast = forecast_export(*sources, bundle, DType.FLOAT16)
    assert sorted(tmp_path.rglob("*")) == before, "a forecast writes nothing"
    manifest = export_bundle(*sources, bundle, DType.FLOAT16)
    sizes = {name: (bundle / f"{name}.onnx").stat().st_size for name in manifest.graphs}
    assert forecast.graphs == sizes
    assert forecast.weights_bytes == (bundle / "weights.bin").stat().st_size
    assert forecast.max_length == manifest.max_length
    text = "\n".join(forecast.lines())
    assert "those of the float32 bundle" not in text
    assert "those of the float32 bundle" in "\n".join(forecast.lines(rounded=True))
    for part in (
        "target graph",
        "not counted    graphs tuned",
        "free on disk",
        ", enough",
        "peak memory",
        "beyond float16's range",
    ):
        assert part in text

    assert not [path for path in bundle.rglob("*") if path.is_symlink()]
    for path in bundle.rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
    for repository in tmp_path.glob("models--*"):
        shutil.rmtree(repository)
    manifest_from_bundle(bundle)  # whole without its sources


def test_a_forecast_refuses_what_the_export_would(sources: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="other content"):
        forecast_export(*sources, tmp_path)
    with pytest.raises(OutputError, match="max_length: got 1"):
        forecast_export(*sources, tmp_path / "bundle", max_length=1)
    tiny_target(6, tmp_path / "other", num_hidden_layers=2, hidden_size=64)
    with pytest.raises(PairError, match="hidden_size"):
        forecast_export(str(tmp_path / "other"), sources[1], tmp_path / "bundle")
