"""Tiny random pairs and their bundles, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from dflash_deploy.bundle.manifest import Verify, manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.bundle_graphs import DraftGraph
from dflash_deploy.exporter.export import export_bundle
from originals import speculators_draft, tiny_target, zlab_draft

ANCHOR = 77


@dataclass(frozen=True)
class TinyBundle:
    """A bundle and the checkpoints it was exported from. Tests must not change them."""

    bundle: Path
    target: Path
    draft: Path


# Taps are the first layer, the middle and the last but one, alone, paired, and unsorted; every tap has a
# layer behind it. Depths are as small as that allows: an export costs time for every layer.
TARGET = {"hidden_size": 32, "vocab_size": 160, "max_position_embeddings": 128}


def _dflash2(
    folder: Path, depth: int = 4, layers: int = 2, taps: tuple[int, ...] = (2, 0, 1), **target: Any
) -> None:
    config = {**TARGET, "num_hidden_layers": depth, "tie_word_embeddings": True, **target}
    model = tiny_target(21, folder / "target", **config)
    zlab_draft(
        21,
        folder / "draft",
        target=model.config,
        dflash2=True,
        num_hidden_layers=layers,
        target_layer_ids=list(taps),
        block_size=8,
        conv_kernel_size=2,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=4,
    )


def _grouped(folder: Path) -> None:
    """Two query heads share the keys of one."""
    _dflash2(folder, 3, 1, (0, 1), num_attention_heads=4, num_key_value_heads=2)


def _half(folder: Path) -> None:
    """A draft whose residual leaves float16's range, as trained ones do (A09)."""
    _dflash2(folder, 2, 1, (0,))
    path = folder / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.mlp.down_proj.weight"] *= 1e5
    save_file(tensors, path, metadata={"format": "pt"})


def _dflash(folder: Path) -> None:
    model = tiny_target(
        22, folder / "target", "qwen3", **TARGET, num_hidden_layers=3, tie_word_embeddings=False
    )
    zlab_draft(
        22,
        folder / "draft",
        target=model.config,
        dflash2=False,
        num_hidden_layers=2,
        target_layer_ids=[0],
        block_size=5,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=9,
        final_logit_softcapping=20.0,
        output_multiplier=1.7,
    )


def _speculators(folder: Path) -> None:
    model = tiny_target(
        23, folder / "target", "qwen2", **TARGET, num_hidden_layers=3, tie_word_embeddings=True
    )
    speculators_draft(
        23,
        folder / "draft",
        target=model,
        dflash2=False,
        num_hidden_layers=2,
        aux_hidden_state_layer_ids=[1, 2],
        block_size=5,
        sample_from_anchor=False,
        draft_vocab_size=60,  # the draft's own head, and a map
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=9,
    )


def _speculators2(folder: Path) -> None:
    model = tiny_target(24, folder / "target", **TARGET, num_hidden_layers=4, tie_word_embeddings=False)
    speculators_draft(
        24,
        folder / "draft",
        target=model,
        dflash2=True,
        num_hidden_layers=1,
        aux_hidden_state_layer_ids=[2, 3],
        block_size=4,
        sample_from_anchor=True,
        layer_types=["full_attention"],
        use_sliding_window=False,
        conv_kernel_size=2,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=4,
    )


_PAIRS: dict[str, tuple[Callable[[Path], None], DType]] = {
    "dflash2": (_dflash2, DType.FLOAT32),
    "dflash2-grouped": (_grouped, DType.FLOAT32),
    "dflash2-float16": (_half, DType.FLOAT16),
    "dflash": (_dflash, DType.FLOAT32),
    "speculators": (_speculators, DType.FLOAT32),
    "speculators2": (_speculators2, DType.FLOAT32),
}

NAMES = tuple(_PAIRS)


def in_folder(folder: Path) -> TinyBundle:
    """Where `exported` puts it."""
    return TinyBundle(folder / "bundle", folder / "target", folder / "draft")


def exported(name: str, folder: Path) -> TinyBundle:
    """Make the pair of a name in `NAMES` in `folder`, and export it."""
    make, dtype = _PAIRS[name]
    make(folder)
    pair = in_folder(folder)
    export_bundle(str(pair.target), str(pair.draft), pair.bundle, dtype)
    return pair


def drafted(bundle: Path, seed: int) -> dict[str, NDArray[Any]]:
    """What a draft gives behind random features, and the anchor `ANCHOR`."""
    manifest = manifest_from_bundle(bundle, Verify.SIZES)
    graph, random = DraftGraph(bundle, manifest), np.random.default_rng(seed)
    size = len(manifest.draft.taps) * manifest.target.hidden_size
    graph.reset(64)
    features = random.standard_normal((1, 20, size)).astype(np.float32)
    return graph.run(features, 0, 20, ANCHOR, manifest.draft.block_size, kv=64)
