"""Checkpoints without weights: a config, and the shapes its original would have, made on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_deploy.exporter.checkpoint import TensorEntry


@dataclass
class ShapeCheckpoint:
    """A `Checkpoint` of config and shapes; `values` holds the few tensors that can be read."""

    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    name: str = "draft"
    format: str = "safetensors"
    generation_config: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.values[name][start:stop]

    def files(self) -> tuple[Path, ...]:
        return () if self.folder is None else (self.folder / "config.json",)

    def tokenizer_folder(self) -> Path | None:
        return None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that can be read."""
        self.values[name] = tensor
        self.tensors[name] = TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def zlab_shapes(config: dict[str, Any]) -> ShapeCheckpoint:
    """Take the shapes of z-lab's own class, under the names it is published with."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    kinds = {"DFlashDraftModel": DFlashDraftModel, "DFlash2DraftModel": DFlash2DraftModel}
    with torch.device("meta"):
        model = kinds[config["architectures"][0]](Qwen3Config(**copy.deepcopy(config)))
    shapes = {
        name.replace("_codebook.weight", "_codebook"): t.shape for name, t in model.state_dict().items()
    }
    return _checkpoint(config, shapes)


def speculators_shapes(config: dict[str, Any]) -> ShapeCheckpoint:
    """Take the shapes of speculators' own class, without what it does not save."""
    from speculators.config import SpeculatorModelConfig
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dflash2 import DFlash2DraftModel

    given = copy.deepcopy(config)
    if "speculators_config" in config:  # the original looks the verifier's config up, on the hub
        given["speculators_config"]["verifier"]["name_or_path"] = None
    parsed = SpeculatorModelConfig.from_dict(given)
    parsed.transformer_layer_config._attn_implementation = "eager"
    kind = DFlash2DraftModel if config["speculators_model_type"] == "dflash2" else DFlashDraftModel
    with torch.device("meta"):
        model = kind(parsed)
    left_out = set(model._keys_to_ignore_on_save)
    return _checkpoint(config, {n: t.shape for n, t in model.state_dict().items() if n not in left_out})


def _checkpoint(config: dict[str, Any], shapes: dict[str, torch.Size]) -> ShapeCheckpoint:
    dtypes = {"d2t": "int64", "t2d": "bool"}
    tensors = {n: TensorEntry(n, dtypes.get(n, "bfloat16"), tuple(shape)) for n, shape in shapes.items()}
    return ShapeCheckpoint(copy.deepcopy(config), tensors)
