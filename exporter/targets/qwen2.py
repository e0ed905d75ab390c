"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from .reading import TargetConfig
from .spec import TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' Qwen2ForCausalLM."""
    return replace(config.decoder(config.windowed_layers()), qkv_bias=True)
