"""What is wrong with a simple checkpoint or pair is said by name, before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_deploy.bundle.errors import CheckpointError, DflashError, PairError, UnsupportedError
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.families import pair_from_sources
from dflash_deploy.exporter.inspect import inspect_checkpoint
from dflash_deploy.exporter.inspect_lines import inspection_lines
from dflash_deploy.exporter.simple.checkpoint import target_to_folder
from toy_simple import VOCAB, toy_arrays, toy_checkpoints


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return toy_checkpoints(tmp_path)


def change(folder: Path, **values: object) -> None:
    """Set config keys; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refused(pair: tuple[Path, Path], kind: type[DflashError], match: str) -> None:
    output = pair[0].parent / "out"
    with pytest.raises(kind, match=match):
        export_bundle(str(pair[0]), str(pair[1]), output)
    assert not output.exists()


TARGET, DRAFT = 0, 1
CONFIGS = [
    (TARGET, {"hidden_act": "gelu"}, UnsupportedError, "hidden_act: got 'gelu', expected no such key"),
    (TARGET, {"num_hidden_layers": 3}, CheckpointError, r"tensor 'layers\.2': missing"),
    (TARGET, {"num_hidden_layers": 1}, UnsupportedError, r"tensor 'layers\.1': got shape .* no such tensor"),
    (
        TARGET,
        {"num_hidden_layers": 0},
        CheckpointError,
        "num_hidden_layers: got 0, expected a whole",
    ),
    (TARGET, {"vocab_size": None}, CheckpointError, "vocab_size: missing"),
    (TARGET, {"vocab_size": 15}, CheckpointError, r"shape: got \(14, 16\), expected \(15, 16\)"),
    (TARGET, {"hidden_size": 8}, CheckpointError, "shape: got"),
    (
        TARGET,
        {"max_position_embeddings": 1},
        CheckpointError,
        "max_position_embeddings: got 1",
    ),
    (TARGET, {"eos_token_id": VOCAB}, CheckpointError, "eos_token_id: got 14, expected 0 <= id < 14"),
    (TARGET, {"eos_token_id": [1, -1]}, CheckpointError, "eos_token_id: got -1"),
    (TARGET, {"bos_token_id": "<s>"}, CheckpointError, "bos_token_id: got '<s>'"),
    (TARGET, {"model_type": "llama"}, PairError, "model_type: got 'llama', expected 'dflash-simple-target'"),
    (DRAFT, {"mask_token_id": VOCAB}, CheckpointError, "mask_token_id: got 14, expected 0 <= id < 14"),
    (DRAFT, {"mask_token_id": -1}, CheckpointError, "mask_token_id: got -1"),
    (DRAFT, {"mask_token_id": None}, CheckpointError, "mask_token_id: missing"),
    (DRAFT, {"block_size": 1}, CheckpointError, "block_size: got 1, expected a whole number >= 2"),
    (DRAFT, {"block_size": 4}, CheckpointError, "shape: got"),
    (
        DRAFT,
        {"num_denoise_steps": 0},
        CheckpointError,
        "num_denoise_steps: got 0, expected a whole",
    ),
    (DRAFT, {"num_denoise_steps": True}, CheckpointError, "num_denoise_steps: got True"),
    (DRAFT, {"temperature": 0.8}, UnsupportedError, "temperature: got 0.8, expected no such key"),
    (DRAFT, {"model_type": "dflash-simpler"}, DflashError, "model_type|architectures"),
]


@pytest.mark.parametrize(("side", "values", "kind", "match"), CONFIGS)
def test_configs(pair, side, values, kind, match):
    change(pair[side], **values)
    refused(pair, kind, match)


def test_pairs_that_do_not_fit(pair, tmp_path):
    arrays, _ = toy_arrays()
    wide = {
        "layers.0": np.eye(20),
        "lm_head": np.zeros((20, VOCAB)),
        "token_embed": np.zeros((VOCAB, 20)),
    }
    other = target_to_folder(tmp_path / "wide", wide, max_position_embeddings=9)
    refused((other, pair[1]), PairError, "hidden_size: got 16, expected 20, the target's hidden_size")
    more = arrays | {"lm_head": np.zeros((16, 15)), "token_embed": np.zeros((15, 16))}
    other = target_to_folder(tmp_path / "more", more, max_position_embeddings=9)
    refused((other, pair[1]), PairError, "vocab_size: got 14, expected 15, the target's vocab_size")
    refused((pair[1], pair[0]), DflashError, "architectures|model_type")


def test_a_transformer_draft_does_not_run_on_a_simple_target(pair, demo_draft):
    refused((pair[0], demo_draft), UnsupportedError, "target model_type: got 'dflash-simple-target'")
    refused((demo_draft, pair[1]), PairError, "model_type: got 'qwen3', expected 'dflash-simple-target'")


def test_a_mask_that_ends_the_text_is_a_warning(pair):
    change(pair[0], eos_token_id=[5, 2])
    (warning,) = pair_from_sources(str(pair[0]), str(pair[1])).warnings
    assert warning.startswith("mask_token_id: got 5, which is also a stop id")


def test_inspection(pair):
    found = inspect_checkpoint(str(pair[1]), str(pair[0]))
    json.dumps(found)
    assert (found["kind"], found["family"], found["format"]) == ("draft", "simple", "dflash-deploy")
    assert found["spec"]["unmask_counts"] == [1, 2]
    assert found["pair"] == {"target": "target", "problem": None, "warnings": []}
    lines = "\n".join(inspection_lines(found))
    assert "denoising      2 steps, which choose 1, 2 tokens" in lines
    assert "with target    target: fits" in lines
    lines = "\n".join(inspection_lines(inspect_checkpoint(str(pair[0]))))
    assert "kind           target, simple" in lines
    assert "layers         2" in lines

    change(pair[1], block_size=1)
    found = inspect_checkpoint(str(pair[1]), str(pair[0]))
    assert found["spec"] is None and "block_size: got 1" in found["problem"]
    assert "block_size: got 1" in found["pair"]["problem"]
    assert any(line.startswith("cannot export") for line in inspection_lines(found))


def test_tensors(pair):
    from safetensors.numpy import load_file, save_file

    file = pair[1] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"W_extra": np.zeros(3, np.float32)}, file)
    refused(pair, UnsupportedError, r"tensor 'W_extra': got shape \(3,\)")
    shutil.copy(pair[0] / "model.safetensors", file)
    refused(pair, CheckpointError, "tensor 'W_proj': missing")
    tensors["pos_embed"] = tensors["pos_embed"].astype(np.float64)
    save_file(tensors, file)
    refused(pair, UnsupportedError, "tensor 'pos_embed' dtype: got 'float64', expected one of float32")


def test_parity_has_no_original_to_compare_with(toy_bundle: Any) -> None:
    from dflash_deploy.exporter.parity.run import parity_report

    with pytest.raises(UnsupportedError, match="family simple, which has no PyTorch original"):
        parity_report(toy_bundle.path, str(toy_bundle.target), str(toy_bundle.draft), ["one"])
