"""z-lab drafts: every field of the spec against the original's own attributes, published shapes, refusals."""

import copy
import json
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.activations import ACT2FN

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint, TensorEntry
from dflash_deploy.exporter.drafts.formats import draft_from_checkpoint, read_draft
from dflash_deploy.exporter.drafts.spec import ConvSpec, DraftFamily, DraftFormat, SelectorSpec, WindowOrigin
from dflash_deploy.exporter.drafts.zlab import default_taps
from dflash_deploy.exporter.rope import rope_tables
from originals import zlab_draft
from shape_checkpoint import ShapeCheckpoint, zlab_shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(64))
def test_spec_is_the_original(seed, tmp_path):
    from dflash.model import DFlash2DraftModel, _draft_value

    model = zlab_draft(
        seed,
        tmp_path,
        dtype=DTYPES[seed % 3],
        style_own_codebooks=seed % 2 == 0,
        **({"max_shard_size": "40KB"} if seed % 5 == 0 else {}),
    )
    checkpoint = SafetensorsCheckpoint(tmp_path)
    spec = draft_from_checkpoint(checkpoint)
    second = isinstance(model, DFlash2DraftModel)
    layer = model.layers[0]

    assert spec.format is DraftFormat.ZLAB
    assert spec.family is (DraftFamily.DFLASH2 if second else DraftFamily.DFLASH)
    assert spec.hidden_size == model.fc.out_features
    assert spec.intermediate_size == layer.mlp.gate_proj.out_features
    assert spec.head_dim == layer.self_attn.head_dim
    assert spec.num_heads == layer.self_attn.q_proj.out_features // spec.head_dim
    assert spec.num_kv_heads == layer.self_attn.k_proj.out_features // spec.head_dim
    assert spec.num_heads == spec.num_kv_heads * layer.self_attn.num_key_value_groups
    assert spec.rms_norm_eps == model.norm.variance_epsilon == layer.self_attn.q_norm.variance_epsilon
    assert type(ACT2FN[spec.hidden_act]) is type(layer.mlp.act_fn)
    assert spec.attention_bias == (layer.self_attn.o_proj.bias is not None)
    assert len(spec.layers) == len(spec.ropes) == len(model.layers)
    for ours, theirs in zip(spec.layers, model.layers, strict=True):
        assert ours.causal is theirs.self_attn.is_causal
        assert ours.window == theirs.self_attn.sliding_window
        assert ours.window_origin is WindowOrigin.QUERY
    inv_freq, scaling = rope_tables(spec.ropes[0])
    assert len(set(spec.ropes)) == 1
    assert torch.equal(inv_freq, model.rotary_emb.inv_freq)
    assert scaling == model.rotary_emb.attention_scaling
    assert list(spec.taps) == model.target_layer_ids
    assert spec.num_target_layers == model.config.num_target_layers
    assert spec.target_hidden_size == model.fc.in_features // len(spec.taps)
    assert spec.block_size == model.block_size
    assert (spec.first_proposal_row, spec.proposals) == (1, model.block_size - 1)
    assert spec.mask_token_id == model.mask_token_id
    assert spec.vocab_size == model.config.vocab_size
    assert spec.draft_vocab_size is None
    assert spec.input_embedding_scale == float(_draft_value(model.config, "input_embedding_scale", 1.0))
    logits = torch.linspace(-50, 50, 101)
    scaled = logits * spec.output_multiplier
    if spec.logit_softcap is not None:
        scaled = torch.tanh(scaled / spec.logit_softcap) * spec.logit_softcap
    assert torch.equal(scaled, model.compute_logits(logits, lambda hidden: hidden))
    if second:
        conv, selector = layer.mlp_conv, model.candidate_selector
        assert spec.conv == ConvSpec(conv.kernel_size, conv.group_size)
        assert spec.selector == SelectorSpec(selector.predecessor_codebook.embedding_dim, selector.top_k)
        assert spec.vocab_size == selector.successor_codebook.num_embeddings
    else:
        assert (spec.conv, spec.selector, layer.attention_conv) == (None, None, None)
    assert spec.learned_mask is False
    assert spec.max_position_embeddings == model.config.max_position_embeddings
    assert spec.checkpoint_dtype == str(model.dtype).removeprefix("torch.")
    assert spec.pad_token_id == model.config.pad_token_id
    # Tensors: the same set, each read back as the original holds it.
    theirs = {n.replace("_codebook.weight", "_codebook"): t for n, t in model.state_dict().items()}
    assert {canonical for canonical, _ in spec.tensors} == set(theirs)
    assert {stored for _, stored in spec.tensors} == set(checkpoint.tensors)
    for canonical, stored in spec.tensors:
        assert torch.equal(checkpoint.read(stored), theirs[canonical]), canonical


def test_the_seeds_cover_the_options(tmp_path_factory):
    """What `zlab_options` draws in 64 seeds, so that the test above means something."""
    import random

    from originals import zlab_options

    drawn = [zlab_options(random.Random(f"zlab {seed}")) for seed in range(64)]
    for key, count in {
        "dflash2": 2,
        "style_flat_rope": 2,
        "style_nested": 2,
        "attention_bias": 2,
        "is_causal": 3,
        "input_embedding_scale": 4,
        "output_multiplier": 3,
        "final_logit_softcapping": 4,
        "block_size": 5,
        "sliding_window": 4,
        "num_hidden_layers": 4,
    }.items():
        assert len({options[key] for options in drawn}) == count, key
    assert len({options["rope_parameters"]["rope_type"] for options in drawn}) == 4
    assert any(sorted(options["target_layer_ids"]) != options["target_layer_ids"] for options in drawn)
    assert any(o["head_dim"] != o["hidden_size"] // o["num_attention_heads"] for o in drawn)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_query_window_is_the_originals(window, causal):
    """`WindowOrigin.QUERY` as its docstring states it, against the original's mask."""
    from dflash.model import _attention_mask

    context, block = 11, 5
    rows = torch.zeros(1, 1, block, 4)
    keys = torch.zeros(1, 1, context + block, 4)
    theirs = _attention_mask(rows, keys, is_causal=causal, sliding_window=window)[0, 0]
    p = context + torch.arange(block)[:, None]
    key = torch.arange(context + block)[None]
    ours = torch.ones_like(theirs)
    if window is not None:
        ours &= p - key < window
        if not causal:
            ours &= key - p < window
    if causal:
        ours &= key <= p
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layers", [1, 2, 5, 6, 8])
def test_taps_by_the_originals_rule(layers):
    from dflash.model import build_target_layer_ids

    for depth in (8, 28, 36, 48, 61, 94):
        assert list(default_taps(depth, layers)) == build_target_layer_ids(depth, layers)


QWEN3_4B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
# Five layers, all sliding and not causal, logits scaled and capped.
MUSE = QWEN3_8B | {
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "rope_theta": 500000,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.196,
    },
}
del MUSE["block_size"]
QWEN38: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_cache": False,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
# Five sliding layers (causal, as nothing else is said) and a full one; 9 taps.
NINE_TAPS = QWEN38 | {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 4096,
    "num_target_layers": 40,
    "draft_vocab_size": 248320,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 248077,
        "target_layer_ids": [1, 5, 9, 14, 18, 23, 28, 32, 37],
    },
}
del NINE_TAPS["is_causal"]
EIGHT_LAYERS = NINE_TAPS | {
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "use_sliding_window": False,
    "sliding_window": None,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29, 37]},
}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int | None, bool, float]] = {
    "Qwen3-4B b16": (QWEN3_4B, 5, 16, None, False, 1e6),
    "Qwen3-8B b16": (QWEN3_8B, 5, 16, None, False, 1e6),
    "Muse-type": (MUSE, 5, 16, 2048, False, 5e5),
    "Qwen3.8-type DFlash2": (QWEN38, 5, 8, 2048, False, 1e7),
    "9 taps": (NINE_TAPS, 6, 16, 4096, True, 1e7),
    "8 layers, 6 taps": (EIGHT_LAYERS, 8, 16, None, False, 1e7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name):
    config, layers, block, window, causal, theta = PUBLISHED[name]
    spec = draft_from_checkpoint(zlab_shapes(config))
    assert (len(spec.layers), spec.block_size) == (layers, block)
    assert (spec.layers[0].window, spec.layers[0].causal) == (window, causal)
    assert spec.ropes[0].theta == theta
    assert list(spec.taps) == config["dflash_config"]["target_layer_ids"]
    assert spec.mask_token_id == config["dflash_config"]["mask_token_id"]
    assert (spec.conv, spec.selector) == (
        (ConvSpec(2, 16), SelectorSpec(256, 16)) if "DFlash2" in name else (None, None)
    )
    if name == "Muse-type":
        assert (spec.output_multiplier, spec.logit_softcap) == (0.196, 20.0)
    if name == "9 taps":
        assert spec.layers[-1].window is None
        assert spec.layers[-1].causal is False


TINY = QWEN38 | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "vocab_size": 100,
    "num_target_layers": 6,
    "dflash_config": QWEN38["dflash_config"]
    | {"mask_token_id": 99, "target_layer_ids": [3, 1], "selector_rank": 4, "selector_top_k": 8},
}


@pytest.fixture(scope="module")
def shapes():
    return zlab_shapes(TINY)


@pytest.fixture
def tiny(shapes) -> ShapeCheckpoint:
    return copy.deepcopy(shapes)


def change(config, changes):
    """Set top-level keys, and those under ``dflash_config.``; ``...`` deletes."""
    for key, value in changes.items():
        place = config
        if key.startswith("dflash_config."):
            place, key = config["dflash_config"], key.removeprefix("dflash_config.")
        if value is ...:
            place.pop(key, None)
        else:
            place[key] = value


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"dflash_config.mask_token_id": ..., "mask_token_id": 7}, "mask_token_id", 7),
        ({"mask_token_id": 99}, "mask_token_id", 99),
        ({"dflash_config.block_size": ...}, "block_size", 16),
        ({"dflash_config.block_size": ..., "block_size": 4}, "block_size", 4),
        ({"block_size": 8}, "block_size", 8),
        ({"dflash_config.output_multiplier": 0.5}, "output_multiplier", 0.5),
        ({"input_embedding_scale": 3}, "input_embedding_scale", 3.0),
        ({"final_logit_softcapping": 0}, "logit_softcap", None),
        ({"final_logit_softcapping": -1.0}, "logit_softcap", None),
        ({"final_logit_softcapping": 30}, "logit_softcap", 30.0),
        ({"num_target_layers": ...}, "num_target_layers", None),
        ({"dflash_config.num_target_layers": 6}, "num_target_layers", 6),
        ({"dflash_config.target_layer_ids": ..., "num_target_layers": 36}, "taps", (1, 33)),
        ({"pad_token_id": -1}, "pad_token_id", -1),
        ({"max_position_embeddings": ...}, "max_position_embeddings", 32768),
        ({"draft_vocab_size": 100}, "draft_vocab_size", None),
        ({"model_type": ...}, "head_dim", 8),
    ],
)
def test_accepted(tiny, changes, field, value):
    change(tiny.config, changes)
    assert getattr(draft_from_checkpoint(tiny), field) == value


def test_window_rules_are_the_config_class(tiny):
    """Without layer_types the class makes the layers from max_window_layers on sliding."""
    change(tiny.config, {"layer_types": ..., "max_window_layers": 1, "is_causal": ...})
    spec = draft_from_checkpoint(tiny)
    theirs = Qwen3Config(**tiny.config)
    assert [layer.window for layer in spec.layers] == [None, theirs.sliding_window] == [None, 2048]
    assert theirs.layer_types == ["full_attention", "sliding_attention"]
    assert [layer.causal for layer in spec.layers] == [False, True]
    change(tiny.config, {"sliding_window": ...})
    assert draft_from_checkpoint(tiny).layers[1].window == Qwen3Config(**tiny.config).sliding_window == 4096
    change(tiny.config, {"max_window_layers": ...})
    assert [layer.window for layer in draft_from_checkpoint(tiny).layers] == [None, None]
    change(tiny.config, {"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 5})
    assert [layer.window for layer in draft_from_checkpoint(tiny).layers] == [None, None]
    assert Qwen3Config(**tiny.config).layer_types == ["full_attention"] * 2


def test_head_dim_of_the_class(tiny):
    """An absent head_dim is 128 to the original, whatever hidden / heads is; the tensors then disagree."""
    change(tiny.config, {"head_dim": ...})
    with pytest.raises(CheckpointError, match=r"q_proj.weight' shape: got \(32, 32\), expected \(512, 32\)"):
        draft_from_checkpoint(tiny)


def test_defaults_are_reported(tiny):
    change(tiny.config, {"dflash_config.block_size": ..., "rms_norm_eps": ...})
    defaults = {d.key: (d.value, d.source) for d in read_draft(tiny).defaults}
    assert defaults == {
        "rms_norm_eps": (1e-6, "transformers' Qwen3Config"),
        "block_size": (16, "dflash.model"),
        "input_embedding_scale": (1.0, "dflash.model"),
        "output_multiplier": (1.0, "dflash.model"),
    }


REFUSED = [
    (
        {"dflash_config.mask_token_id": ...},
        CheckpointError,
        "dflash_config.mask_token_id: missing, expected it in draft/config.json",
    ),
    (
        {"dflash_config.mask_token_id": -1},
        CheckpointError,
        "dflash_config.mask_token_id: got -1, expected a whole number >= 0; correct it in draft/config.json",
    ),
    ({"dflash_config.mask_token_id": None}, CheckpointError, "mask_token_id: got None"),
    (
        {"mask_token_id": 5},
        CheckpointError,
        "dflash_config.mask_token_id: got 99, expected the same as mask_token_id, which is 5; remove",
    ),
    (
        {"block_size": 16},
        CheckpointError,
        "dflash_config.block_size: got 8, expected the same as block_size, which is 16",
    ),
    (
        {"dflash_config.final_logit_softcapping": None, "final_logit_softcapping": 20.0},
        CheckpointError,
        "final_logit_softcapping: got None, expected the same as",
    ),
    (
        {"target_layer_ids": [1, 3]},
        CheckpointError,
        r"dflash_config.target_layer_ids: got \[3, 1\], expected the same",
    ),
    (
        {"dflash_config.block_size": 0},
        CheckpointError,
        "dflash_config.block_size: got 0, expected a whole number >= 2",
    ),
    ({"dflash_config.block_size": 1}, CheckpointError, "block_size: got 1, expected a whole number >= 2"),
    ({"dflash_config.block_size": 8.0}, CheckpointError, "block_size: got 8.0"),
    (
        {"dflash_config.target_layer_ids": []},
        CheckpointError,
        r"target_layer_ids: got \[\], expected a list of whole numbers",
    ),
    (
        {"dflash_config.target_layer_ids": [1, -1]},
        CheckpointError,
        "target_layer_ids: got -1, expected layers counted from 0",
    ),
    (
        {"dflash_config.target_layer_ids": [1, 6]},
        CheckpointError,
        "target_layer_ids: got 6, expected < num_target_layers 6",
    ),
    (
        {"dflash_config.target_layer_ids": [1, 5]},
        UnsupportedError,
        "target_layer_ids: got 5, expected a layer before the last one",
    ),
    (
        {"dflash_config.target_layer_ids": ..., "num_target_layers": ...},
        CheckpointError,
        "target_layer_ids: got None, expected a list of target layers, or num_target_layers",
    ),
    (
        {"dflash_config.output_multiplier": "0.2"},
        CheckpointError,
        "output_multiplier: got '0.2', expected a finite number",
    ),
    ({"dflash_config.output_multiplier": float("nan")}, CheckpointError, "output_multiplier: got nan"),
    (
        {"dflash_config.tap_shift": 0},
        UnsupportedError,
        r"dflash_config.tap_shift: got 0, expected no such key .*; remove it from draft/config.json",
    ),
    ({"dflash_config.attention_mode": "mla"}, UnsupportedError, "dflash_config.attention_mode: got 'mla'"),
    (
        {"dflash_config.causal": True},
        CheckpointError,
        "dflash_config.causal: got True, expected what is_causal and layer_types say",
    ),
    (
        {"dflash_config.is_causal": True},
        UnsupportedError,
        "dflash_config.is_causal: got True, expected no such key",
    ),
    ({"dflash_config.hidden_size": 32}, UnsupportedError, "dflash_config.hidden_size: got 32"),
    ({"dflash_config.use_cache": True}, UnsupportedError, "dflash_config.use_cache"),
    ({"dflash_config": 3}, CheckpointError, "dflash_config: got 3, expected an object"),
    ({"attention_sink_bias": True}, UnsupportedError, "^attention_sink_bias: got True, expected no such key"),
    ({"per_layer_config": {}}, UnsupportedError, "per_layer_config"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        UnsupportedError,
        "quantization_config: got .*quantised draft weights",
    ),
    ({"mlp_bias": True}, UnsupportedError, "mlp_bias: got True, expected False"),
    ({"model_type": "llama"}, UnsupportedError, "model_type: got 'llama', expected 'qwen3'"),
    ({"draft_vocab_size": 40}, UnsupportedError, "draft_vocab_size: got 40, expected 100"),
    ({"hidden_act": "relu2"}, UnsupportedError, "hidden_act: got 'relu2', expected one of gelu"),
    ({"is_causal": 0}, CheckpointError, "is_causal: got 0, expected true or false"),
    ({"attention_bias": "no"}, CheckpointError, "attention_bias: got 'no', expected true or false"),
    (
        {"layer_types": ["full_attention"]},
        CheckpointError,
        r"layer_types: got \['full_attention'\], expected a list of 2",
    ),
    (
        {"layer_types": ["full_attention", "chunked_attention"]},
        UnsupportedError,
        "layer_types: got 'chunked_attention', expected full_attention or sliding_attention",
    ),
    (
        {"use_sliding_window": False},
        CheckpointError,
        "use_sliding_window: got False, expected true beside sliding_attention layers",
    ),
    ({"use_sliding_window": ...}, CheckpointError, "use_sliding_window: got False, expected true beside"),
    ({"sliding_window": None}, CheckpointError, "sliding_window: got None, expected a whole number >= 1"),
    ({"sliding_window": 0}, CheckpointError, "sliding_window: got 0"),
    (
        {"num_key_value_heads": 3},
        CheckpointError,
        "num_key_value_heads: got 3, expected a divisor of num_attention_heads 4",
    ),
    ({"head_dim": 7}, CheckpointError, "head_dim: got 7, expected an even number"),
    ({"rms_norm_eps": 0.0}, CheckpointError, "rms_norm_eps: got 0.0, expected a number > 0"),
    ({"hidden_size": ...}, CheckpointError, "hidden_size: missing, expected it in draft/config.json"),
    ({"vocab_size": ...}, CheckpointError, "vocab_size: missing"),
    ({"rope_parameters": ...}, CheckpointError, "draft/config.json: rope_theta: missing"),
    ({"rope_theta": 1e6}, CheckpointError, "rope_theta: got 10000000.0 .* 1000000.0"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        UnsupportedError,
        "rope_parameters: got .*expected one RoPE for all layers",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        UnsupportedError,
        "rope_parameters.rope_type: got 'longrope'",
    ),
    ({"dflash_config.conv_kernel_size": ...}, CheckpointError, "dflash_config.conv_kernel_size: missing"),
    (
        {"dflash_config.conv_kernel_size": 9},
        CheckpointError,
        "conv_kernel_size: got 9, expected <= block_size 8",
    ),
    (
        {"dflash_config.conv_group_size": 5},
        CheckpointError,
        "conv_group_size: got 5, expected a divisor of hidden_size 32",
    ),
    (
        {"dflash_config.selector_top_k": 101},
        CheckpointError,
        "selector_top_k: got 101, expected <= vocab_size 100",
    ),
    (
        {"dflash_config.selector_rank": 0},
        CheckpointError,
        "selector_rank: got 0, expected a whole number >= 1",
    ),
    (
        {"architectures": ["DFlashDraftModel"]},
        UnsupportedError,
        "dflash_config.conv_group_size: got 16, expected no such key",
    ),
    (
        {"architectures": ["DFlashLagunaForCausalLM"]},
        UnsupportedError,
        r"architectures: got \['DFlashLagunaForCausalLM'\], expected DFlashDraftModel or DFlash2DraftModel",
    ),
    (
        {"architectures": ["Qwen3ForCausalLM"], "dflash_config": ...},
        CheckpointError,
        "architectures: got .*give a draft here, not a target",
    ),
    (
        {"speculators_model_type": "eagle3"},
        UnsupportedError,
        "speculators_model_type: got 'eagle3', expected one of dflash, dflash2",
    ),
    (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        CheckpointError,
        r"'layers.2.input_layernorm.weight': missing \(and 14 more\), expected shape \(32,\) for a z-lab",
    ),
    (
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        UnsupportedError,
        r"'layers.1.attention_conv.base_kernel': got shape .* \(and 14 more\), expected no such tensor",
    ),
    (
        {"dflash_config.target_layer_ids": [1]},
        CheckpointError,
        r"tensor 'fc.weight' shape: got \(32, 64\), expected \(32, 32\) by config.json",
    ),
    (
        {"attention_bias": True},
        CheckpointError,
        r"tensor 'layers.0.self_attn.q_proj.bias': missing \(and 7 more\)",
    ),
    (
        {"vocab_size": 104},
        CheckpointError,
        r"predecessor_codebook' shape: got \(100, 4\), expected \(104, 4\)",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(tiny, changes, error, message):
    change(tiny.config, changes)
    with pytest.raises(error, match=message):
        draft_from_checkpoint(tiny)


@pytest.mark.parametrize(
    ("name", "entry", "error", "message"),
    [
        (
            "layers.0.self_attn.g_proj.weight",
            ("bfloat16", (4, 32)),
            UnsupportedError,
            r"'layers.0.self_attn.g_proj.weight': got shape \(4, 32\), expected no such tensor in a z-lab",
        ),
        ("lm_head.weight", ("bfloat16", (100, 32)), UnsupportedError, "tensor 'lm_head.weight'"),
        ("model.norm.weight", ("bfloat16", (32,)), UnsupportedError, "tensor 'model.norm.weight'"),
        (
            "norm.weight",
            ("bfloat16", (33,)),
            CheckpointError,
            r"tensor 'norm.weight' shape: got \(33,\), expected \(32,\)",
        ),
        (
            "norm.weight",
            ("F8_E4M3", (32,)),
            UnsupportedError,
            "tensor 'norm.weight' dtype: got 'F8_E4M3', expected one of float32, float16, bfloat16",
        ),
        ("norm.weight", None, CheckpointError, "tensor 'norm.weight': missing, expected shape"),
        (
            "candidate_selector.predecessor_codebook.weight",
            ("bfloat16", (100, 4)),
            CheckpointError,
            "predecessor_codebook': got 'candidate_selector.predecessor_codebook.weight' too",
        ),
    ],
)
def test_tensors_are_all_accounted_for(tiny, name, entry, error, message):
    if entry is None:
        del tiny.tensors[name]
    else:
        tiny.tensors[name] = TensorEntry(name, *entry)
    with pytest.raises(error, match=message):
        draft_from_checkpoint(tiny)


def test_refused_before_any_tensor_is_read(tiny):
    assert tiny.values == {}  # `read` would raise
    assert draft_from_checkpoint(tiny).tensors


def test_recognition_is_reported(tiny):
    mark = read_draft(tiny).recognition
    assert mark.reason == "architectures has DFlash2DraftModel, and there is no speculators_model_type"


def test_published_names_load_in_the_original(tmp_path):
    """The files that the generator writes are the ones z-lab's `from_pretrained` reads."""
    model = zlab_draft(5, tmp_path, dflash2=True, dtype=torch.bfloat16)
    names = set(SafetensorsCheckpoint(tmp_path).tensors)
    assert "candidate_selector.predecessor_codebook" in names
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    again = type(model).from_pretrained(tmp_path, dtype="auto")
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
