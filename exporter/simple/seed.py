"""The pair of the seed program: its sizes, and the random arrays that it draws for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .checkpoint import draft_to_folder, target_to_folder

VOCAB_SIZE = 1000
HIDDEN_SIZE = 64
NUM_LAYERS = 4
BLOCK_SIZE = 8
NUM_DENOISE_STEPS = 2
MASK_TOKEN_ID = 0
MAX_LENGTH = 2048
"""The program knows no limit; a bundle needs one."""

_TARGET_SEED = 42
_DRAFT_SEED = 789

Arrays = dict[str, np.ndarray]


def seed_target_arrays() -> Arrays:
    """The target's parameters in float64, the same numbers to the last bit; see `spec` for the shapes."""
    draw = np.random.RandomState(_TARGET_SEED).randn
    # The order of the draws decides the numbers.
    layers = {f"layers.{i}": draw(HIDDEN_SIZE, HIDDEN_SIZE) * 0.1 for i in range(NUM_LAYERS)}
    lm_head = draw(HIDDEN_SIZE, VOCAB_SIZE) * 0.1
    token_embed = draw(VOCAB_SIZE, HIDDEN_SIZE) * 0.1
    return {**layers, "lm_head": lm_head, "token_embed": token_embed}


def seed_draft_arrays() -> Arrays:
    """The draft's parameters, likewise."""
    draw = np.random.RandomState(_DRAFT_SEED).randn
    # Order, shape and scale of the draws.
    drawn = (
        ("W_proj", HIDDEN_SIZE, HIDDEN_SIZE, 0.1),
        ("W_block", 2 * HIDDEN_SIZE, HIDDEN_SIZE, 0.2),
        ("W_mix", BLOCK_SIZE, BLOCK_SIZE, 0.1),
        ("pos_embed", BLOCK_SIZE, HIDDEN_SIZE, 0.1),
        ("lm_head", HIDDEN_SIZE, VOCAB_SIZE, 0.1),
        ("token_embed", VOCAB_SIZE, HIDDEN_SIZE, 0.1),
    )
    return {name: draw(rows, columns) * scale for name, rows, columns, scale in drawn}


def seed_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Write both checkpoints under `folder`, in float32: what an export computes with.

    Returns:
        The folders ``target`` and ``draft``.
    """
    folder = Path(folder)
    target = target_to_folder(folder / "target", seed_target_arrays(), max_position_embeddings=MAX_LENGTH)
    draft = draft_to_folder(
        folder / "draft",
        seed_draft_arrays(),
        num_denoise_steps=NUM_DENOISE_STEPS,
        mask_token_id=MASK_TOKEN_ID,
    )
    return target, draft
