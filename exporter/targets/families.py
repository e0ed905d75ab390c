"""Target families by config: a dict of strings, imported on use."""

from __future__ import annotations

import importlib
from typing import Any

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from .spec import TargetSpec

# model_type of config.json -> module with `target_spec(config, reader) -> TargetSpec`.
FAMILIES = {
    "llama": "dense",
    "qwen2": "dense",
    "qwen3": "dense",
}


def target_from_checkpoint(checkpoint: Checkpoint) -> TargetSpec:
    """Parse a target checkpoint's config and tensor list.

    Raises:
        CheckpointError: a key or tensor is missing or contradicts another.
        UnsupportedError: the family or an option is not implemented.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{checkpoint.name}/config.json: model_type: missing, expected a string")
    module = FAMILIES.get(model_type)
    if module is None:
        raise field_error(
            UnsupportedError,
            f"{checkpoint.name}: target model_type",
            model_type,
            "one of " + ", ".join(sorted(FAMILIES)),
        )
    family = importlib.import_module(f".{module}", __package__)
    spec: TargetSpec = family.target_spec(checkpoint)
    return spec


def stop_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The eos ids of generation_config.json, else of config.json; a number or a list, order kept."""
    for config in (checkpoint.generation_config, checkpoint.config):
        value: Any = config.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return tuple(dict.fromkeys(int(i) for i in ids))
    return ()
