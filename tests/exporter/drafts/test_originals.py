"""The two packages compute the same where their options overlap, run as the tests run them."""

import json

import torch

from dflash_deploy.bundle.errors import UserError
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint
from dflash_deploy.exporter.drafts.formats import draft_from_checkpoint
from originals import speculators_block, speculators_draft, tiny_target, zlab_draft

SHARED = {
    "attention_bias": True,
    "block_size": 5,
    "head_dim": 16,
    "hidden_act": "silu",
    "intermediate_size": 48,
    "mask_token_id": 7,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "dflash2": True,
    "conv_kernel_size": 3,
    "conv_group_size": 4,
    "selector_rank": 4,
    "selector_top_k": 4,
}


def both(tmp_path, window: int | None = None):
    """The same weights in both packages; z-lab's window counts the anchor, speculators' does not."""
    target = tiny_target(1, tmp_path / "target", vocab_size=101, num_hidden_layers=4)
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True} if window else {}
    zlab = zlab_draft(
        1,
        tmp_path / "zlab",
        target=target.config,
        **SHARED
        | sliding
        | {"target_layer_ids": [2, 0], "is_causal": True if window else None, "sliding_window": window}
        | dict.fromkeys(("input_embedding_scale", "output_multiplier", "final_logit_softcapping")),
    )
    other = speculators_draft(
        1,
        tmp_path / "speculators",
        target=target,
        **SHARED
        | sliding
        | {"aux_hidden_state_layer_ids": [3, 1], "sample_from_anchor": False, "model_type": "qwen3"}
        | {"style_nested_rope": False, "sliding_window_non_causal": False, "sliding_window": window},
    )
    state = {name.replace("_codebook.weight", "_codebook"): t for name, t in zlab.state_dict().items()}
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) == {
        "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"
    }  # fmt: skip
    return target, zlab, other


@torch.no_grad()
def blocks(target, zlab, other, context: int):
    ids = torch.arange(3, 4 + context)
    states = target(ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in other.target_layer_ids], -1)[0, :context]
    block = torch.full((1, 5), zlab.mask_token_id)
    block[0, 0] = ids[-1]
    theirs = zlab(
        position_ids=torch.arange(context + 5)[None],
        noise_embedding=target.get_input_embeddings()(block),
        target_hidden=features[None],
    )[0]
    hidden, logits = speculators_block(other, features, ids)
    return theirs, hidden, zlab.compute_logits(theirs, target.get_output_embeddings()), logits


def test_one_block_of_both(tmp_path):
    target, zlab, other = both(tmp_path)
    for context in (1, 4, 5, 33):
        theirs, hidden, their_logits, logits = blocks(target, zlab, other, context)
        torch.testing.assert_close(hidden, theirs, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(logits, their_logits, atol=2e-4, rtol=1e-4)


def test_the_windows_differ(tmp_path):
    """The same sliding_window means other keys: equal up to window - 1 context rows for the anchor alone."""
    target, zlab, other = both(tmp_path, window=4)
    for context, same in ((1, True), (33, False)):
        theirs, hidden, _, _ = blocks(target, zlab, other, context)
        assert torch.allclose(hidden[0], theirs[0], atol=1e-4) is same


JUNK: list[object] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    0.5,
    float("nan"),
    "x",
    [],
    [0],
    [None],
    [[]],
    {},
    {"a": []},
    {"a": {}},
]


def test_junk_is_an_error_of_ours(tmp_path):
    """Whatever a key holds, it is read or refused: nothing else comes out."""
    zlab_draft(3, tmp_path / "a", dflash2=True)
    speculators_draft(3, tmp_path / "b", dflash2=True)
    for folder, nested in (("a", "dflash_config"), ("b", "transformer_layer_config")):
        checkpoint = SafetensorsCheckpoint(tmp_path / folder)
        original = json.dumps(checkpoint.config)
        config = json.loads(original)
        if folder == "a" and nested not in config:
            continue
        places = [(key, None) for key in config] + [(nested, key) for key in config[nested]]
        places += [("rope_scaling", None), ("partial_rotary_factor", None), (nested, "rope_scaling")]
        messages = []
        for outer, inner in places:
            for junk in JUNK:
                checkpoint.config = json.loads(original)
                if inner is None:
                    checkpoint.config[outer] = junk
                else:
                    checkpoint.config[outer][inner] = junk
                try:
                    draft_from_checkpoint(checkpoint)
                except UserError as error:
                    messages.append(str(error))
        assert len(messages) > 300
        assert all(": " in message for message in messages)
