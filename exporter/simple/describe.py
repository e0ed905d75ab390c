"""What `dflash inspect` says about a simple target or draft; see `exporter.inspect` for the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bundle.errors import CheckpointError, PairError, UnsupportedError
from ...bundle.records import record_to_dict
from ..checkpoint import Checkpoint
from .checkpoint import DRAFT_TYPE, TARGET_TYPE, draft_from_checkpoint, target_from_checkpoint
from .pair import pair_from_checkpoints
from .spec import FAMILY, FORMAT, SimpleDraftSpec

_FINDINGS = (CheckpointError, UnsupportedError, PairError)


def is_simple(config: Mapping[str, Any]) -> bool:
    """Tell whether a config is one of this family's."""
    return config.get("model_type") in (TARGET_TYPE, DRAFT_TYPE)


def inspect_simple(checkpoint: Checkpoint, target: Checkpoint | None) -> dict[str, Any]:
    """Give the keys of an inspection that depend on the family: all but ``name`` and ``tensors``."""
    draft = checkpoint.config["model_type"] == DRAFT_TYPE
    found: dict[str, Any] = {"kind": "draft" if draft else "target", "family": FAMILY}
    found |= {"problem": None, "spec": None}
    if draft:
        found |= {"format": FORMAT, "recognised_by": f"model_type is {DRAFT_TYPE}"}
        found |= {"defaults": [], "notes": [], "needs": None, "verifier": None}
    try:
        spec = draft_from_checkpoint(checkpoint) if draft else target_from_checkpoint(checkpoint)
    except _FINDINGS as problem:
        found["problem"] = str(problem)
    else:
        found["spec"] = record_to_dict(spec)
        del found["spec"]["tensors"]
        if isinstance(spec, SimpleDraftSpec):
            found["spec"]["unmask_counts"] = list(spec.unmask_counts)
            found["needs"] = {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size}
    if draft and target is not None:
        found["pair"] = {"target": target.name, "problem": None, "warnings": []}
        try:
            found["pair"]["warnings"] = list(pair_from_checkpoints(target, checkpoint).warnings)
        except _FINDINGS as problem:
            found["pair"]["problem"] = str(problem)
    return found


def simple_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write what `inspect_simple` found for a screen."""
    spec, needs = found["spec"], found.get("needs")
    if found["kind"] == "target":
        rows = [("kind", f"target, {FAMILY}")]
        if spec is not None:
            stops = ", ".join(str(i) for i in spec["stop_token_ids"]) or "no id"
            rows += [
                ("layers", f"{spec['num_layers']}, each a matrix; a row sees no other"),
                ("sizes", f"hidden {spec['hidden_size']}"),
                ("vocabulary", f"{spec['vocab_size']} ids"),
                ("stops at", stops),
                ("longest", f"{spec['max_position_embeddings']} tokens"),
                ("dtype", spec["checkpoint_dtype"]),
            ]
        return rows
    rows = [
        ("kind", f"draft, {FAMILY}, in the format of {FORMAT}"),
        ("recognised by", found["recognised_by"]),
    ]
    if spec is not None and needs is not None:
        counts = ", ".join(str(count) for count in spec["unmask_counts"])
        rows += [
            ("sizes", f"hidden {spec['hidden_size']}"),
            ("block", f"{spec['block_size']} rows, {spec['block_size']} proposals from row 0"),
            ("denoising", f"{spec['num_denoise_steps']} steps, which choose {counts} tokens"),
            ("mask", f"id {spec['mask_token_id']}"),
            ("head", f"its own, {spec['vocab_size']} ids"),
            ("dtype", spec["checkpoint_dtype"]),
            (
                "target must be",
                f"{TARGET_TYPE}, hidden {needs['hidden_size']}, vocabulary {needs['vocab_size']}",
            ),
        ]
    return rows
