"""The demo draft's training on a CPU, on a random target of a few thousand weights."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "examples" / "train_demo_draft"
CONFIG = {
    "block_size": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0},
    "vocab_size": 3840,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 16,
    },
}


@pytest.fixture(autouse=True)
def recipe(monkeypatch):
    """Its files import each other by name, as when they are run."""
    monkeypatch.syspath_prepend(str(RECIPE))
    before = set(sys.modules)
    torch.manual_seed(0)
    yield
    for name in set(sys.modules) - before:
        if str(RECIPE) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def draft():
    from draft import Draft

    draft = Draft(CONFIG)
    for parameter in draft.parameters():  # its convolutions start as the identity
        parameter.data += 0.02 * torch.randn_like(parameter)
    return draft


def context(rows=2, length=24):
    features = torch.randn(rows, length, 64)
    ids = torch.randint(0, 3840, (rows, length))
    anchors = torch.tensor([[3, 9, 17]] * rows)
    return features, ids, anchors, torch.randn(3840, 32) * 0.1


@torch.no_grad()
def test_a_grown_draft_says_what_it_said(draft):
    from draft import grow

    given = context()
    grown = grow(draft, 4)
    assert len(grown.layers) == grown.config["num_hidden_layers"] == len(grown.config["layer_types"]) == 4
    assert len(draft.layers) == draft.config["num_hidden_layers"] == 2
    assert torch.equal(grown(*given), draft(*given))
    grown.layers[3].mlp.down_proj.weight += 0.1
    assert not torch.equal(grown(*given), draft(*given))
    with pytest.raises(ValueError, match="2 layers, more than 1"):
        grow(draft, 1)


@torch.no_grad()
def test_attention_in_blocks_is_the_masked_product(draft):
    from draft import attend_dense, attend_in_blocks

    torch.manual_seed(1)
    q = torch.randn(2, 4, 12, 8)
    k, v = torch.randn(2, 2, 2, 20 + 12, 8)
    seen = torch.arange(20) < torch.tensor([[3, 9, 17], [1, 2, 20]])[:, :, None]  # [B, A, T]
    bias = torch.zeros(1).masked_fill(~seen, float("-inf"))
    own = torch.block_diag(*torch.ones(3, 4, 4)).bool().expand(2, -1, -1)
    dense = torch.cat([seen.repeat_interleave(4, 1), own], 2)[:, None]
    got = attend_in_blocks(q, k, v, bias, 4)
    torch.testing.assert_close(got, attend_dense(q, k, v, torch.zeros(1).masked_fill(~dense, float("-inf"))))


def collected(folder):
    """A store of a few waves of answers by a random target."""
    from collect import CollectConfig, collect
    from target import Llama, LlamaShape, random_weights

    shape = LlamaShape(3, 32, 4, 2, 8, 48, 3840, 1e-5, 1e5)
    target = Llama(shape, random_weights(shape, "cpu"), "cpu", torch.float32)
    turns = [torch.randint(6, 3840, (5 + n % 3,)).tolist() for n in range(48)]
    frame = {"prefix": [1, 2], "end_of_turn": 3, "header": [4]}
    settings = CollectConfig(rows=16, slots=40)
    collect(target, [0, 2], turns, frame, settings, folder, 60.0)
    return target


def test_answers_are_the_targets_own_and_training_learns_and_goes_on(draft, tmp_path, monkeypatch):
    import finetune as module
    from finetune import FinetuneConfig, finetune
    from stored import Stored

    target = collected(tmp_path / "store")
    stored = Stored([tmp_path / "store"], held_out=1)
    greedy = next(i for i, entry in enumerate(stored.entries) if not entry["sampled"])
    ids, start = stored.one(greedy)
    _, final = target.forward(torch.tensor([ids]), [0])
    assert target.logits(final)[0, start - 1 : -1].argmax(-1).tolist() == ids[start:]

    losses, clock = [], [0.0]
    whole = module.step_loss

    def step_loss(*args):
        clock[0] += 1.0  # a step is a second of the processor
        parts = whole(*args)
        losses.append(float(parts["loss"].detach()))
        return parts

    monkeypatch.setattr(module, "step_loss", step_loss)
    monkeypatch.setattr(module.time, "process_time", lambda: clock[0])
    settings = FinetuneConfig(
        seconds=30.0,
        sequences=4,
        anchors=8,
        learning_rate=5e-3,
        warmup_steps=2,
        frequent=960,
        dtype=torch.float32,
    )
    saved = []
    state = tmp_path / "state.pt"
    half = replace(settings, seconds=15.0)
    finetune(draft, target.embedding, stored, half, state, lambda *at: saved.append(at))
    finetune(draft, target.embedding, stored, settings, state, lambda *at: saved.append(at))
    assert saved == [(15, 15.0), (30, 30.0)]
    assert len(losses) == 30  # the second call went on at step 15
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_hard_tokens_are_those_that_the_first_proposal_misses(draft, tmp_path):
    from finetune import FinetuneConfig, finetune
    from mark import mark
    from stored import Stored
    from train import pick_anchors

    target = collected(tmp_path / "store")
    stored = Stored([tmp_path / "store"], held_out=1)
    assert stored.batch([0]).hard[:, : stored.length[0]].all()  # nothing is marked yet
    settings = FinetuneConfig(
        seconds=2.0, sequences=4, anchors=8, learning_rate=5e-3, frequent=960, dtype=torch.float32
    )
    finetune(draft, target.embedding, stored, settings, tmp_path / "state.pt", lambda *_: None)
    frequent = stored.frequent(960, 3840)
    mark(draft, target.embedding, stored, torch.float32, 960)
    stored.refresh()

    kinds = set()
    for index in range(0, len(stored.entries), 4):
        batch, entry = stored.batch([index]), stored.entries[index]
        hard, ids = batch.hard[0], batch.ids[0]
        assert not hard[: entry["start"]].any()
        assert not hard[entry["length"] :].any()
        assert hard[entry["start"]]
        for at in range(entry["start"] + 1, entry["length"]):
            with torch.no_grad():
                anchor = torch.tensor([[at - 1]])
                hidden = draft(batch.features.float(), batch.ids, anchor, target.embedding, block=2)[0, 0]
                top = (hidden @ target.embedding[frequent].T).topk(16, -1)
                candidates = frequent[top.indices]
                pair = draft.candidate_selector.pair_scores(hidden, ids[at - 1][None], candidates)
            best = candidates[0, (top.values + pair).argmax()]
            assert bool(hard[at]) == (int(best) != int(ids[at]))
            kinds.add(bool(hard[at]))
        anchors, used = pick_anchors(batch.starts, batch.lengths, len(ids), 96, batch.hard, 0.0)
        assert torch.equal(anchors[used], hard[: entry["length"] - 1].nonzero()[:, 0])
    assert kinds == {True, False}  # it learnt enough to foresee some
