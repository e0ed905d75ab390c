"""Gemma 2: norms around both halves of a layer, scaled embeddings, soft caps, every other layer a window."""

from __future__ import annotations

import math
from dataclasses import replace

from .reading import FULL, SLIDING, TargetConfig
from .spec import NormPlace, NormWeight, TargetLayer, TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' Gemma2ForCausalLM."""
    kinds = config.layer_types([FULL if index % 2 else SLIDING for index in range(config.depth)])
    rope = config.rope()
    layers = tuple(TargetLayer(rope, config.window(kind)) for kind in kinds)
    return replace(
        gemma_decoder(config, layers, logit_softcap=config.softcap("final_logit_softcapping", 30.0)),
        attention_softcap=config.softcap("attn_logit_softcapping", 50.0),
    )


def gemma_decoder(
    config: TargetConfig, layers: tuple[TargetLayer, ...], logit_softcap: float | None
) -> TargetSpec:
    """What Gemma 2 and 3 share."""
    config.get("hidden_act")  # written beside hidden_activation by some, and read by nobody
    bias = config.flag("attention_bias", default=False)
    base = config.decoder(layers, "hidden_activation", tied=True)
    return replace(
        base,
        qkv_bias=bias,
        o_bias=bias,
        norm_place=NormPlace.AROUND,
        norm_weight=NormWeight.ABOVE_ONE,
        embedding_scale=math.sqrt(base.hidden_size),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        logit_softcap=logit_softcap,
    )
