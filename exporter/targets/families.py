"""Target families by config: a dict of strings, imported on use; and why the others are refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from .reading import TargetConfig
from .spec import TargetSpec
from .tensors import with_tensors

# model_type of config.json -> module with `target_spec(config: TargetConfig) -> TargetSpec`.
FAMILIES = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}

# model_type -> the class that `architectures` names, where it names any. A test compares them with
# transformers. The other classes of a family have no head, or a head that gives no next token.
ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

RECURRENT = (
    "it carries a recurrent state from token to token, which cannot be rolled back by forgetting cache slots"
)
EXPERTS = "its layers route each token to experts, and routing is not implemented"
IMAGES = "it reads images or sound too, and only text decoders are implemented"
ENCODER = "it has an encoder, and only decoders are implemented"
LATENT = "its cache holds compressed keys and values, which is not implemented"

# model_type -> why not. Types that are not listed are judged by `_SIGNS`.
REFUSED = {
    **dict.fromkeys(
        (
            "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2",
            "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text",
            "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        (
            "dbrx", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe",
            "jetmoe", "llama4_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        (
            "gemma3", "gemma3n", "gemma4", "idefics3", "internvl", "llama4", "llava", "mistral3", "mllama",
            "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm",
        ),
        IMAGES,
    ),
    **dict.fromkeys(("bart", "mt5", "t5", "t5gemma", "whisper"), ENCODER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"), LATENT),
}  # fmt: skip
# Keys by which a config of an unknown type tells what it is; the first that is there and says yes.
_SIGNS = (
    (("is_encoder_decoder", "encoder", "encoder_layers"), ENCODER),
    (("vision_config", "audio_config", "text_config"), IMAGES),
    (("linear_num_key_heads", "mamba_d_state", "ssm_state_size", "state_size", "conv_L_cache"), RECURRENT),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"), EXPERTS),
    (("kv_lora_rank", "q_lora_rank"), LATENT),
)


# Keys that drafts have and no target.
_DRAFT_SIGNS = ("dflash_config", "speculators_model_type")


def target_from_checkpoint(checkpoint: Checkpoint) -> TargetSpec:
    """Parse a target checkpoint's config and tensor list.

    Raises:
        CheckpointError: a key or tensor is missing or contradicts another.
        UnsupportedError: the family or an option is not implemented.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{checkpoint.name}/config.json: model_type: missing, expected a string")
    sign = next((key for key in _DRAFT_SIGNS if key in checkpoint.config), None)
    if sign is not None:
        raise CheckpointError(
            f"{checkpoint.name}: got a DFlash draft ({sign} in config.json), expected its target; "
            "are target and draft swapped?"
        )
    module = FAMILIES.get(model_type)
    if module is None:
        raise field_error(
            UnsupportedError,
            f"{checkpoint.name}: target model_type",
            model_type,
            "one of " + ", ".join(sorted(FAMILIES)),
            reason_against(model_type, checkpoint.config),
        )
    named = checkpoint.config.get("architectures")
    if named and ARCHITECTURES[model_type] not in named:
        raise field_error(
            UnsupportedError,
            f"{checkpoint.name}/config.json: architectures",
            named,
            f"{ARCHITECTURES[model_type]} for a target of model_type {model_type!r}",
        )
    config = TargetConfig(checkpoint)
    spec: TargetSpec = importlib.import_module(f".{module}", __package__).target_spec(config)
    config.check_all_read()
    return with_tensors(spec, checkpoint)


def reason_against(model_type: str, config: Mapping[str, Any]) -> str:
    """Why a family is refused, or "" if nothing is known about it."""
    if model_type in REFUSED:
        return REFUSED[model_type]
    return next((why for keys, why in _SIGNS if any(config.get(key) for key in keys)), "")
