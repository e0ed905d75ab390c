"""Qwen3: queries and keys are normalised."""

from __future__ import annotations

from dataclasses import replace

from .reading import TargetConfig
from .spec import TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' Qwen3ForCausalLM."""
    bias = config.flag("attention_bias", default=False)
    return replace(config.decoder(config.windowed_layers()), qk_norm=True, qkv_bias=bias, o_bias=bias)
