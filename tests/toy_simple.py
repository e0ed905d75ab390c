"""A simple pair so small that every context of it can be tried, with a draft that is sometimes right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dflash_deploy.exporter.simple.checkpoint import draft_to_folder, target_to_folder
from dflash_deploy.exporter.simple.modules import SimpleDraft
from dflash_deploy.exporter.simple.spec import SimpleDraftSpec

VOCAB, HIDDEN, BLOCK, STEPS, MASK = 14, 16, 3, 2, 5
MAX_LENGTH = 64

Arrays = dict[str, np.ndarray]


def toy_arrays() -> tuple[Arrays, Arrays]:
    """Target and draft; logits are of size one, so that no token is too rare to be counted.

    The draft's head is fitted by least squares to what the target chooses greedily.
    """
    rng = np.random.default_rng(20)
    target = {
        "layers.0": rng.normal(size=(HIDDEN, HIDDEN)) * 0.35,
        "layers.1": rng.normal(size=(HIDDEN, HIDDEN)) * 0.35,
        "lm_head": rng.normal(size=(HIDDEN, VOCAB)) * 0.12,
        "token_embed": rng.normal(size=(VOCAB, HIDDEN)),
    }
    draft = {
        "W_proj": rng.normal(size=(HIDDEN, HIDDEN)) * 0.3,
        "W_block": rng.normal(size=(2 * HIDDEN, HIDDEN)) * 0.3,
        "W_mix": np.eye(BLOCK) + rng.normal(size=(BLOCK, BLOCK)) * 0.4,
        "pos_embed": rng.normal(size=(BLOCK, HIDDEN)),
        "lm_head": np.eye(HIDDEN, VOCAB),
        "token_embed": rng.normal(size=(VOCAB, HIDDEN)) * 1.5,
    }
    hidden, logits = target_states(target)
    anchors = logits.argmax(-1)  # what stands behind each token
    module = eager_draft(draft, STEPS)
    masks = torch.full((VOCAB, BLOCK), MASK)
    # A head that gives the first columns of the rows it sees: the rows themselves, padded.
    wide = np.eye(HIDDEN)
    module.lm_head.data = torch.from_numpy(wide)
    rows = module.logits(torch.from_numpy(hidden + target["token_embed"][anchors]), masks).numpy()
    ids = np.stack([anchors[anchors], anchors[anchors[anchors]], anchors[anchors[anchors[anchors]]]], axis=1)
    wanted = np.eye(VOCAB)[ids].reshape(-1, VOCAB)
    draft["lm_head"] = np.linalg.lstsq(rows.reshape(-1, HIDDEN), wanted, rcond=None)[0] * 4.0
    return target, draft


def target_states(target: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """State [V, H] and logits [V, V] behind every token."""
    hidden = np.maximum(target["token_embed"] @ target["layers.0"], 0) @ target["layers.1"]
    return hidden, hidden @ target["lm_head"]


def eager_draft(arrays: Arrays, steps: int, mask: int = MASK) -> SimpleDraft:
    """The deployment module over these arrays, in float64."""
    vocab, hidden = arrays["token_embed"].shape
    module = SimpleDraft(
        SimpleDraftSpec(vocab, hidden, len(arrays["W_mix"]), steps, mask, "float64", ()), torch.float64
    )
    for name, array in arrays.items():
        getattr(module, name).data = torch.from_numpy(array)
    return module.double()


def toy_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Write the pair."""
    target, draft = toy_arrays()
    return (
        target_to_folder(folder / "target", target, max_position_embeddings=MAX_LENGTH),
        draft_to_folder(folder / "draft", draft, num_denoise_steps=STEPS, mask_token_id=MASK),
    )
