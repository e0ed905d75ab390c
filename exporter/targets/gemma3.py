"""Gemma 3, text: Gemma 2 with normalised queries and keys, and a RoPE for each type of layer."""

from __future__ import annotations

from dataclasses import replace

from .gemma2 import gemma_decoder
from .reading import FULL, SLIDING, TargetConfig
from .spec import TargetLayer, TargetSpec

_PATTERN = 6  # the default of transformers: every sixth layer sees the whole past


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' Gemma3ForCausalLM.

    It has ``attn_logit_softcapping`` in its config and does not apply it: a value there is refused.
    """
    every = config.whole("sliding_window_pattern", config.whole("_sliding_window_pattern", _PATTERN))
    kinds = config.layer_types([SLIDING if (i + 1) % every else FULL for i in range(config.depth)])
    if config.get("rope_parameters") is None:  # the older generation, with two thetas side by side
        ropes = {FULL: config.rope(), SLIDING: config.rope_of("rope_local_base_freq")}
    else:
        ropes = {kind: config.rope(kind) for kind in sorted(set(kinds))}
    layers = tuple(TargetLayer(ropes[kind], config.window(kind)) for kind in kinds)
    return replace(
        gemma_decoder(config, layers, config.softcap("final_logit_softcapping", None)), qk_norm=True
    )
