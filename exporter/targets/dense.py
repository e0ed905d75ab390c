"""Llama, Qwen2 and Qwen3: pre-norm decoders that differ in biases and in the norm of queries and keys."""

from __future__ import annotations

from typing import Any

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from ..modules.activations import ACTIVATION_NAMES
from ..rope import rope_from_config
from .families import stop_ids
from .spec import TargetSpec

# Keys that decide nothing in inference or are read elsewhere.
_HARMLESS = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "max_window_layers", "mlp_dropout", "model_type",
    "pad_token_id", "pretraining_tp", "rope_interleaved", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_cache", "_name_or_path", "chunk_size_feed_forward",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "layer_types", "embd_pdrop", "resid_pdrop", "attn_pdrop",
}  # fmt: skip
_USED = {
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "partial_rotary_factor",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings",
    "use_sliding_window", "vocab_size",
}  # fmt: skip


def target_spec(checkpoint: Checkpoint) -> TargetSpec:
    """Parse config and tensors of a Llama, Qwen2 or Qwen3 checkpoint."""
    config, where = checkpoint.config, f"{checkpoint.name}/config.json"
    unknown = sorted(set(config) - _HARMLESS - _USED)
    if unknown:
        raise field_error(
            UnsupportedError, f"{where}: {unknown[0]}", config[unknown[0]], "no key that is not implemented"
        )
    family = config["model_type"]

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise field_error(CheckpointError, f"{where}: {key}", config.get(key), "a whole number >= 1")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    if config.get("rope_interleaved"):
        raise field_error(UnsupportedError, f"{where}: rope_interleaved", True, "false")
    if config.get("mlp_bias"):
        raise field_error(UnsupportedError, f"{where}: mlp_bias", True, "false")
    if config.get("use_sliding_window") or (family == "llama" and config.get("sliding_window")):
        raise field_error(
            UnsupportedError, f"{where}: sliding_window", config.get("sliding_window"), "no sliding window"
        )
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise field_error(
            UnsupportedError, f"{where}: layer_types", config["layer_types"], "full_attention in all layers"
        )
    act = config.get("hidden_act", "silu")
    if act not in ACTIVATION_NAMES:
        raise field_error(UnsupportedError, f"{where}: hidden_act", act, f"one of {ACTIVATION_NAMES}")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float | int) or not eps > 0:
        raise field_error(CheckpointError, f"{where}: rms_norm_eps", eps, "a number > 0")
    bias = bool(config.get("attention_bias", False))
    spec = TargetSpec(
        family=family,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        rms_norm_eps=float(eps),
        hidden_act=act,
        rope=rope_from_config(config, where),
        qk_norm=family == "qwen3",
        qkv_bias=True if family == "qwen2" else bias,
        o_bias=False if family == "qwen2" else bias,
        vocab_size=number("vocab_size"),
        embedding_rows=number("vocab_size"),
        tied=_tied(checkpoint),
        max_position_embeddings=number("max_position_embeddings"),
        checkpoint_dtype=checkpoint.tensors[_EMBED].dtype if _EMBED in checkpoint.tensors else "unknown",
        stop_token_ids=stop_ids(checkpoint),
        bos_token_id=config.get("bos_token_id"),
        tensors=(),
    )
    return _with_tensors(spec, checkpoint)


_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def _tied(checkpoint: Checkpoint) -> bool:
    tied: Any = checkpoint.config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise field_error(
            CheckpointError, f"{checkpoint.name}/config.json: tie_word_embeddings", tied, "true or false"
        )
    if not tied and _HEAD not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.name}: tensor {_HEAD!r} is missing and tie_word_embeddings is false; "
            "expected one of the two"
        )
    return tied


def _with_tensors(spec: TargetSpec, checkpoint: Checkpoint) -> TargetSpec:
    """Find every tensor, check its shape, and refuse tensors that nothing uses."""
    import dataclasses

    shapes = dict(_shapes(spec))
    names: dict[str, str] = {}
    for canonical, shape in shapes.items():
        stored = canonical if canonical.startswith("lm_head") else f"model.{canonical}"
        entry = checkpoint.tensors.get(stored)
        if entry is None:
            raise CheckpointError(f"{checkpoint.name}: tensor {stored!r} is missing, expected shape {shape}")
        if entry.shape != shape:
            raise field_error(
                CheckpointError, f"{checkpoint.name}: tensor {stored!r}", entry.shape, str(shape)
            )
        names[canonical] = stored
    spare = sorted(
        name
        for name in set(checkpoint.tensors) - set(names.values())
        if not name.endswith("rotary_emb.inv_freq") and not (spec.tied and name == _HEAD)
    )
    if spare:
        raise CheckpointError(
            f"{checkpoint.name}: got a tensor {spare[0]!r} (and {len(spare) - 1} more) that {spec.family} "
            "does not use, expected none; is model_type right?"
        )
    return dataclasses.replace(spec, tensors=tuple(sorted(names.items())))


def _shapes(spec: TargetSpec) -> list[tuple[str, tuple[int, ...]]]:
    h, i = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("embed_tokens.weight", (spec.embedding_rows, h)),
        ("norm.weight", (h,)),
    ]
    if not spec.tied:
        shapes.append(("lm_head.weight", (spec.vocab_size, h)))
    for layer in range(spec.num_layers):
        p = f"layers.{layer}."
        shapes += [
            (p + "input_layernorm.weight", (h,)),
            (p + "post_attention_layernorm.weight", (h,)),
            (p + "self_attn.q_proj.weight", (q, h)),
            (p + "self_attn.k_proj.weight", (kv, h)),
            (p + "self_attn.v_proj.weight", (kv, h)),
            (p + "self_attn.o_proj.weight", (h, q)),
            (p + "mlp.gate_proj.weight", (i, h)),
            (p + "mlp.up_proj.weight", (i, h)),
            (p + "mlp.down_proj.weight", (h, i)),
        ]
        if spec.qkv_bias:
            shapes += [(p + f"self_attn.{n}_proj.bias", (s,)) for n, s in (("q", q), ("k", kv), ("v", kv))]
        if spec.o_bias:
            shapes.append((p + "self_attn.o_proj.bias", (h,)))
        if spec.qk_norm:
            shapes += [(p + f"self_attn.{n}_norm.weight", (spec.head_dim,)) for n in "qk"]
    return shapes
