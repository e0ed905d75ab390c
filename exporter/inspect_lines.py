"""An inspection of `inspect.py`, written for a screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .drafts.spec import DraftFormat
from .inspect import Inspection
from .simple.describe import simple_rows
from .simple.spec import FAMILY as SIMPLE


def inspection_lines(found: Inspection) -> list[str]:
    """Write an inspection for a screen: one fact a line, names in a column."""
    size = found["tensors"]
    stored = f"{found['stored_as']}, {size['count']} tensors, {size['parameters'] / 1e6:.1f} M numbers"
    rows = [("checkpoint", f"{found['name']} ({stored})")]
    if found.get("family") == SIMPLE:
        rows += simple_rows(found)
    elif found["kind"] != "draft":
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
    rows = [("kind", "target" if found["kind"] == "target" else "neither a target nor a draft")]
    spec = found["spec"]
    if spec is None:
        return rows
    return [
        *rows,
        ("family", spec["family"]),
        ("layers", f"{spec['num_layers']}, {_heads(spec)}"),
        ("sizes", _sizes(spec)),
        ("rope", _target_ropes(spec["layers"])),
        ("attention", _target_attention(spec)),
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
    known = found["format"] is not None
    kind = (
        f"{found['family']}, in the format of {found['format']}" if known else "of a kind that is not known"
    )
    rows = [("kind", f"draft, {kind}")]
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
    return str(int(value)) if value == int(value) else f"{value:.6g}"


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
    texts = []
    for layer in layers:
        window = layer["window"]
        text = "full" if window is None else f"window {window} from the {layer['window_origin']}"
        texts.append(text + (", causal in the block" if layer["causal"] else ", whole block"))
    return _runs(texts)


def _runs(texts: Sequence[str]) -> str:
    """Texts of layers, each run of equal ones once."""
    runs: list[tuple[int, int, str]] = []
    for index, text in enumerate(texts):
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], index, text)
        else:
            runs.append((index, index, text))
    return "; ".join(f"{a if a == b else f'{a}-{b}'}: {text}" for a, b, text in runs)


def _target_attention(spec: dict[str, Any]) -> str:
    parts = [_biases(spec)]
    if spec["qk_norm"]:
        parts.append("queries and keys normalised")
    if spec["attention_softcap"] is not None:
        parts.append(f"scores soft-capped at {_number(spec['attention_softcap'])}")
    windows = [layer["window"] for layer in spec["layers"]]
    if any(windows):
        parts.append(_runs(["full" if window is None else f"window {window}" for window in windows]))
    return ", ".join(parts)


def _target_ropes(layers: Sequence[dict[str, Any]]) -> str:
    """One RoPE, or which layers have which."""
    texts = ["none" if layer["rope"] is None else _rope(layer["rope"]) for layer in layers]
    return texts[0] if len(set(texts)) == 1 else _runs(texts)


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
