"""`dflash inspect`: what a checkpoint is, what it needs, and what stands in the way of exporting it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ..bundle.errors import CheckpointError, PairError, UnsupportedError
from ..bundle.records import record_to_dict
from .checkpoint import Checkpoint, checkpoint_from_source
from .drafts.formats import looks_like_draft, read_draft, recognise
from .drafts.spec import DraftFormat, DraftSpec
from .pairing import check_pair
from .simple.describe import inspect_simple, is_simple, simple_rows
from .simple.spec import FAMILY as SIMPLE
from .targets.families import FAMILIES, target_from_checkpoint
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
        Plain JSON values: ``name``, ``kind`` (``draft`` or ``target``), ``stored_as``, ``tensors``
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
        "kind": "draft" if looks_like_draft(checkpoint.config) else "target",
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
    elif found["kind"] == "target":
        spec, found["problem"] = _target(checkpoint)
        found["spec"] = _plain(spec)
    else:
        draft = _draft(checkpoint, found)
        if target_checkpoint is not None:
            found["pair"] = _pair(draft, target_checkpoint)
    if found["kind"] == "target" and target_checkpoint is not None:
        problem = f"{checkpoint.name} is a target too; give the draft first, its target with --target"
        found["pair"] = {"target": target_checkpoint.name, "problem": problem, "warnings": []}
    return found


def _storage(checkpoint: Checkpoint) -> str:
    quantisation = getattr(checkpoint, "quantisation", None)  # GGUF files alone have one
    return f"{checkpoint.format}, {quantisation}, dequantised" if quantisation else checkpoint.format


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
        "model_types": sorted(FAMILIES),
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


def inspection_lines(found: Inspection) -> list[str]:
    """Write an inspection for a screen: one fact a line, names in a column."""
    size = found["tensors"]
    stored = f"{found['stored_as']}, {size['count']} tensors, {size['parameters'] / 1e6:.1f} M numbers"
    rows = [("checkpoint", f"{found['name']} ({stored})")]
    if found.get("family") == SIMPLE:
        rows += simple_rows(found)
    elif found["kind"] == "target":
        rows += _target_rows(found)
    else:
        rows += _draft_rows(found)
    pair = found.get("pair")
    if found["problem"] is not None:
        rows.append(("cannot export", found["problem"]))
    elif pair is None:
        other = "with a draft made for it" if found["kind"] == "target" else "with such a target"
        rows.append(("can export", f"yes, {other}"))
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
        ("sizes", _sizes(spec)),
        ("rope", _rope(spec["rope"])),
        ("attention", _biases(spec) + (", queries and keys normalised" if spec["qk_norm"] else "")),
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
        ("sizes", _sizes(spec)),
        ("rope", _rope(spec["ropes"][0])),
        ("taps", f"{_listed(spec['taps'])} (outputs of these target layers, counted from 0{_ids(spec)})"),
        (
            "block",
            f"{spec['block_size']} rows, {proposals} proposals from row {first}"
            + (", the anchor's own" if first == 0 else ""),
        ),
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
        rows.append(("embedding", f"the target's rows times {_number(spec['input_embedding_scale'])}"))
    rows.append(("dtype", spec["checkpoint_dtype"]))
    rows += [("by default", text) for text in _defaults(found["defaults"])]
    rows += [("note", note) for note in found["notes"]]
    rows.append(("target must be", _needs(needs)))
    return rows


def _needs(needs: dict[str, Any]) -> str:
    depth, more = needs["num_hidden_layers"], needs["more_embedding_rows_than"]
    parts = [
        " or ".join(needs["model_types"]),
        f"hidden {needs['hidden_size']}",
        f"{depth} layers" if depth is not None else f"more than {needs['more_layers_than']} layers",
        f"vocabulary {needs['vocab_size']}",
    ]
    if more >= needs["vocab_size"]:
        parts.append(f"more than {more} embedding rows")
    return ", ".join(parts)


def _defaults(defaults: Sequence[dict[str, Any]]) -> list[str]:
    """One text for each piece of code that fills something in, e.g. ``block_size 16 (dflash.model)``."""
    sources: dict[str, list[str]] = {}
    for default in defaults:
        sources.setdefault(default["source"], []).append(f"{default['key']} {_value(default['value'])}")
    return [f"{', '.join(texts)} ({source})" for source, texts in sources.items()]


def _value(value: Any) -> str:
    """A value as config.json would have it, a list of equal entries in short."""
    if isinstance(value, list) and len(value) > 1 and all(entry == value[0] for entry in value):
        return f"{len(value)} times {_value(value[0])}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return value
    return _number(value) if isinstance(value, float) else json.dumps(value)


def _number(value: float) -> str:
    """1000000 and not 1e+06, 1e-06 and 0.196 as they are."""
    return str(int(value)) if value == int(value) else repr(value)


def _sizes(spec: dict[str, Any]) -> str:
    sizes = f"hidden {spec['hidden_size']}, MLP {spec['intermediate_size']}, {spec['hidden_act']}"
    return f"{sizes}, norm epsilon {_number(spec['rms_norm_eps'])}"


def _biases(spec: dict[str, Any]) -> str:
    names = ("q, k and v " if spec["qkv_bias"] else "") + ("and o " if spec["o_bias"] else "")
    return f"{names.strip()} with bias" if names else "no bias"


def _ids(spec: dict[str, Any]) -> str:
    """The taps as speculators writes them."""
    if spec["format"] != DraftFormat.SPECULATORS.value:
        return ""
    return f"; aux_hidden_state_layer_ids {_listed([tap + 1 for tap in spec['taps']])}"


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
    numbers = {**dict(rope["parameters"]), "max_position_embeddings": rope["max_position_embeddings"]}
    listed = "".join(f", {name} {_value(value)}" for name, value in numbers.items())
    return f"{rope['kind']}, theta {_number(rope['theta'])}{listed}"


def _head(spec: dict[str, Any]) -> str:
    rows = spec["draft_vocab_size"]
    parts = [
        f"the target's, {spec['vocab_size']} ids"
        if rows is None
        else f"its own, {rows} of {spec['vocab_size']} ids"
    ]
    if spec["output_multiplier"] != 1.0:
        parts.append(f"logits times {_number(spec['output_multiplier'])}")
    if spec["logit_softcap"] is not None:
        parts.append(f"soft-capped at {_number(spec['logit_softcap'])}")
    return ", ".join(parts)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
