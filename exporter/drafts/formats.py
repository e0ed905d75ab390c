"""Published draft formats: how each is recognised, and which module loads it (imported on use)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from .reading import DraftReading, Recognition
from .spec import DraftFamily, DraftFormat, DraftSpec

# Format -> module with `read_draft(checkpoint, recognition) -> DraftReading`.
FORMATS = {
    DraftFormat.ZLAB: "zlab",
    DraftFormat.SPECULATORS: "speculators",
}

# z-lab's class names. speculators calls its second model the same: its own key decides, not the name.
ZLAB_ARCHITECTURES = {
    "DFlashDraftModel": DraftFamily.DFLASH,
    "DFlash2DraftModel": DraftFamily.DFLASH2,
}
SPECULATORS_TYPES = {
    "dflash": (DraftFamily.DFLASH, ("DFlashDraftModel", "DFlashSpeculator")),
    "dflash2": (DraftFamily.DFLASH2, ("DFlash2DraftModel",)),
}


def draft_from_checkpoint(checkpoint: Checkpoint) -> DraftSpec:
    """Parse a draft checkpoint's config and tensor list; of the tensors only vocabulary maps are read.

    Raises:
        CheckpointError: a key or tensor is missing, or contradicts another, or this is no draft.
        UnsupportedError: a format, key, tensor or option that is not implemented, by name.
    """
    return read_draft(checkpoint).spec


def read_draft(checkpoint: Checkpoint) -> DraftReading:
    """Parse as `draft_from_checkpoint`, and tell how the format was recognised and what defaulted."""
    recognition = recognise(checkpoint.config, f"{checkpoint.name}/config.json")
    loader = importlib.import_module(f".{FORMATS[recognition.format]}", __package__)
    reading: DraftReading = loader.read_draft(checkpoint, recognition)
    return reading


def looks_like_draft(config: Mapping[str, Any]) -> bool:
    """Tell whether a config claims to be a draft, of whatever format."""
    named = any("DFlash" in str(name) for name in _architectures(config))
    return named or "dflash_config" in config or "speculators_model_type" in config


def recognise(config: Mapping[str, Any], where: str) -> Recognition:
    """Decide the format.

    Raises:
        CheckpointError: it is no draft, or its own marks contradict each other.
        UnsupportedError: a draft of another kind.
    """
    architectures = _architectures(config)
    if "speculators_model_type" in config:
        return _recognise_speculators(config, architectures, where)
    matches = [name for name in architectures if name in ZLAB_ARCHITECTURES]
    if len(matches) == 1:
        family = ZLAB_ARCHITECTURES[matches[0]]
        return Recognition(
            DraftFormat.ZLAB,
            family,
            f"architectures has {matches[0]}, and there is no speculators_model_type",
        )
    expected = " or ".join(ZLAB_ARCHITECTURES) + ", or a speculators_model_type"
    if looks_like_draft(config):
        raise field_error(UnsupportedError, f"{where}: architectures", architectures, expected)
    raise field_error(
        CheckpointError, f"{where}: architectures", architectures, expected, "give a draft here, not a target"
    )


def _recognise_speculators(config: Mapping[str, Any], architectures: list[str], where: str) -> Recognition:
    kind = config["speculators_model_type"]
    if not isinstance(kind, str) or kind not in SPECULATORS_TYPES:
        raise field_error(
            UnsupportedError,
            f"{where}: speculators_model_type",
            kind,
            "one of " + ", ".join(SPECULATORS_TYPES),
        )
    family, names = SPECULATORS_TYPES[kind]
    if architectures and not set(architectures) & set(names):
        raise field_error(
            CheckpointError,
            f"{where}: architectures",
            architectures,
            f"{' or '.join(names)} beside speculators_model_type {kind!r}",
        )
    return Recognition(DraftFormat.SPECULATORS, family, f"speculators_model_type is {kind}")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []
