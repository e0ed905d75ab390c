"""Drafts in speculators' format: what `speculators.models.dflash` and `.dflash2` load and compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...bundle.errors import UnsupportedError
from ..checkpoint import Checkpoint
from . import dflash2
from .body import CLASS_DEFAULTS, SLIDING, Body, body_from_fields
from .fields import Fields, refuse_unknown
from .harmless import SPECULATORS_KEYS, TRANSFORMERS_KEYS
from .mask_row import EMBED_TOKENS
from .names import FC, LM_HEAD, canonical_shapes, match_tensors
from .reading import DraftReading, Recognition
from .spec import (
    ConvSpec,
    DraftFamily,
    DraftFormat,
    DraftSpec,
    LayerSpec,
    SelectorSpec,
    WindowOrigin,
)
from .vocabulary import check_vocabulary_map

_BODY = "transformer_layer_config"
# Defaults of DFlashSpeculatorConfig and DFlash2SpeculatorConfig; a test compares them with the classes.
DEFAULTS = {
    "draft_vocab_size": 32000,
    "block_size": 8,
    "sample_from_anchor": False,
}
DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
NON_CAUSAL_DEFAULTS = {DraftFamily.DFLASH: False, DraftFamily.DFLASH2: True}
_CONFIG_CLASSES = {
    DraftFamily.DFLASH: "speculators' DFlashSpeculatorConfig",
    DraftFamily.DFLASH2: "speculators' DFlash2SpeculatorConfig",
}


def read_draft(checkpoint: Checkpoint, recognition: Recognition) -> DraftReading:
    """Parse a speculators draft.

    The draft's own keys stand at the top level, the transformer's in ``transformer_layer_config``.

    Raises:
        CheckpointError, UnsupportedError: see `draft_from_checkpoint`.
    """
    where, config = f"{checkpoint.name}/config.json", checkpoint.config
    own = Fields(where, _CONFIG_CLASSES[recognition.family], ("", config))
    transformer = own.value(_BODY)
    if not isinstance(transformer, dict):
        raise own.error(_BODY, transformer, "an object")
    model_type = transformer.get("model_type", "qwen3")
    inner = Fields(where, f"transformers' {model_type} config", (f"{_BODY}.", transformer))
    inner.text("model_type", "qwen3", tuple(CLASS_DEFAULTS))
    # The original builds one rotary embedding for all layers; of per-layer-type parameters it takes these.
    body = body_from_fields(inner, transformer, model_type, rope_layer_type=SLIDING)

    from_anchor = own.flag("sample_from_anchor", DEFAULTS["sample_from_anchor"])
    block_size = own.whole("block_size", DEFAULTS["block_size"], minimum=1 if from_anchor else 2)
    draft_vocab = own.whole("draft_vocab_size", DEFAULTS["draft_vocab_size"])
    if draft_vocab > body.vocab_size:
        raise own.error("draft_vocab_size", draft_vocab, f"<= {_BODY}.vocab_size {body.vocab_size}")
    own.same("target_hidden_size", body.hidden_size, "the original's fc takes taps * hidden_size")
    own.same("input_embedding_scale", 1.0, "the original does not read it")
    own.same("output_multiplier", 1.0, "the original does not read it")
    own.same("final_logit_softcapping", None, "the original does not read it")
    conv: ConvSpec | None = None
    selector: SelectorSpec | None = None
    if recognition.family is DraftFamily.DFLASH2:
        conv, selector = dflash2.dflash2_from_fields(
            own, body.hidden_size, block_size, body.vocab_size, DFLASH2_DEFAULTS
        )
        if draft_vocab != body.vocab_size:
            raise own.error(
                "draft_vocab_size",
                draft_vocab,
                f"{body.vocab_size}, the whole vocabulary (the original refuses less)",
                UnsupportedError,
            )
    layers = _layers(own, body, recognition.family)
    spec = DraftSpec(
        **body.sizes(),
        format=DraftFormat.SPECULATORS,
        family=recognition.family,
        layers=layers,
        ropes=(body.rope,) * len(layers),
        taps=_taps(own),
        num_target_layers=None,
        target_hidden_size=body.hidden_size,
        block_size=block_size,
        first_proposal_row=0 if from_anchor else 1,
        mask_token_id=own.whole("mask_token_id", minimum=0),
        draft_vocab_size=None if draft_vocab == body.vocab_size else draft_vocab,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        logit_softcap=None,
        conv=conv,
        selector=selector,
        learned_mask=False,
        checkpoint_dtype="unknown",
        tensors=(),
    )
    refuse_unknown(transformer, inner.used | TRANSFORMERS_KEYS.keys(), f"{_BODY}.", where)
    refuse_unknown(config, own.used | SPECULATORS_KEYS.keys(), "", where)
    spec = _with_tensors(spec, checkpoint)
    defaults = (*inner.defaults.values(), *own.defaults.values())
    notes = (*_rope_notes(transformer), *_borrowed_notes(spec, checkpoint))
    return DraftReading(spec, recognition, defaults, _verifier(own), notes)


def _layers(own: Fields, body: Body, family: DraftFamily) -> tuple[LayerSpec, ...]:
    """Full layers see the whole block; sliding ones only its past, unless sliding_window_non_causal."""
    non_causal = own.flag("sliding_window_non_causal", NON_CAUSAL_DEFAULTS[family])
    return tuple(
        LayerSpec(None, causal=False)
        if window is None
        else LayerSpec(window, causal=not non_causal, window_origin=WindowOrigin.ANCHOR)
        for window in body.windows
    )


def _taps(own: Fields) -> tuple[int, ...]:
    """Id i is the state that enters layer i: the output of layer i - 1, also for the id after the last."""
    key = "aux_hidden_state_layer_ids"
    ids = own.wholes(key)
    for i in ids:
        if i < 0:
            raise own.error(key, i, "ids counted from 0")
        if i == 0:
            raise own.error(key, i, "ids from 1 (0 is the embedding, not a layer's output)", UnsupportedError)
    return tuple(i - 1 for i in ids)


def _verifier(own: Fields) -> str | None:
    settings = own.value("speculators_config", None)
    verifier = settings.get("verifier") if isinstance(settings, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def _rope_notes(transformer: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        entries = transformer.get(key)
        if isinstance(entries, dict) and isinstance(entries.get(SLIDING), dict):
            yield f"of {key} the entry for {SLIDING} serves every layer, as in the original"


def _borrowed_notes(spec: DraftSpec, checkpoint: Checkpoint) -> Iterator[str]:
    names = sorted(set(_borrowed(spec)) & set(checkpoint.tensors))
    if names:
        yield f"{', '.join(names)}: not read, the target's own are used, as in the original"


def _borrowed(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Tensors that are the verifier's, and their shapes.

    The original reloads what it borrows from the verifier over whatever a checkpoint holds of it
    (`load_verifier_weights`); older versions saved those tensors, and here they are only looked at.
    """
    head = (spec.draft_vocab_size or spec.vocab_size, spec.hidden_size)
    borrowed: dict[str, tuple[int, ...]] = {
        EMBED_TOKENS: (spec.vocab_size, spec.hidden_size),
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": (spec.hidden_size,),
    }
    if spec.draft_vocab_size is None:
        borrowed[LM_HEAD] = head
    return borrowed


def _with_tensors(spec: DraftSpec, checkpoint: Checkpoint) -> DraftSpec:
    kind = f"a speculators {spec.family.value} draft"
    tensors = match_tensors(checkpoint, canonical_shapes(spec), {}, _borrowed(spec), kind)
    if spec.draft_vocab_size is not None:
        check_vocabulary_map(checkpoint, spec.vocab_size)
    return replace(spec, checkpoint_dtype=checkpoint.tensors[dict(tensors)[FC]].dtype, tensors=tensors)
