"""Checkpoints as they lie on disks: in shards, and as a hub's cache of links into blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.export import export_bundle
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


def test_shards_behind_links_give_a_bundle_of_plain_files(tmp_path: Path) -> None:
    model = tiny_target(5, tmp_path / "one", num_hidden_layers=2, hidden_size=32, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    zlab_draft(
        5,
        tmp_path / "draft",
        target=model.config,
        dflash2=False,
        num_hidden_layers=1,
        target_layer_ids=[0],
        max_shard_size="10KB",
    )
    sources = [
        to_hub_cache(tmp_path / name, tmp_path / f"models--org--{name}") for name in ("shards", "draft")
    ]
    bundle = tmp_path / "bundle"
    export_bundle(str(sources[0]), str(sources[1]), bundle, DType.FLOAT16)
    assert not [path for path in bundle.rglob("*") if path.is_symlink()]
    for path in bundle.rglob("*"):
        assert str(tmp_path).encode() not in path.read_bytes(), path
    for repository in tmp_path.glob("models--*"):
        shutil.rmtree(repository)
    manifest_from_bundle(bundle)  # whole without its sources
