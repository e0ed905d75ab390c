"""speculators drafts: every field of the spec against the original's own attributes, shapes, refusals."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint, TensorEntry
from dflash_deploy.exporter.drafts.body import CLASS_DEFAULTS
from dflash_deploy.exporter.drafts.formats import draft_from_checkpoint, read_draft
from dflash_deploy.exporter.drafts.spec import ConvSpec, DraftFamily, DraftFormat, SelectorSpec, WindowOrigin
from dflash_deploy.exporter.drafts.speculators import DEFAULTS, DFLASH2_DEFAULTS, NON_CAUSAL_DEFAULTS
from dflash_deploy.exporter.rope import rope_tables
from originals import speculators_draft, tiny_target
from shape_checkpoint import ShapeCheckpoint, speculators_shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(64))
def test_spec_is_the_original(seed, tmp_path):
    from speculators.models.dflash2 import DFlash2DraftModel

    model = speculators_draft(
        seed,
        tmp_path,
        dtype=DTYPES[seed % 3],
        **({"max_shard_size": "40KB"} if seed % 5 == 0 else {}),
    )
    checkpoint = SafetensorsCheckpoint(tmp_path)
    spec = draft_from_checkpoint(checkpoint)
    second = isinstance(model, DFlash2DraftModel)
    layer = model.layers[0]

    assert spec.format is DraftFormat.SPECULATORS
    assert spec.family is (DraftFamily.DFLASH2 if second else DraftFamily.DFLASH)
    assert spec.hidden_size == model.hidden_size == model.fc.out_features
    assert spec.intermediate_size == layer.mlp.gate_proj.out_features
    assert spec.head_dim == layer.self_attn.head_dim
    assert spec.num_heads == layer.self_attn.q_proj.out_features // spec.head_dim
    assert spec.num_kv_heads == layer.self_attn.k_proj.out_features // spec.head_dim
    assert spec.rms_norm_eps == model.norm.variance_epsilon == layer.self_attn.q_norm.variance_epsilon
    assert type(ACT2FN[spec.hidden_act]) is type(layer.mlp.act_fn)
    assert spec.attention_bias == (layer.self_attn.o_proj.bias is not None)
    assert len(spec.layers) == len(spec.ropes) == len(model.layers)
    for index, ours in enumerate(spec.layers):
        if index in model.sliding_window_indices:
            assert ours.window == model.sliding_window
            assert ours.causal is (not model.sliding_window_non_causal)
            assert ours.window_origin is WindowOrigin.ANCHOR
        else:
            assert (ours.window, ours.causal) == (None, False)
    inv_freq, scaling = rope_tables(spec.ropes[0])
    assert len(set(spec.ropes)) == 1
    assert torch.equal(inv_freq, model.rotary_emb.inv_freq)
    assert scaling == model.rotary_emb.attention_scaling
    assert [tap + 1 for tap in spec.taps] == model.target_layer_ids
    assert spec.num_target_layers is None
    assert spec.target_hidden_size == model.fc.in_features // len(spec.taps)
    assert spec.block_size == model.block_size
    assert spec.first_proposal_row == (0 if model.config.sample_from_anchor else 1)
    proposals = model.config.speculators_config.proposal_methods[0].speculative_tokens
    assert spec.proposals == proposals
    assert spec.mask_token_id == model.mask_token_id
    assert spec.vocab_size == model.verifier_vocab_size
    assert spec.draft_vocab_size == (model.draft_vocab_size if model.use_draft_vocab else None)
    assert (spec.input_embedding_scale, spec.output_multiplier, spec.logit_softcap) == (1.0, 1.0, None)
    if second:
        conv, selector = layer.mlp_conv, model.candidate_selector
        assert spec.conv == ConvSpec(conv.kernel_size, conv.group_size)
        assert spec.selector == SelectorSpec(selector.predecessor_codebook.shape[1], selector.top_k)
    else:
        assert (spec.conv, spec.selector) == (None, None)
    assert spec.learned_mask is False
    assert spec.max_position_embeddings == model.config.transformer_layer_config.max_position_embeddings
    assert spec.checkpoint_dtype == str(model.dtype).removeprefix("torch.")
    assert spec.pad_token_id == model.config.transformer_layer_config.pad_token_id
    # Tensors: what the original keeps of its own, each read back as it holds it.
    ignored = set(model._keys_to_ignore_on_save)
    theirs = {name: t for name, t in model.state_dict().items() if name not in ignored}
    assert {canonical for canonical, _ in spec.tensors} == set(theirs)
    assert {stored for _, stored in spec.tensors} == set(checkpoint.tensors) - ignored
    for canonical, stored in spec.tensors:
        assert torch.equal(checkpoint.read(stored), theirs[canonical]), canonical


def test_the_seeds_cover_the_options():
    import random

    from originals import speculators_options

    drawn = [speculators_options(random.Random(f"speculators {seed}")) for seed in range(64)]
    for key, count in {
        "dflash2": 2,
        "style_shuffled_map": 2,
        "style_nested_rope": 2,
        "style_borrowed": 2,
        "model_type": 2,
        "attention_bias": 2,
        "sample_from_anchor": 2,
        "sliding_window_non_causal": 3,
        "sliding_window": 4,
        "num_hidden_layers": 4,
        "block_size": 6,
    }.items():
        assert len({options[key] for options in drawn}) == count, key
    assert any(o["draft_vocab_size"] < o["vocab_size"] for o in drawn)
    assert len({options["rope_parameters"]["rope_type"] for options in drawn}) == 4


@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
def test_anchor_window_is_the_originals(window, non_causal):
    """`WindowOrigin.ANCHOR` as its docstring states it, against the original's mask."""
    from speculators.models.attention import create_float_mask
    from speculators.models.dflash.attention import create_anchor_block_mask_mod

    context, block, length = 11, 5, 17
    mask_mod, rows, keys = create_anchor_block_mask_mod(
        torch.zeros(length, dtype=torch.long), length, torch.tensor([context]), block, window, non_causal
    )
    theirs = create_float_mask(mask_mod, None, None, rows, keys, "cpu")[0, 0] == 0  # [block, length + block]
    key = torch.arange(length)[None].expand(block, -1)
    seen = key < context
    if window is not None:
        seen = seen & (context - key <= window)
    row, column = torch.arange(block)[:, None], torch.arange(block)[None]
    causal = window is not None and not non_causal
    inside = (column <= row) if causal else torch.ones(block, block, dtype=torch.bool)
    assert torch.equal(torch.cat([seen, inside], 1), theirs)


def test_taps_are_layer_outputs(tmp_path):
    """Id i is hidden_states[i] but the last: there transformers holds the normed state, the tap the raw one.

    The original normalises its `verifier_last_hidden_states` itself, so its ids count raw states.
    """
    target = tiny_target(3, tmp_path / "target")
    depth = target.config.num_hidden_layers
    speculators_draft(1, tmp_path / "draft", target=target.config, aux_hidden_state_layer_ids=[depth, 1, 2])
    spec = draft_from_checkpoint(SafetensorsCheckpoint(tmp_path / "draft"))
    assert spec.taps == (depth - 1, 0, 1)
    outputs: list[torch.Tensor] = []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    states = target(torch.tensor([[3, 1, 4]]), output_hidden_states=True).hidden_states
    for tap in spec.taps[1:]:
        assert torch.equal(outputs[tap], states[tap + 1])
        assert not torch.equal(outputs[tap], states[tap])
    assert torch.equal(target.model.norm(outputs[depth - 1]), states[depth])


def test_reduced_ids_are_the_originals(tmp_path):
    """The original maps a draft id as ``id + d2t[id]``; t2d marks the same ids."""
    for shuffled in (False, True):
        folder = tmp_path / str(shuffled)
        model = speculators_draft(
            2, folder, dflash2=False, vocab_size=160, draft_vocab_size=40, style_shuffled_map=shuffled
        )
        checkpoint = SafetensorsCheckpoint(folder)
        spec = draft_from_checkpoint(checkpoint)
        tensors = dict(spec.tensors)
        ids = torch.arange(40) + checkpoint.read(tensors["d2t"])
        assert sorted(ids.tolist()) == model.t2d.nonzero()[:, 0].tolist()
        assert (ids.sort().values != ids).any() == shuffled
        assert tensors["lm_head.weight"] == "lm_head.weight"


def test_defaults_are_the_classes():
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2SpeculatorConfig

    for key, value in DEFAULTS.items():
        assert DFlashSpeculatorConfig.model_fields[key].default == value
        assert DFlash2SpeculatorConfig.model_fields[key].default == value
    for key, value in DFLASH2_DEFAULTS.items():
        assert DFlash2SpeculatorConfig.model_fields[key].default == value
    for family, kind in (
        (DraftFamily.DFLASH, DFlashSpeculatorConfig),
        (DraftFamily.DFLASH2, DFlash2SpeculatorConfig),
    ):
        assert kind.model_fields["sliding_window_non_causal"].default is NON_CAUSAL_DEFAULTS[family]


@pytest.mark.parametrize(("name", "kind"), [("qwen3", Qwen3Config), ("llama", LlamaConfig)])
def test_class_defaults_are_transformers(name, kind):
    for key, value in CLASS_DEFAULTS[name].items():
        assert kind.__dataclass_fields__[key].default == value, key
    if name == "llama":
        assert not {"sliding_window", "use_sliding_window", "layer_types"} & set(kind.__dataclass_fields__)


QWEN3_8B_DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "aux_hidden_state_layer_ids": [2, 8, 14, 20, 26, 33],
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "draft_vocab_size": 151936,
    "dtype": "bfloat16",
    "mask_token_id": 151669,
    "sample_from_anchor": False,
    "selector_rank": 256,
    "selector_top_k": 16,
    "sliding_window_non_causal": True,
    "speculators_config": {
        "algorithm": "dflash2",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 7,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash2",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": ["sliding_attention"] * 7 + ["full_attention"],
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": 2048,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 151936,
    },
    "transformers_version": "5.15.0",
}
# A reduced vocabulary on a llama body, with few keys and a training setting left in.
LLAMA_REDUCED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "mask_token_id": 4,
    "max_anchors": 3072,
    "speculators_model_type": "dflash",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": 262144,
    },
}


def put_map(checkpoint: ShapeCheckpoint, ids: torch.Tensor, vocab: int) -> None:
    marks = torch.zeros(vocab, dtype=torch.bool)
    marks[ids] = True
    checkpoint.put("d2t", ids - torch.arange(len(ids)))
    checkpoint.put("t2d", marks)


def test_published_dflash2():
    reading = read_draft(speculators_shapes(QWEN3_8B_DFLASH2))
    spec = reading.spec
    assert (len(spec.layers), spec.taps) == (8, (1, 7, 13, 19, 25, 32))
    assert (spec.block_size, spec.proposals, spec.mask_token_id) == (8, 7, 151669)
    assert (spec.conv, spec.selector) == (ConvSpec(2, 16), SelectorSpec(256, 16))
    assert (spec.layers[0].window, spec.layers[0].causal) == (2048, False)
    assert (spec.layers[7].window, spec.layers[7].causal) == (None, False)
    assert reading.defaults == ()
    assert reading.verifier == "Qwen/Qwen3-8B"
    assert reading.recognition.reason == "speculators_model_type is dflash2"


def test_published_reduced():
    checkpoint = speculators_shapes(LLAMA_REDUCED)
    put_map(checkpoint, torch.arange(32000) * 8, 262144)
    reading = read_draft(checkpoint)
    spec = reading.spec
    assert (spec.draft_vocab_size, spec.vocab_size, spec.head_dim) == (32000, 262144, 256)
    assert spec.taps == (0, 16, 28, 46, 57)
    assert {d.key: d.value for d in reading.defaults} == {
        "attention_bias": False,
        "layer_types": ["full_attention"] * 5,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    }


BODY = QWEN3_8B_DFLASH2["transformer_layer_config"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "vocab_size": 100,
}
TINY2 = QWEN3_8B_DFLASH2 | {
    "transformer_layer_config": BODY,
    "draft_vocab_size": 100,
    "aux_hidden_state_layer_ids": [4, 2],
    "mask_token_id": 99,
    "selector_rank": 4,
    "selector_top_k": 8,
}
TINY1 = {key: value for key, value in TINY2.items() if key not in DFLASH2_DEFAULTS} | {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "draft_vocab_size": 40,
}


@pytest.fixture(scope="module")
def shapes():
    return {"dflash": speculators_shapes(TINY1), "dflash2": speculators_shapes(TINY2)}


@pytest.fixture
def tiny(shapes) -> ShapeCheckpoint:
    return copy.deepcopy(shapes["dflash2"])


@pytest.fixture
def reduced(shapes) -> ShapeCheckpoint:
    checkpoint = copy.deepcopy(shapes["dflash"])
    put_map(checkpoint, torch.arange(40) * 2 + 3, 100)
    return checkpoint


def change(config, changes):
    """Set top-level keys, and those under ``body.``; ``...`` deletes."""
    for key, value in changes.items():
        place = config
        if key.startswith("body."):
            place, key = config["transformer_layer_config"], key.removeprefix("body.")
        if value is ...:
            place.pop(key, None)
        else:
            place[key] = value


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"block_size": ...}, "block_size", 8),
        ({"sample_from_anchor": True, "block_size": 2}, "proposals", 2),
        ({"sample_from_anchor": ...}, "proposals", 7),
        (
            {"input_embedding_scale": 1.0, "output_multiplier": 1, "final_logit_softcapping": None},
            "vocab_size",
            100,
        ),
        ({"target_hidden_size": 32}, "target_hidden_size", 32),
        ({"body.model_type": ...}, "head_dim", 8),
        ({"architectures": ...}, "family", DraftFamily.DFLASH2),
        ({"conv_kernel_size": ..., "conv_group_size": ...}, "conv", ConvSpec(2, 16)),
    ],
)
def test_accepted(tiny, changes, field, value):
    change(tiny.config, changes)
    assert getattr(draft_from_checkpoint(tiny), field) == value


def test_causal_default_of_each_model(tiny, reduced):
    for checkpoint in (tiny, reduced):
        change(checkpoint.config, {"sliding_window_non_causal": ...})
    assert draft_from_checkpoint(tiny).layers[1].causal is False
    assert draft_from_checkpoint(reduced).layers[1].causal is True


def test_borrowed_tensors_are_left_alone(tiny, reduced):
    """Older versions saved them; the original reloads them from the verifier whatever they hold."""
    for name, shape in (
        ("embed_tokens.weight", (100, 32)),
        ("lm_head.weight", (100, 32)),
        ("verifier_lm_head.weight", (100, 32)),
        ("verifier_norm.weight", (32,)),
    ):
        tiny.tensors[name] = TensorEntry(name, "bfloat16", shape)
        spec = draft_from_checkpoint(tiny)
        assert name not in {stored for _, stored in spec.tensors}
        assert spec.learned_mask is False
        assert spec.draft_vocab_size is None
    tiny.tensors["embed_tokens.weight"] = TensorEntry("embed_tokens.weight", "bfloat16", (101, 32))
    with pytest.raises(
        CheckpointError, match=r"'embed_tokens.weight' shape: got \(101, 32\), expected \(100, 32\)"
    ):
        draft_from_checkpoint(tiny)


REFUSED = [
    ({"mask_token_id": ...}, CheckpointError, "mask_token_id: missing, expected it in draft/config.json"),
    ({"mask_token_id": None}, CheckpointError, "mask_token_id: got None, expected a whole number >= 0"),
    ({"mask_token_id": -1}, CheckpointError, "mask_token_id: got -1"),
    (
        {"aux_hidden_state_layer_ids": None},
        CheckpointError,
        "aux_hidden_state_layer_ids: got None, expected a list",
    ),
    ({"aux_hidden_state_layer_ids": ...}, CheckpointError, "aux_hidden_state_layer_ids: missing"),
    (
        {"aux_hidden_state_layer_ids": [0, 2]},
        UnsupportedError,
        "aux_hidden_state_layer_ids: got 0, expected ids from 1",
    ),
    ({"aux_hidden_state_layer_ids": [2, -1]}, CheckpointError, "aux_hidden_state_layer_ids: got -1"),
    ({"block_size": 1}, CheckpointError, "block_size: got 1, expected a whole number >= 2"),
    (
        {"sample_from_anchor": True, "block_size": 0},
        CheckpointError,
        "block_size: got 0, expected a whole number >= 1",
    ),
    ({"sample_from_anchor": 1}, CheckpointError, "sample_from_anchor: got 1, expected true or false"),
    ({"sliding_window_non_causal": None}, CheckpointError, "sliding_window_non_causal: got None"),
    (
        {"draft_vocab_size": 40},
        UnsupportedError,
        "draft_vocab_size: got 40, expected 100, the whole vocabulary",
    ),
    ({"draft_vocab_size": ...}, CheckpointError, "draft_vocab_size: got 32000, expected <= .*vocab_size 100"),
    ({"target_hidden_size": 64}, UnsupportedError, "target_hidden_size: got 64, expected 32"),
    ({"input_embedding_scale": 2.0}, UnsupportedError, "input_embedding_scale: got 2.0, expected 1.0"),
    ({"output_multiplier": 0.5}, UnsupportedError, "output_multiplier: got 0.5"),
    ({"final_logit_softcapping": 20.0}, UnsupportedError, "final_logit_softcapping: got 20.0"),
    ({"anchor_len": 1}, UnsupportedError, "anchor_len: got 1, expected no such key"),
    ({"markov_rank": 4}, UnsupportedError, "markov_rank: got 4, expected no such key"),
    ({"selector_top_k": 101}, CheckpointError, "selector_top_k: got 101, expected <= vocab_size 100"),
    ({"conv_group_size": 5}, CheckpointError, "conv_group_size: got 5, expected a divisor"),
    ({"conv_kernel_size": 9}, CheckpointError, "conv_kernel_size: got 9, expected <= block_size 8"),
    ({"transformer_layer_config": ...}, CheckpointError, "transformer_layer_config: missing"),
    (
        {"transformer_layer_config": []},
        CheckpointError,
        r"transformer_layer_config: got \[\], expected an object",
    ),
    (
        {"body.model_type": "gemma3_text"},
        UnsupportedError,
        "transformer_layer_config.model_type: got 'gemma3_text', expected one of qwen3, llama",
    ),
    ({"body.hidden_size": ...}, CheckpointError, "transformer_layer_config.hidden_size: missing"),
    ({"body.rope_parameters": ...}, CheckpointError, "rope_theta: missing"),
    (
        {"body.rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        CheckpointError,
        "rope_parameters: got .*'sliding_attention'",
    ),
    (
        {"body.attn_logit_softcapping": 50.0},
        UnsupportedError,
        "transformer_layer_config.attn_logit_softcapping: got 50.0",
    ),
    ({"body.block_size": 8}, UnsupportedError, "transformer_layer_config.block_size: got 8"),
    (
        {"body.use_sliding_window": False},
        CheckpointError,
        "transformer_layer_config.use_sliding_window: got False, expected true",
    ),
    ({"body.sliding_window": None}, CheckpointError, "transformer_layer_config.sliding_window: got None"),
    (
        {"speculators_model_type": "dspark"},
        UnsupportedError,
        "speculators_model_type: got 'dspark', expected one of dflash, dflash2",
    ),
    (
        {"architectures": ["DFlashDraftModel"]},
        CheckpointError,
        r"architectures: got \['DFlashDraftModel'\], expected DFlash2DraftModel beside",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(tiny, changes, error, message):
    change(tiny.config, changes)
    with pytest.raises(error, match=message):
        draft_from_checkpoint(tiny)


def test_reduced_vocabulary(reduced):
    spec = draft_from_checkpoint(reduced)
    assert spec.draft_vocab_size == 40
    tensors = dict(spec.tensors)
    assert {tensors[name] for name in ("lm_head.weight", "d2t", "t2d")} == {"lm_head.weight", "d2t", "t2d"}


def test_absolute_map_is_refused(reduced):
    reduced.put("d2t", torch.arange(40) * 2 + 3)
    with pytest.raises(
        UnsupportedError, match=r"'d2t': got target ids, expected offsets \(target id - draft id\)"
    ):
        draft_from_checkpoint(reduced)


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (5, 95, "target id of draft id 5: got 100, expected 0..99"),
        (5, -6, "target id of draft id 5: got -1, expected 0..99"),
        (5, 1, "got 40 different target ids, expected the 40 that tensor 't2d' marks"),
        (5, 10, "got 39 different target ids"),
    ],
)
def test_wrong_map_is_refused(reduced, row, value, message):
    """Offsets: draft id 5 is target id 13, so its offset is 8."""
    offsets = reduced.values["d2t"].clone()
    offsets[row] = value
    reduced.put("d2t", offsets)
    with pytest.raises(CheckpointError, match=message):
        draft_from_checkpoint(reduced)


def test_map_never_loaded_is_refused(reduced):
    """What the original saves when no mapping was given to it: zeros."""
    reduced.put("d2t", torch.zeros(40, dtype=torch.int64))
    reduced.put("t2d", torch.zeros(100, dtype=torch.bool))
    with pytest.raises(CheckpointError, match="the 0 that tensor 't2d' marks"):
        draft_from_checkpoint(reduced)


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "t2d"])
def test_reduced_head_and_maps_are_needed(reduced, name):
    del reduced.tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor '{name}': missing"):
        draft_from_checkpoint(reduced)


def test_maps_without_a_reduced_vocabulary(tiny):
    tiny.put("d2t", torch.zeros(100, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="tensor 'd2t': got shape"):
        draft_from_checkpoint(tiny)
