"""SmolLM3: Llama in which some layers do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from ...bundle.errors import CheckpointError, field_error
from .reading import FULL, SLIDING, TargetConfig
from .spec import TargetLayer, TargetSpec


def target_spec(config: TargetConfig) -> TargetSpec:
    """Parse as transformers' SmolLM3ForCausalLM."""
    bias = config.flag("attention_bias", default=False)
    return replace(
        config.decoder(_layers(config), tied=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _layers(config: TargetConfig) -> tuple[TargetLayer, ...]:
    every = config.whole("no_rope_layer_interval", 4)  # the default of transformers
    rotate = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(config.depth)])
    if not isinstance(rotate, list) or len(rotate) < config.depth or any(r not in (0, 1) for r in rotate):
        raise field_error(
            CheckpointError,
            f"{config.where}: no_rope_layers",
            rotate,
            f"{config.depth} entries, 1 for a layer with RoPE and 0 for one without",
        )
    windowed = config.flag("use_sliding_window", default=False) and config.get("sliding_window") is not None
    kinds = config.layer_types([SLIDING if windowed and not r else FULL for r in rotate[: config.depth]])
    if SLIDING in kinds and not windowed:
        raise field_error(
            CheckpointError,
            f"{config.where}: use_sliding_window",
            False,
            "true, and a sliding_window, since layer_types has sliding_attention",
        )
    rope = config.rope()
    return tuple(
        TargetLayer(rope if r else None, config.window(kind)) for r, kind in zip(rotate, kinds, strict=False)
    )
