"""Drafts in z-lab's format: what `dflash.model.DFlashDraftModel` / `DFlash2DraftModel` load and compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...bundle.errors import UnsupportedError
from ..checkpoint import Checkpoint
from . import dflash2
from .body import Body, body_from_fields
from .fields import Fields, refuse_unknown
from .harmless import TRANSFORMERS_KEYS
from .mask_row import EMBED_TOKENS, mask_tensor
from .names import CODEBOOKS, FC, MASK_EMBEDDING, canonical_shapes, match_tensors
from .reading import DraftReading, Recognition
from .spec import ConvSpec, DraftFamily, DraftFormat, DraftSpec, LayerSpec, SelectorSpec

_DEFAULT_BLOCK_SIZE = 16
# The original's parameters are nn.Embedding, so its own save writes them with a suffix; published files
# and its `from_pretrained` know them bare.
_ALIASES = {name: f"{name}.weight" for name in CODEBOOKS}


def read_draft(checkpoint: Checkpoint, recognition: Recognition) -> DraftReading:
    """Parse a z-lab draft.

    Transformer keys stand at the top level and mean what `Qwen3Config` makes of them. The draft's own keys
    stand in ``dflash_config`` or at the top level.

    Raises:
        CheckpointError, UnsupportedError: see `draft_from_checkpoint`.
    """
    where, config = f"{checkpoint.name}/config.json", checkpoint.config
    top = Fields(where, "transformers' Qwen3Config", ("", config))
    nested = top.value("dflash_config", None)
    if nested is None:
        nested = {}
    if not isinstance(nested, dict):
        raise top.error("dflash_config", nested, "an object")
    own = Fields(where, "dflash.model", ("dflash_config.", nested), ("", config))

    top.same("model_type", "qwen3", "the original is built on Qwen3Config")
    _refuse_nested_rope(top, config)
    body = body_from_fields(top, config, "qwen3", rope_layer_type=None)
    own.same("draft_vocab_size", body.vocab_size, "the original has no reduced head")
    block_size = own.whole("block_size", _DEFAULT_BLOCK_SIZE, minimum=2)
    layers = _layers(top, body)
    if top.value("is_causal", None) is None and any(layer.window is not None for layer in layers):
        own.fill("is_causal", "as layer_types say")
    if own.value("causal", None) not in (None, *{layer.causal for layer in layers}):
        raise own.error(
            "causal",
            own.value("causal"),
            "what is_causal and layer_types say; the original reads those and not this key",
        )
    depth = own.optional_whole("num_target_layers", minimum=1)
    conv: ConvSpec | None = None
    selector: SelectorSpec | None = None
    if recognition.family is DraftFamily.DFLASH2:
        conv, selector = dflash2.dflash2_from_fields(own, body.hidden_size, block_size, body.vocab_size, {})
    spec = DraftSpec(
        **body.sizes(),
        format=DraftFormat.ZLAB,
        family=recognition.family,
        layers=layers,
        ropes=(body.rope,) * len(layers),
        taps=_taps(own, depth, len(layers)),
        num_target_layers=depth,
        target_hidden_size=body.hidden_size,
        block_size=block_size,
        first_proposal_row=1,
        mask_token_id=own.whole("mask_token_id", minimum=0),
        draft_vocab_size=None,
        input_embedding_scale=own.number("input_embedding_scale", 1.0),
        output_multiplier=own.number("output_multiplier", 1.0),
        logit_softcap=_softcap(own),
        conv=conv,
        selector=selector,
        learned_mask=False,
        checkpoint_dtype="unknown",
        tensors=(),
    )
    refuse_unknown(nested, own.used, "dflash_config.", where)
    refuse_unknown(config, own.used | top.used | TRANSFORMERS_KEYS.keys(), "", where)
    spec = _with_tensors(spec, checkpoint)
    defaults = (*top.defaults.values(), *own.defaults.values())
    return DraftReading(spec, recognition, defaults, verifier=None, notes=_notes(spec))


def _refuse_nested_rope(top: Fields, config: Mapping[str, Any]) -> None:
    """Refuse RoPE parameters per layer type: the original reads none of them and runs with theta 10000."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and any(isinstance(entry, dict) for entry in rope.values()):
        raise top.error(
            "rope_parameters", rope, "one RoPE for all layers, as the original has", UnsupportedError
        )


def _layers(top: Fields, body: Body) -> tuple[LayerSpec, ...]:
    """is_causal decides for all layers; unset, sliding layers are causal and full ones are not."""
    causal = top.value("is_causal", None)
    if causal is not None:
        causal = top.flag("is_causal")
    return tuple(
        LayerSpec(window, causal=window is not None if causal is None else causal) for window in body.windows
    )


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Spread the taps as `dflash.model.build_target_layer_ids` does where a config names none."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 3 - 1
    return tuple(round(1 + (i * span) / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _taps(own: Fields, depth: int | None, num_layers: int) -> tuple[int, ...]:
    key = "target_layer_ids"
    if key in own:
        taps = own.wholes(key)
    elif depth is None:
        raise own.error(key, None, "a list of target layers, or num_target_layers to spread them")
    else:
        taps = tuple(own.value(key, list(default_taps(depth, num_layers))))
    for tap in taps:
        if tap < 0:
            raise own.error(key, tap, "layers counted from 0")
        if depth is not None and tap >= depth:
            raise own.error(key, tap, f"< num_target_layers {depth}")
        if depth is not None and tap == depth - 1:
            raise own.error(key, tap, LAST_LAYER, UnsupportedError)
    return taps


# transformers' hidden_states[-1] is the state after the final norm, so that is what the original's PyTorch
# code feeds for the last layer; its MLX code feeds the layer's own output.
LAST_LAYER = "a layer before the last one (of which z-lab's two implementations feed different states)"


def _softcap(own: Fields) -> float | None:
    if own.value("final_logit_softcapping", None) is None:
        return None
    cap = own.number("final_logit_softcapping")
    return cap if cap > 0 else None


def _notes(spec: DraftSpec) -> tuple[str, ...]:
    """What is taken in a way that a reader of the config might not expect."""
    if dict(spec.tensors).get(MASK_EMBEDDING) != EMBED_TOKENS:
        return ()
    return (f"of {EMBED_TOKENS} only the mask's row; export checks that the others are the target's",)


def _with_tensors(spec: DraftSpec, checkpoint: Checkpoint) -> DraftSpec:
    mask, elsewhere = mask_tensor(checkpoint, spec)
    shapes = canonical_shapes(spec)
    tensors = match_tensors(checkpoint, shapes, _ALIASES, elsewhere, f"a z-lab {spec.family.value} draft")
    return replace(
        spec,
        learned_mask=bool(mask),
        checkpoint_dtype=checkpoint.tensors[dict(tensors)[FC]].dtype,
        tensors=tuple(sorted((*tensors, *mask))),
    )
