"""`dflash inspect`: what a checkpoint is, what it needs, and what stands in the way of exporting it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..bundle.errors import CheckpointError, PairError, UnsupportedError
from ..bundle.records import record_to_dict
from .checkpoint import Checkpoint, checkpoint_from_source
from .drafts.formats import looks_like_draft, read_draft, recognise
from .drafts.spec import DraftSpec
from .pairing import check_pair
from .simple.describe import inspect_simple, is_simple
from .targets.families import target_from_checkpoint
from .targets.spec import TargetSpec

Inspection = dict[str, Any]

# What makes a checkpoint unfit; to an inspection it is a finding, not an end.
_FINDINGS = (CheckpointError, UnsupportedError, PairError)


def inspect_checkpoint(source: str, target: str | None = None) -> Inspection:
    """Explain a checkpoint, and how it fits a target.

    Args:
        source: folder, .gguf file or hub id of a draft or a target.
        target: of the target to pair a draft with.

    Returns:
        Plain JSON values: ``name``, ``kind`` (``draft``, ``target`` or ``other``), ``stored_as``, ``tensors``
        (``count``, ``parameters``), ``problem`` (None, or why it cannot be exported), ``spec`` (every
        effective option, None with a problem); of a draft also ``format``, ``recognised_by``, ``defaults``
        (key, value and source of what the checkpoint leaves open), ``notes`` (what is passed over),
        ``needs`` (what its target must be) and ``verifier``; and with a target ``pair`` (``target``,
        ``problem``, ``warnings``).

    Raises:
        CheckpointError: there is nothing to inspect at `source` or `target`.
    """
    checkpoint = checkpoint_from_source(source)
    target_checkpoint = None if target is None else checkpoint_from_source(target)
    found: Inspection = {
        "name": checkpoint.name,
        "kind": _kind(checkpoint.config),
        "stored_as": _storage(checkpoint),
        "tensors": {
            "count": len(checkpoint.tensors),
            "parameters": sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        },
        "problem": None,
        "spec": None,
    }
    if is_simple(checkpoint.config):
        found |= inspect_simple(checkpoint, target_checkpoint)
    elif found["kind"] != "draft":
        spec, found["problem"] = _target(checkpoint)
        found["spec"] = _plain(spec)
    else:
        draft = _draft(checkpoint, found)
        if target_checkpoint is not None:
            found["pair"] = _pair(draft, target_checkpoint)
    if found["kind"] != "draft" and target_checkpoint is not None:
        problem = f"{checkpoint.name} is no draft; give the draft first, its target with --target"
        found["pair"] = {"target": target_checkpoint.name, "problem": problem, "warnings": []}
    return found


def stands_in_the_way(found: Inspection) -> bool:
    """Whether the checkpoint, or the pair that was asked about, cannot be exported."""
    return found["problem"] is not None or found.get("pair", {}).get("problem") is not None


def _kind(config: Mapping[str, Any]) -> str:
    """What a config says it is; a target is what names a decoder with a head, or names nothing."""
    if looks_like_draft(config):
        return "draft"
    named = config.get("architectures")
    other = isinstance(named, list) and not any(str(name).endswith("ForCausalLM") for name in named)
    return "other" if named and other else "target"


def _storage(checkpoint: Checkpoint) -> str:
    quantisation = getattr(checkpoint, "quantisation", None)  # GGUF files alone have one
    return f"{checkpoint.format} of {quantisation}, dequantised" if quantisation else checkpoint.format


def _draft(checkpoint: Checkpoint, found: Inspection) -> DraftSpec | None:
    found |= {"format": None, "family": None, "recognised_by": None}
    found |= {"defaults": [], "notes": [], "needs": None, "verifier": None}
    try:
        mark = recognise(checkpoint.config, f"{checkpoint.name}/config.json")
        found |= {"format": mark.format.value, "family": mark.family.value, "recognised_by": mark.reason}
        reading = read_draft(checkpoint)
    except _FINDINGS as problem:
        found["problem"] = str(problem)
        return None
    spec = reading.spec
    found["spec"] = _plain(spec)
    found["defaults"] = record_to_dict(reading.defaults)
    found["notes"] = list(reading.notes)
    found["verifier"] = reading.verifier
    found["needs"] = {
        "hidden_size": spec.target_hidden_size,
        "num_hidden_layers": spec.num_target_layers,
        "more_layers_than": max(spec.taps),
        "vocab_size": spec.vocab_size,
        "more_embedding_rows_than": spec.mask_token_id,
    }
    return spec


def _target(checkpoint: Checkpoint) -> tuple[TargetSpec | None, str | None]:
    try:
        return target_from_checkpoint(checkpoint), None
    except _FINDINGS as problem:
        return None, str(problem)


def _pair(draft: DraftSpec | None, checkpoint: Checkpoint) -> Inspection:
    target, problem = _target(checkpoint)
    warnings: tuple[str, ...] = ()
    if problem is None and draft is None:
        problem = "the draft itself cannot be exported"
    if draft is not None and target is not None:
        try:
            warnings = check_pair(draft, target)
        except _FINDINGS as found:
            problem = str(found)
    return {"target": checkpoint.name, "problem": problem, "warnings": list(warnings)}


def _plain(spec: DraftSpec | TargetSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    plain: dict[str, Any] = record_to_dict(spec)
    del plain["tensors"]
    return plain
