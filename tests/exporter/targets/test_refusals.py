"""What is not a dense decoder, or asks for what a family does not do, is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.checkpoint import checkpoint_from_source
from dflash_deploy.exporter.targets import families
from dflash_deploy.exporter.targets.families import (
    ARCHITECTURES,
    FAMILIES,
    REFUSED,
    reason_against,
    target_from_checkpoint,
)
from originals import SLIDING, tiny_target
from target_cases import edit_config, options


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen3_next", "recurrent state"),
        ("qwen3_moe", "experts"),
        ("gemma3", "images"),
        ("t5gemma", "encoder"),
        ("deepseek_v3", "compressed"),
    ],
)
def test_other_families_are_refused_with_the_reason(model_type: str, why: str, tmp_path: Path) -> None:
    tiny_target(1, tmp_path, num_hidden_layers=1)
    edit_config(tmp_path, model_type=model_type)
    with pytest.raises(
        UnsupportedError, match=f"model_type: got '{model_type}', expected one of gemma2.*{why}"
    ):
        target_from_checkpoint(checkpoint_from_source(str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"vision_config": {}, "text_config": {"a": 1}}, families.IMAGES),
        ({"num_local_experts": 8}, families.EXPERTS),
        ({"ssm_state_size": 128}, families.RECURRENT),
        ({"is_encoder_decoder": True}, families.ENCODER),
        ({"kv_lora_rank": 512}, families.LATENT),
        ({"is_encoder_decoder": False, "num_experts": None}, ""),
    ],
)
def test_unknown_families_are_judged_by_their_keys(config: dict[str, Any], why: str) -> None:
    assert reason_against("brand_new", config) == why


def test_refused_names_are_names_of_transformers_and_no_family_is_among_them() -> None:
    assert not set(REFUSED) & set(FAMILIES)
    assert set(REFUSED) <= set(CONFIG_MAPPING_NAMES), set(REFUSED) - set(CONFIG_MAPPING_NAMES)


def test_the_classes_are_those_of_transformers() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)
    for model_type, name in ARCHITECTURES.items():
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        assert name in ((named,) if isinstance(named, str) else named), model_type


def test_a_config_without_architectures_is_a_target(tmp_path: Path) -> None:
    tiny_target(1, tmp_path, num_hidden_layers=1)
    edit_config(tmp_path, architectures=...)
    target_from_checkpoint(checkpoint_from_source(str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "values", "error", "message"),
    [
        ("llama", {"sliding_window": 8}, UnsupportedError, "sliding_window: got 8"),
        ("llama", {"architectures": ["LlamaModel"]}, UnsupportedError, "got .'LlamaModel'., expected Llama"),
        ("llama", {"new_option": 1}, UnsupportedError, "new_option: got 1"),
        ("llama", {"rope_interleaved": True}, UnsupportedError, "rope_interleaved: got True"),
        (
            "llama",
            {"num_key_value_heads": 3},
            CheckpointError,
            "num_key_value_heads: got 3, expected a divisor",
        ),
        ("llama", {"hidden_act": "gelu_new"}, UnsupportedError, "hidden_act: got 'gelu_new'"),
        ("qwen2", {"attention_bias": True}, UnsupportedError, "attention_bias: got True"),
        (
            "qwen3",
            {"layer_types": [SLIDING] * 2, "use_sliding_window": False},
            CheckpointError,
            "use_sliding_",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, UnsupportedError, "got 'chunked_attention'"),
        ("qwen3", {"layer_types": [SLIDING]}, CheckpointError, "expected a list of 2 entries"),
        ("mistral", {"layer_types": [SLIDING] * 2}, UnsupportedError, "layer_types: got"),
        ("smollm3", {"no_rope_layers": [1]}, CheckpointError, "no_rope_layers: got"),
        ("gemma2", {"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention"),
        ("gemma2", {"sliding_window": None}, CheckpointError, "sliding_window: got None"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, UnsupportedError, "attn_logit_softcapping"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar: got 0"),
    ],
)
def test_options_that_a_family_does_not_do_are_refused(
    family: str, values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    drawn = options(family, 1, layers=2)
    if family.startswith("gemma"):
        drawn["layer_types"] = None
    tiny_target(1, tmp_path, family, **drawn)
    edit_config(tmp_path, **values)
    with pytest.raises(error, match=message):
        target_from_checkpoint(checkpoint_from_source(str(tmp_path)))


def test_older_gemma3_configs_have_two_thetas(tmp_path: Path) -> None:
    drawn = options("gemma3_text", 1, layers=2) | {"layer_types": None, "sliding_window_pattern": 2}
    tiny_target(1, tmp_path, "gemma3_text", **drawn)
    edit_config(
        tmp_path,
        rope_parameters=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    sliding, full = target_from_checkpoint(checkpoint_from_source(str(tmp_path))).layers
    assert sliding.rope is not None and full.rope is not None
    assert (sliding.rope.theta, sliding.rope.kind.value) == (1e4, "default")
    assert (full.rope.theta, full.rope.kind.value, full.rope.parameters) == (
        1e6,
        "linear",
        (("factor", 8.0),),
    )
