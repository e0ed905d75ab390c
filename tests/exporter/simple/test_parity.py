"""Exported graphs and eager modules against what the seed program computes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from dflash_deploy.exporter.simple.seed import NUM_DENOISE_STEPS, seed_draft_arrays, seed_target_arrays
from dflash_deploy.exporter.simple.spec import unmask_counts
from toy_simple import eager_draft

# The program computes in float64, the graphs in float32; logits are up to 0.3, of sums of 64 to 128 terms.
# Measured: 1.2e-8 for the target, 5.3e-8 for the draft.
TOLERANCE = 2e-7
# The same arithmetic in float64; the stored logits, up to 2, are rounded to float32.
EAGER_TOLERANCE = 1.2e-7


def test_arrays_are_the_programs(seed_program):
    for side, arrays in (("target", seed_target_arrays()), ("draft", seed_draft_arrays())):
        stored = {
            n.removeprefix(f"sha256.{side}.") for n in seed_program.arrays if n.startswith(f"sha256.{side}.")
        }
        assert set(arrays) == stored
        for name, array in arrays.items():
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
            assert digest == bytes(seed_program.arrays[f"sha256.{side}.{name}"]), name


def test_target(seed_bundle, seed_program):
    hidden, logits = [], []
    for prompt in seed_program.prompts():
        out = seed_bundle.target_graph.run(prompt[None], 0)
        hidden.append(out["features"][0])
        logits.append(out["logits"][0])
        assert np.array_equal(out["greedy_ids"][0], out["logits"][0].argmax(-1))
    assert np.abs(np.concatenate(hidden) - seed_program["target.hidden"]).max() < TOLERANCE
    assert np.abs(np.concatenate(logits) - seed_program["target.logits"]).max() < TOLERANCE


def test_target_rows_do_not_depend_on_their_place(seed_bundle):
    ids = np.array([[7, 1, 999, 0], [3, 3, 4, 1]])
    whole = seed_bundle.target_graph.run(ids, 0)
    later = seed_bundle.target_graph.run(ids[:, 1:], [40, 9], wanted_rows=[2, 0], kv=64)
    assert np.array_equal(later["features"], whole["features"][:, 1:])
    assert np.array_equal(later["logits"], whole["logits"][:, [3, 1]])
    assert np.array_equal(later["greedy_ids"], whole["greedy_ids"][:, [3, 1]])


def test_single_draft_forwards(seed_program):
    module = eager_draft(seed_draft_arrays(), NUM_DENOISE_STEPS, mask=0)
    hidden, blocks = (torch.from_numpy(seed_program[f"draft.{name}"]) for name in ("hidden", "blocks"))
    got = module.logits(hidden, blocks).numpy()
    assert np.abs(got - seed_program["draft.logits"]).max() < EAGER_TOLERANCE


def test_draft_graph(seed_bundle, seed_program):
    previous, anchors = seed_program["trace.prev"], seed_program["trace.anchor"]
    out = seed_bundle.propose(previous, anchors)
    blocks = seed_program[f"trace.blocks.{NUM_DENOISE_STEPS}"]  # [48, 3, 8]
    assert np.array_equal(out["proposals"], blocks[:, -1])
    for step in range(NUM_DENOISE_STEPS):
        logits = out[f"stage.step.{step}"]
        expected = seed_program["draft.logits"][step : 2 * NUM_DENOISE_STEPS : NUM_DENOISE_STEPS]
        assert np.abs(logits[:2] - expected).max() < TOLERANCE
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        confidence = seed_program[f"trace.confidence.{NUM_DENOISE_STEPS}"][:, step]
        assert np.abs(1 / shifted.sum(-1) / confidence - 1).max() < 2e-6
        # Rows chosen in this step hand out this step's logits.
        chosen = blocks[:, step] != blocks[:, step + 1]
        assert chosen.any(-1).all()
        assert np.array_equal(out["draft_logits"][chosen], logits[chosen])
    assert np.array_equal(out["draft_logits"].argmax(-1), out["proposals"])
    assert np.allclose(out["logit_sums"], out["draft_logits"].sum(-1), atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 11])
def test_any_number_of_denoising_steps(seed_program, steps):
    module = eager_draft(seed_draft_arrays(), steps, mask=0)
    expected = seed_program[f"trace.blocks.{steps}"]
    rounds = len(expected)
    assert expected.shape[1] == len(module.spec.unmask_counts) + 1
    target = seed_target_arrays()
    hidden = target["token_embed"][seed_program["trace.prev"][:rounds]]
    for index in range(4):
        hidden = (np.maximum(hidden, 0) if index else hidden) @ target[f"layers.{index}"]
    state = hidden + target["token_embed"][seed_program["trace.anchor"][:rounds]]
    block, logits, every = module.denoise(torch.from_numpy(state))
    assert np.array_equal(block.numpy(), expected[:, -1])
    assert np.array_equal(logits.argmax(-1).numpy(), expected[:, -1])
    for step, of_step in enumerate(every):
        confidence = of_step.softmax(-1).amax(-1).numpy()
        assert np.abs(confidence / seed_program[f"trace.confidence.{steps}"][:, step] - 1).max() < 1e-6


def test_schedule():
    assert unmask_counts(8, 1) == (8,)
    assert unmask_counts(8, 2) == (4, 4)
    assert unmask_counts(8, 3) == (2, 3, 3)
    assert unmask_counts(8, 5) == (1, 1, 2, 2, 2)
    assert unmask_counts(3, 5) == (1, 1, 1), "no step is left with nothing to do"
    for block in range(1, 20):
        for steps in range(1, 25):
            counts = unmask_counts(block, steps)
            assert sum(counts) == block and min(counts) >= 1 and len(counts) <= steps


def test_ties_go_to_the_earlier_position():
    """All positions are alike: the lowest id wins, and the schedule takes them from the left."""
    arrays = {name: np.zeros_like(array) for name, array in seed_draft_arrays().items()}
    # Positions see each other's tokens: every step computes other logits, the same for all positions.
    arrays |= {"W_mix": np.ones((8, 8)), "W_block": np.ones((128, 64)), "lm_head": np.ones((64, 1000))}
    arrays["token_embed"][0] = 1.0
    state = torch.zeros(1, 64, dtype=torch.float64)
    block, logits, steps = eager_draft(arrays, 3, mask=7).denoise(state)
    assert block.tolist() == [[0] * 8]
    chosen_in = [[torch.equal(step[0, q], logits[0, q]) for step in steps].index(True) for q in range(8)]
    assert chosen_in == [0, 0, 1, 1, 1, 2, 2, 2]


def test_only_the_row_before_the_anchor_counts(seed_bundle, seed_program):
    previous, anchors = seed_program["trace.prev"][:6], seed_program["trace.anchor"][:6]
    plain = seed_bundle.propose(previous, anchors)
    row = seed_bundle.features(previous)
    other = np.full_like(row, 1e3)
    rows = np.concatenate([other, row, other, np.full_like(row, np.nan)], axis=1)
    later = seed_bundle.draft_graph.run(rows, 17, 19, anchors, block_rows=3, kv=64)
    for name in ("proposals", "draft_logits", "logit_sums"):
        assert np.array_equal(later[name], plain[name]), name


def test_rows_that_are_not_finite_show_in_their_sums(seed_bundle):
    for bad in (np.nan, np.inf):
        features = np.full((2, 1, 64), bad, np.float32)
        features[1] = 0.01
        out = seed_bundle.draft_graph.run(features, 0, 1, 5, 8)
        assert not np.isfinite(out["logit_sums"][0]).any()
        assert np.isfinite(out["logit_sums"][1]).all()
        assert out["proposals"].min() >= 0 and out["proposals"].max() < 1000
