"""Bundles with a fault in them, sealed again so that no hash gives it away."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.manifest import MANIFEST, Manifest, file_info, manifest_to_file
from dflash_deploy.bundle.records import record_from_dict
from dflash_deploy.bundle.tuned import portable


def copied(bundle: Path, to: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(bundle, to)
    return to


def sealed(bundle: Path, **changes: Any) -> Path:
    """Write the manifest again: right hashes of the files as they are, and other values of its fields."""
    data = json.loads((bundle / MANIFEST).read_text())
    manifest = record_from_dict(Manifest, data, MANIFEST)
    files = {name: file_info(bundle / name) for name in manifest.files}
    manifest_to_file(dataclasses.replace(manifest, files=files, **changes), bundle)
    return bundle


def weight_changed(bundle: Path, graph: str, name: str, change: Callable[[np.ndarray], None]) -> Path:
    """Change a float32 weight of a graph in the weight file; graphs that share it all see it."""
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    stored = next(i for i in model.graph.initializer if i.name == name)
    place = {entry.key: entry.value for entry in stored.external_data}
    assert stored.data_type == onnx.TensorProto.FLOAT
    weights = np.memmap(
        bundle / place["location"], np.float32, "r+", int(place["offset"]), tuple(stored.dims)
    )
    change(weights)
    weights.flush()
    return sealed(bundle)


def tap_shifted(bundle: Path, index: int) -> Path:
    """Wire the features' part `index` to the output of the layer behind the right one."""
    path = bundle / "target.onnx"
    model = onnx.load(path, load_external_data=False)
    producer = {name: node for node in model.graph.node for name in node.output}
    parts = producer[producer[t.FEATURES].input[0]]
    assert parts.op_type == "Concat"

    def added(value: str) -> str:
        (node,) = (n for n in model.graph.node if n.op_type == "Add" and value in n.input)
        return str(node.output[0])

    parts.input[index] = added(added(parts.input[index]))  # + attention, + MLP
    onnx.save(model, path)
    return sealed(bundle)


def relabelled(bundle: Path, dtype: t.DType) -> Path:
    """Make the manifest say another dtype, wherever it says one; the graphs stay as they are."""
    manifest = record_from_dict(Manifest, json.loads((bundle / MANIFEST).read_text()), MANIFEST)
    target = dataclasses.replace(
        manifest.target, cache=dataclasses.replace(manifest.target.cache, dtype=dtype)
    )
    draft = dataclasses.replace(manifest.draft, cache=dataclasses.replace(manifest.draft.cache, dtype=dtype))
    top_k = None if draft.selector is None else draft.selector.top_k
    features = len(draft.taps) * target.hidden_size
    interfaces = {
        t.TARGET: t.target_io(target.cache, target.vocab_size, features),
        t.DRAFT: t.draft_io(
            draft.cache, features, draft.block_size, draft.proposals, draft.draft_vocab_size, top_k
        ),
    }
    graphs = {
        name: dataclasses.replace(graph, io=interfaces.get(name, graph.io))
        for name, graph in manifest.graphs.items()
    }
    tuned = {
        name: dataclasses.replace(graph, io=interfaces[portable(name)])
        for name, graph in manifest.tuned.items()
    }
    return sealed(bundle, dtype=dtype, target=target, draft=draft, graphs=graphs, tuned=tuned)
