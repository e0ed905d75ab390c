"""`dflash inspect`: what a checkpoint is, what it needs, and what stands in the way of exporting it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..bundle.errors import CheckpointError, PairError, UnsupportedError
from ..bundle.records import record_to_dict
from .checkpoint import Checkpoint, checkpoint_from_source
from .drafts.formats import looks_like_draft, read_draft, recognise
from .drafts.spec import DraftSpec
from .pairing import check_pair
from .simple.describe import inspect_simple, is_simple, simple_rows
from .simple.spec import FAMILY as SIMPLE
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
        Plain JSON values: ``name``, ``kind`` (``draft`` or ``target``), ``tensors`` (``count``,
        ``parameters``), ``problem`` (None, or why it cannot be exported), ``spec`` (every effective option,
        None with a problem); of a draft also ``format``, ``recognised_by``, ``defaults`` (key, value and
        source of what the checkpoint leaves open), ``needs`` (what its target must be), ``verifier``, and
        with a target ``pair`` (``target``, ``problem``, ``warnings``).

    Raises:
        CheckpointError: there is nothing to inspect at `source` or `target`.
    """
    checkpoint = checkpoint_from_source(source)
    target_checkpoint = None if target is None else checkpoint_from_source(target)
    found: Inspection = {
        "name": checkpoint.name,
        "kind": "draft" if looks_like_draft(checkpoint.config) else "target",
        "tensors": {
            "count": len(checkpoint.tensors),
            "parameters": sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()),
        },
        "problem": None,
        "spec": None,
    }
    if is_simple(checkpoint.config):
        return found | inspect_simple(checkpoint, target_checkpoint)
    if found["kind"] == "target":
        spec, found["problem"] = _target(checkpoint)
        found["spec"] = _plain(spec)
        return found
    draft = _draft(checkpoint, found)
    if target_checkpoint is not None:
        found["pair"] = _pair(draft, target_checkpoint)
    return found


def _draft(checkpoint: Checkpoint, found: Inspection) -> DraftSpec | None:
    found |= {"format": None, "family": None, "recognised_by": None}
    found |= {"defaults": [], "needs": None, "verifier": None}
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
    from .targets.families import target_from_checkpoint

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


def inspection_lines(found: Inspection) -> list[str]:
    """Write an inspection for a screen: one fact a line, names in a column."""
    size = found["tensors"]
    rows = [
        ("checkpoint", f"{found['name']} ({size['count']} tensors, {size['parameters'] / 1e6:.1f} M numbers)")
    ]
    if found.get("family") == SIMPLE:
        rows += simple_rows(found)
    elif found["kind"] == "target":
        rows += _target_rows(found)
    else:
        rows += _draft_rows(found)
    if found["problem"] is not None:
        rows.append(("cannot export", found["problem"]))
    pair = found.get("pair")
    if pair is not None:
        verdict = "fits" if pair["problem"] is None else f"does not fit: {pair['problem']}"
        rows.append(("with target", f"{pair['target']}: {verdict}"))
        rows += [("warning", warning) for warning in pair["warnings"]]
    return [f"{name:<14} {text}" for name, text in rows]


def _target_rows(found: Inspection) -> list[tuple[str, str]]:
    rows = [("kind", "target")]
    spec = found["spec"]
    if spec is None:
        return rows
    return [
        *rows,
        ("family", spec["family"]),
        ("layers", f"{spec['num_layers']}, {_heads(spec)}"),
        ("sizes", f"hidden {spec['hidden_size']}, MLP {spec['intermediate_size']}, {spec['hidden_act']}"),
        ("rope", _rope(spec["rope"])),
        (
            "vocabulary",
            f"{spec['vocab_size']} ids, {spec['embedding_rows']} embedding rows, head "
            + ("tied to the embedding" if spec["tied"] else "of its own"),
        ),
        ("stops at", ", ".join(str(i) for i in spec["stop_token_ids"]) or "no id"),
        ("longest", f"{spec['max_position_embeddings']} tokens"),
        ("dtype", spec["checkpoint_dtype"]),
    ]


def _draft_rows(found: Inspection) -> list[tuple[str, str]]:
    rows = [
        (
            "kind",
            f"draft, {found['family'] or 'unknown'}, in the format of {found['format'] or 'nobody known'}",
        )
    ]
    if found["recognised_by"]:
        rows.append(("recognised by", found["recognised_by"]))
    if found["verifier"]:
        rows.append(("made for", found["verifier"]))
    spec, needs = found["spec"], found["needs"]
    if spec is None:
        return rows
    first = spec["first_proposal_row"]
    proposals = spec["block_size"] - first
    rows += [
        (
            "layers",
            f"{len(spec['layers'])}, {_heads(spec)}, bias {'yes' if spec['attention_bias'] else 'no'}",
        ),
        ("attention", _attention(spec["layers"])),
        ("sizes", f"hidden {spec['hidden_size']}, MLP {spec['intermediate_size']}, {spec['hidden_act']}"),
        ("rope", _rope(spec["ropes"][0])),
        ("taps", f"{_listed(spec['taps'])} (outputs of these target layers, counted from 0)"),
        ("block", f"{spec['block_size']} rows, {proposals} proposals from row {first}"),
        (
            "mask",
            f"id {spec['mask_token_id']}"
            + (", with an embedding of its own" if spec["learned_mask"] else ""),
        ),
        ("head", _head(spec)),
    ]
    if spec["conv"]:
        rows.append(
            ("convolutions", f"kernel {spec['conv']['kernel_size']}, groups of {spec['conv']['group_size']}")
        )
    if spec["selector"]:
        rows.append(("selector", f"rank {spec['selector']['rank']}, top {spec['selector']['top_k']}"))
    if spec["input_embedding_scale"] != 1.0:
        rows.append(("embedding", f"times {spec['input_embedding_scale']:g}"))
    rows.append(("dtype", spec["checkpoint_dtype"]))
    if found["defaults"]:
        listed = ", ".join(f"{d['key']} {d['value']} ({d['source']})" for d in found["defaults"])
        rows.append(("by default", listed))
    depth = needs["num_hidden_layers"]
    layers = f"{depth} layers" if depth is not None else f"more than {needs['more_layers_than']} layers"
    sizes = f"hidden {needs['hidden_size']}, {layers}, vocabulary {needs['vocab_size']}"
    rows.append(("target must be", f"{sizes}, more than {needs['more_embedding_rows_than']} embedding rows"))
    return rows


def _heads(spec: dict[str, Any]) -> str:
    return f"{spec['num_heads']} heads, {spec['num_kv_heads']} KV heads of {spec['head_dim']}"


def _attention(layers: Sequence[dict[str, Any]]) -> str:
    """Runs of equal layers, e.g. ``0-3 window 2048 per query, causal; 4 full, whole block``."""
    runs: list[tuple[int, int, str]] = []
    for index, layer in enumerate(layers):
        window = layer["window"]
        text = "full" if window is None else f"window {window} from the {layer['window_origin']}"
        text += ", causal in the block" if layer["causal"] else ", whole block"
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], index, text)
        else:
            runs.append((index, index, text))
    return "; ".join(f"{a if a == b else f'{a}-{b}'}: {text}" for a, b, text in runs)


def _rope(rope: dict[str, Any]) -> str:
    numbers = "".join(f", {name} {value}" for name, value in rope["parameters"])
    return f"{rope['kind']}, theta {rope['theta']:g}{numbers}"


def _head(spec: dict[str, Any]) -> str:
    rows = spec["draft_vocab_size"]
    parts = [
        f"the target's, {spec['vocab_size']} ids"
        if rows is None
        else f"its own, {rows} of {spec['vocab_size']} ids"
    ]
    if spec["output_multiplier"] != 1.0:
        parts.append(f"logits times {spec['output_multiplier']:g}")
    if spec["logit_softcap"] is not None:
        parts.append(f"soft-capped at {spec['logit_softcap']:g}")
    return ", ".join(parts)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
