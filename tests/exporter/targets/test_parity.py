"""Every family against transformers: logits, taps and whole generations, over its options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_deploy.bundle import tensors as t
from dflash_deploy.exporter.targets.families import FAMILIES
from originals import FULL, SLIDING
from target_cases import CAPACITY, TargetCase, target_case

# float32 sums in another order than torch's; values are of the size of 1 to 10.
TOLERANCE = 1e-4
BLOCK = 8
NEW_TOKENS = 24
SEEDS = range(20)
# A case a family: what makes the family different shows, in as few layers as that takes.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TYPICAL: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 3,
        "layer_types": None,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": None,
        "sliding_window_pattern": 2,
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: _LLAMA3},
    },
    "llama": {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8, "head_dim": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "layer_types": None},
    "qwen3": {"attention_bias": True, "use_sliding_window": False, "layer_types": None},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 2},
}


def check_grid(case: TargetCase) -> None:
    size = case.spec.hidden_size
    for past, rows, batch in itertools.product(
        (0, 1, 2, 17, BLOCK - 1, BLOCK, BLOCK + 1), (1, 2, BLOCK - 1, BLOCK), (1, 2)
    ):
        ids = case.ids[:batch]
        case.graph.reset(CAPACITY, batch)
        if past:
            case.graph.run(ids[:, :past], 0, [0])
        kv = None if rows % 2 else CAPACITY  # just enough, or all there is
        out = case.graph.run(ids[:, past : past + rows], past, kv=kv)
        for b in range(batch):
            what = (past, rows, batch, b)
            logits, features = out[t.LOGITS][b], out[t.FEATURES][b]
            scale = max(1.0, np.abs(case.runs[b].logits).max())
            assert np.abs(logits - case.runs[b].logits[past : past + rows]).max() < TOLERANCE * scale, what
            expected = case.features(b)[past : past + rows]
            for layer in range(case.spec.num_layers):
                part = slice(layer * size, (layer + 1) * size)
                difference = np.abs(features[:, part] - expected[:, part]).max()
                limit = TOLERANCE * max(1.0, np.abs(expected[:, part]).max())
                assert difference < limit, (*what, layer)
            assert (out[t.GREEDY_IDS][b] == logits.argmax(-1)).all()


def check_generations(case: TargetCase) -> None:
    for prompt in (case.ids[0, :1], case.ids[0, :5], case.ids[1, :27]):
        assert case.greedy(prompt, NEW_TOKENS) == case.original.greedy(prompt.tolist(), NEW_TOKENS)


def test_every_family_has_a_typical_case() -> None:
    assert sorted(TYPICAL) == sorted(FAMILIES)


@pytest.mark.parametrize(
    "family",
    # Plain Llama, Qwen2 and Qwen3 are compared every day in other tests, as the targets of drafts.
    [
        pytest.param(family, marks=[pytest.mark.slow] if family in ("llama", "qwen2", "qwen3") else [])
        for family in sorted(FAMILIES)
    ],
)
def test_family(family: str, tmp_path: Path) -> None:
    case = target_case(tmp_path, family, 1, num_hidden_layers=2, **TYPICAL[family])
    check_grid(case)
    check_generations(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_options(family: str, seed: int, tmp_path: Path) -> None:
    case = target_case(tmp_path, family, seed)
    check_grid(case)
    check_generations(case)
