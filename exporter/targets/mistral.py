"""Mistral: Llama without biases, every layer with the same window, or none."""

from __future__ import annotations

from .reading import FULL, SLIDING, TargetConfig
from .spec import TargetLayer, TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' MistralForCausalLM.

    transformers ignores ``layer_types`` here; they are left unread, so that other than full attention
    everywhere is refused.
    """
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return config.decoder((TargetLayer(config.rope(), config.window(kind)),) * config.depth)
