"""The transformer part of a draft's config, which both formats state in the words of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...bundle.errors import UnsupportedError
from ..modules.activations import ACTIVATION_NAMES
from ..rope import ORIGINAL_LENGTH, RopeSpec, rope_from_config
from .fields import Fields
from .spec import DraftSizes

FULL, SLIDING = "full_attention", "sliding_attention"

# What transformers' config classes fill in, for keys where a checkpoint may rely on it; a test compares
# them with the classes. None: derived below. Sizes that every saved config states have no default here.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "llama": {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    },
}
_ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class Body(DraftSizes):
    """Sizes, layer types and RoPE. `windows` has one entry a layer: its window in tokens, None = full."""

    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    rope: RopeSpec


def body_from_fields(
    fields: Fields, config: Mapping[str, Any], model_type: str, rope_layer_type: str | None
) -> Body:
    """Read the transformer keys of `config`, whose keys `fields` reads.

    Args:
        fields: reads `config` (and possibly more).
        config: the dict with the RoPE keys.
        model_type: whose defaults apply, ``qwen3`` or ``llama``.
        rope_layer_type: entry of per-layer-type RoPE parameters that applies to every layer, None if the
            format has no such thing.

    Raises:
        CheckpointError: a key is missing, of a wrong type or contradicts another.
        UnsupportedError: an activation, layer type or RoPE that is not implemented.
    """
    default = CLASS_DEFAULTS[model_type]
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    kv_heads = _or_derived(fields, "num_key_value_heads", default, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    head_dim = _or_derived(fields, "head_dim", default, hidden // heads)
    longest = fields.whole("max_position_embeddings", default["max_position_embeddings"])
    eps = fields.number("rms_norm_eps", default["rms_norm_eps"])
    if eps <= 0:
        raise fields.error("rms_norm_eps", eps, "a number > 0")
    fields.same("mlp_bias", False, "the original's MLP has no bias")
    fields.same("quantization_config", None, "quantised draft weights are not implemented")
    fields.use(*_ROPE_KEYS)
    rope = rope_from_config(
        {**config, "head_dim": head_dim, "max_position_embeddings": longest}, fields.place, rope_layer_type
    )
    original_length = dict(rope.parameters).get(ORIGINAL_LENGTH)
    if original_length is not None and not _states(config, ORIGINAL_LENGTH):
        fields.fill(ORIGINAL_LENGTH, original_length)
    layer_types, windows = _layers(fields, default)
    return Body(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        hidden_act=fields.text("hidden_act", default["hidden_act"], ACTIVATION_NAMES),
        attention_bias=fields.flag("attention_bias", default["attention_bias"]),
        layer_types=layer_types,
        windows=windows,
        rope=rope,
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=longest,
        pad_token_id=fields.optional_whole("pad_token_id", minimum=-1),
    )


def _or_derived(fields: Fields, key: str, default: Mapping[str, Any], derived: int) -> int:
    """The key, the class's default where it is absent, `derived` where that is or the file says null."""
    if fields.value(key, default[key]) is not None:
        return fields.whole(key, default[key])
    fields.fill(key, derived)
    return derived


def _states(config: Mapping[str, Any], key: str) -> bool:
    """Whether `key` stands anywhere in `config`."""
    return key in config or any(_states(v, key) for v in config.values() if isinstance(v, Mapping))


def _layers(fields: Fields, default: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Layer types and windows by the rule of the config class.

    Qwen3Config drops the window unless use_sliding_window is true, and without layer_types makes the layers
    from max_window_layers on sliding. LlamaConfig has no window of its own and takes what it is given.
    """
    count = fields.whole("num_hidden_layers")
    gated = "max_window_layers" in default
    stated = fields.value("layer_types", None)
    use = False if gated else None
    if fields.value("use_sliding_window", None) is not None:
        use = fields.flag("use_sliding_window")
    window = fields.value("sliding_window", None)
    fields.use("max_window_layers")
    if stated is None:
        first = fields.whole("max_window_layers", default["max_window_layers"], 0) if gated and use else None
        sliding = use and (window is not None or "sliding_window" not in fields)
        types = [SLIDING if first is not None and sliding and i >= first else FULL for i in range(count)]
        fields.fill("layer_types", types)
    else:
        if not isinstance(stated, list) or len(stated) != count:
            raise fields.error("layer_types", stated, f"a list of {count}, one for each of num_hidden_layers")
        for kind in stated:
            if kind not in (FULL, SLIDING):
                raise fields.error("layer_types", kind, f"{FULL} or {SLIDING}", UnsupportedError)
        types = stated
    if SLIDING not in types:
        return tuple(types), (None,) * count
    if use is False:
        raise fields.error(
            "use_sliding_window",
            use,
            f"true beside {SLIDING} layers (transformers drops the window without it, others do not)",
        )
    size = fields.whole("sliding_window", default.get("sliding_window", window))
    return tuple(types), tuple(size if kind == SLIDING else None for kind in types)
