"""RoPE: both config generations, and tables equal to transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.rope import RopeKind, RopeSpec, rope_from_config, rope_tables

BASE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 8192}
POSITIONS = torch.arange(8192)[None]  # [1, S]

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-all": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25, "truncate": False},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}


def read(**keys):
    return rope_from_config(BASE | keys, "draft/config.json")


def cos_sin(spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq, scaling = rope_tables(spec)
    angle = POSITIONS[0, :, None].float() * inv_freq  # [S, D / 2]
    both = torch.cat([angle, angle], -1)
    return both.cos() * scaling, both.sin() * scaling


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("config_class", "rope_class"), [(Qwen3Config, Qwen3RotaryEmbedding), (LlamaConfig, LlamaRotaryEmbedding)]
)
def test_tables_equal_transformers(kind, config_class, rope_class):
    rope = KINDS[kind] | {"rope_theta": 5e5}
    config = config_class(**BASE, rope_parameters=dict(rope))
    cos, sin = rope_class(config)(torch.zeros(1), POSITIONS)
    ours = cos_sin(read(rope_parameters=rope))
    assert torch.equal(ours[0], cos[0])
    assert torch.equal(ours[1], sin[0])


def test_four_ways_to_say_the_same():
    ways: list[dict[str, Any]] = [
        {"rope_theta": 1e7},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e7},
        {"rope_scaling": None, "rope_theta": 1e7},
    ]
    specs = [read(**way) for way in ways]
    assert set(specs) == {RopeSpec(RopeKind.DEFAULT, 1e7, 16, 8192)}
    expected = Qwen3RotaryEmbedding(Qwen3Config(**BASE, rope_theta=1e7))(torch.zeros(1), POSITIONS)
    for spec in specs:
        for ours, theirs in zip(cos_sin(spec), expected, strict=True):
            assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_older_generation_means_the_same(kind):
    new = KINDS[kind] | {"rope_theta": 1e6}
    old = {k: v for k, v in KINDS[kind].items() if k != "rope_type"} | {"type": kind}
    assert read(rope_scaling=old, rope_theta=1e6) == read(rope_parameters=new)
    assert read(rope_scaling=KINDS[kind], rope_theta=1e6, rope_parameters=None) == read(rope_parameters=new)
    # Both generations side by side are fine as long as they agree.
    assert read(rope_scaling=old, rope_theta=1e6, rope_parameters=new) == read(rope_parameters=new)


def test_original_length_by_transformers_rule():
    rope = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"} | {"rope_theta": 1e4}
    spec = read(rope_parameters=rope)
    assert dict(spec.parameters)["original_max_position_embeddings"] == 8192
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**BASE, rope_parameters=dict(rope)))
    assert torch.equal(rope_tables(spec)[0], theirs.inv_freq)
    beside = read(rope_parameters=rope, original_max_position_embeddings=4096)
    assert dict(beside.parameters)["original_max_position_embeddings"] == 4096


def test_per_layer_type():
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        # transformers adds these two when it saves; they decide nothing
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
    for layer_type, theta in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        spec = rope_from_config(BASE | {"rope_parameters": nested}, "c.json", layer_type)
        assert spec.theta == theta
    with pytest.raises(UnsupportedError, match=r"rope_parameters: got .*the same RoPE for every layer type"):
        read(rope_parameters=nested)
    with pytest.raises(
        CheckpointError, match=r"rope_parameters: got \['full_attention'\].*'sliding_attention'"
    ):
        rope_from_config(
            BASE | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "c.json", "sliding_attention"
        )
    same = {
        kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")
    }
    assert read(rope_parameters=same).theta == 1e6


def test_head_dim():
    config = {k: v for k, v in BASE.items() if k != "head_dim"} | {"rope_theta": 1e4}
    assert rope_from_config(config, "c.json").head_dim == 16
    assert rope_from_config(config | {"head_dim": None}, "c.json").head_dim == 16
    assert rope_from_config(config | {"head_dim": 24}, "c.json").head_dim == 24


def test_neutral_keys_are_fine():
    spec = read(
        rope_theta=1e4,
        partial_rotary_factor=1.0,
        rope_parameters={"rope_type": "default", "factor": None, "partial_rotary_factor": 1},
    )
    assert spec == RopeSpec(RopeKind.DEFAULT, 1e4, 16, 8192)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({}, CheckpointError, "draft/config.json: rope_theta: missing.*no safe default"),
        ({"rope_scaling": YARN}, CheckpointError, "rope_theta: missing"),
        ({"rope_parameters": {"rope_type": "default"}}, CheckpointError, "rope_theta: missing"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            CheckpointError,
            r"rope_theta: got 1000000.0 \(draft/config.json: rope_parameters.rope_theta\), 10000.0",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            CheckpointError,
            "rope_scaling: got .*the same as rope_parameters .*remove one",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
            CheckpointError,
            "rope_scaling: got .*the same as rope_parameters",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            UnsupportedError,
            "rope_scaling.rope_type: got 'dynamic', expected one of default, linear, llama3, yarn",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
            CheckpointError,
            "rope_scaling.type: got 'yarn', expected its rope_type 'linear'",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 8]}},
            UnsupportedError,
            r"rope_parameters.mrope_section: got \[8, 8\], expected no such key for rope_type 'default'",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": LLAMA3 | {"beta_fast": 3}},
            UnsupportedError,
            "rope_parameters.beta_fast: got 3",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            CheckpointError,
            "rope_scaling.factor: missing, expected a number for rope_type 'linear'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "4"}},
            CheckpointError,
            "rope_scaling.factor: got '4', expected a number > 0",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": YARN | {"truncate": 1}},
            CheckpointError,
            "rope_parameters.truncate: got 1, expected true or false",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": YARN, "original_max_position_embeddings": 99},
            CheckpointError,
            "original_max_position_embeddings: got 2048, expected .* 99",
        ),
        ({"rope_theta": "1e4"}, CheckpointError, "rope_theta: got '1e4', expected a number > 0"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta: got 0, expected a number > 0"),
        ({"rope_theta": True}, CheckpointError, "rope_theta: got True, expected a number > 0"),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            UnsupportedError,
            r"partial_rotary_factor: got 0.5, expected 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            UnsupportedError,
            r"rope_parameters.partial_rotary_factor: got 0.25",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": "yarn"},
            CheckpointError,
            "rope_scaling: got 'yarn', expected an object",
        ),
        ({"rope_theta": 1e4, "head_dim": 15}, CheckpointError, "head_dim: got 15, expected an even number"),
        (
            {"rope_theta": 1e4, "max_position_embeddings": None},
            CheckpointError,
            "max_position_embeddings: got None, expected a whole number >= 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "factor": 3}},
            UnsupportedError,
            "rope_parameters.factor: got 3, expected only layer types",
        ),
    ],
)
def test_refusals(keys, error, message):
    with pytest.raises(error, match=message):
        read(**keys)
