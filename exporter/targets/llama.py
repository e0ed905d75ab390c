"""Llama."""

from __future__ import annotations

from dataclasses import replace

from .reading import TargetConfig
from .spec import TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' LlamaForCausalLM."""
    bias = config.flag("attention_bias", default=False)
    return replace(
        config.decoder(config.same_layers()),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )
