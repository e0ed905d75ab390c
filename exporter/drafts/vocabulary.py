"""Reduced draft vocabularies: the map from draft ids to target ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from .names import DRAFT_TO_TARGET, TARGET_TO_DRAFT

if TYPE_CHECKING:
    import torch


def check_vocabulary_map(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Check that ``d2t`` holds offsets that agree with ``t2d``.

    Draft id i is target id ``i + d2t[i]`` (speculators' `train.vocab_mapping`); ``t2d[j]`` says whether
    target id j has a draft id.

    Raises:
        CheckpointError: an id leads out of the target's vocabulary, two lead to the same, or the maps
            disagree.
        UnsupportedError: d2t holds target ids themselves.
    """
    import torch

    stored = checkpoint.read(DRAFT_TO_TARGET).to(torch.int64)
    known = checkpoint.read(TARGET_TO_DRAFT).nonzero()[:, 0]
    ids = stored + torch.arange(stored.numel())
    if _same_ids(ids, known):
        return
    what = f"{checkpoint.name}: tensor {DRAFT_TO_TARGET!r}"
    if _same_ids(stored, known):
        raise UnsupportedError(
            f"{what}: got target ids, expected offsets (target id - draft id); subtract 0, 1, 2, ... from it"
        )
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        draft_id = int(outside.nonzero()[0, 0])
        raise field_error(
            CheckpointError,
            f"{what}: target id of draft id {draft_id}",
            int(ids[draft_id]),
            f"0..{vocab_size - 1}",
        )
    different = len(set(ids.tolist()))
    raise CheckpointError(
        f"{what}: got {different} different target ids, expected the {known.numel()} that tensor "
        f"{TARGET_TO_DRAFT!r} marks, each once; the two maps do not belong together"
    )


def _same_ids(ids: torch.Tensor, known: torch.Tensor) -> bool:
    return ids.numel() == known.numel() and bool((ids.sort().values == known).all())
