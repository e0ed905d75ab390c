"""A bundle on disk with a manifest that holds and files that hold nothing: for tests of the contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_deploy.bundle.manifest import MANIFEST, Manifest, file_info, manifest_to_file
from toy_engines import toy_manifest

FILES = ("target.onnx", "draft.onnx", "data/weights.bin")


def toy_bundle(directory: Path) -> Manifest:
    """Write a bundle; its graphs share one weight file in a folder."""
    for name in FILES:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode() * 100)
    plain = toy_manifest(stops=(2,))
    manifest = replace(
        plain,
        graphs={name: replace(graph, weights=(FILES[2],)) for name, graph in plain.graphs.items()},
        files={name: file_info(directory / name) for name in FILES},
    )
    manifest_to_file(manifest, directory)
    return manifest


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as a text editor would."""
    path = directory / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
