"""Range and vocabulary: float16 with outliers, and rows behind the tokenizer's last id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.tensors import DType
from originals import tiny_target
from target_cases import case_from_folder

HIDDEN = 32
OUTLIER = 7


def scale_rows(folder: Path, name: str, factor: float, rows: slice) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][rows] *= factor
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_float16_stays_finite_with_outlier_channels(family: str, tmp_path: Path) -> None:
    """One channel of the residual beyond float16's range (65504), as trained models have near it."""
    tiny_target(4, tmp_path / "target", family, hidden_size=HIDDEN, num_hidden_layers=2, layer_types=None)
    for name, factor in (("mlp.down_proj", 1e5), ("self_attn.o_proj", 4e4)):
        scale_rows(tmp_path / "target", f"model.layers.0.{name}.weight", factor, slice(OUTLIER, OUTLIER + 1))
    if family == "gemma2":  # its norm behind the MLP would take the outlier away again
        scale_rows(
            tmp_path / "target",
            "model.layers.0.post_feedforward_layernorm.weight",
            1e5,
            slice(OUTLIER, OUTLIER + 1),
        )
    case = case_from_folder(tmp_path / "target", tmp_path / "graph", DType.FLOAT16)
    case.graph.reset(32)
    out = case.graph.run(case.ids[:1, :24], 0)
    features, expected = out[t.FEATURES][0], case.features(0)[:24]
    assert np.isfinite(features).all() and np.isfinite(out[t.LOGITS]).all()
    assert np.abs(expected[:, OUTLIER]).max() > 65504
    relative = np.abs(features - expected).max() / np.abs(expected).max()
    assert relative < 5e-3


def test_rows_behind_the_tokenizer_are_the_originals_to_choose(tmp_path: Path) -> None:
    """A padded row that wins is chosen here exactly where transformers chooses it; see docs/targets.md."""
    model = tiny_target(
        1, tmp_path / "target", num_hidden_layers=1, vocab_size=160, tie_word_embeddings=False
    )
    prompt, padded = list(range(20, 28)), 159
    with torch.inference_mode():
        winner = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    path = tmp_path / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][padded] = tensors["lm_head.weight"][winner] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    case = case_from_folder(tmp_path / "target", tmp_path / "graph")
    expected = case.original.greedy(prompt, 12)
    assert padded in expected
    assert case.greedy(np.array(prompt), 12) == expected
