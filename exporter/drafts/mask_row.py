"""A mask embedding that was trained with the draft, instead of the target's row of the mask id.

The originals' code knows none, but checkpoints that need one are published: as a tensor ``mask_embedding``
[H] in a safetensors file of its own, as a pickled side file (refused, with the way out), or as the row of
the mask id in a copy of the target's embedding, ``embed_tokens.weight``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from ..pieces import row_ranges
from .names import MASK_EMBEDDING
from .spec import DraftSpec

if TYPE_CHECKING:
    import torch

EMBED_TOKENS = "embed_tokens.weight"
_PICKLE = "mask_embedding.pt"


def mask_tensor(
    checkpoint: Checkpoint, spec: DraftSpec
) -> tuple[tuple[tuple[str, str], ...], dict[str, tuple[int, ...]]]:
    """Find the learned mask in a z-lab checkpoint.

    Returns:
        ((canonical name, checkpoint name),), or () if there is none; and the tensors this accounts for with
        the shapes they must have.

    Raises:
        CheckpointError: there are two, or one without the mask's row.
        UnsupportedError: it is pickled, or meets an embedding scale, which nobody defines for it.
    """
    held = [name for name in (MASK_EMBEDDING, EMBED_TOKENS) if name in checkpoint.tensors]
    if not held:
        if any((path.parent / _PICKLE).is_file() for path in checkpoint.files()[:1]):
            raise UnsupportedError(
                f"{checkpoint.name}/{_PICKLE}: is pickled, which can run code when loaded, expected a tensor "
                f"{MASK_EMBEDDING!r} in mask_embedding.safetensors; save the vector of "
                f"{spec.hidden_size} numbers there"
            )
        return (), {}
    if len(held) > 1:
        raise CheckpointError(
            f"{checkpoint.name}: tensor {MASK_EMBEDDING!r}: got {EMBED_TOKENS!r} too, expected one of them; "
            "remove the one that was not trained"
        )
    if spec.input_embedding_scale != 1.0:
        raise field_error(
            UnsupportedError,
            "input_embedding_scale",
            spec.input_embedding_scale,
            f"1.0 beside the learned mask {held[0]!r} (whether it is scaled too is defined nowhere)",
        )
    shape = checkpoint.tensors[held[0]].shape
    if held[0] == EMBED_TOKENS:
        rows = shape[0] if shape else 0
        if rows <= spec.mask_token_id:
            raise field_error(
                CheckpointError,
                "mask_token_id",
                spec.mask_token_id,
                f"< {rows}, the rows of {EMBED_TOKENS!r}",
            )
        return ((MASK_EMBEDDING, EMBED_TOKENS),), {EMBED_TOKENS: (rows, spec.hidden_size)}
    expected = (1, spec.hidden_size) if len(shape) == 2 else (spec.hidden_size,)
    return ((MASK_EMBEDDING, MASK_EMBEDDING),), {MASK_EMBEDDING: expected}


def mask_row_from_checkpoint(checkpoint: Checkpoint, spec: DraftSpec) -> torch.Tensor:
    """Read the learned mask of a draft with `learned_mask`: [H] in its stored dtype."""
    stored = dict(spec.tensors)[MASK_EMBEDDING]
    if stored == EMBED_TOKENS:
        return checkpoint.read_rows(stored, spec.mask_token_id, spec.mask_token_id + 1)[0]
    return checkpoint.read(stored).reshape(spec.hidden_size)


def check_embedding_copy(checkpoint: Checkpoint, spec: DraftSpec, target: Checkpoint, embedding: str) -> None:
    """Check that a draft's own embedding is the target's but for the row of the mask.

    Nothing to do for a draft whose learned mask is not in an embedding.

    Args:
        checkpoint: the draft's.
        spec: the draft's.
        target: the target's checkpoint.
        embedding: name of its embedding in there, [rows, H].

    Raises:
        UnsupportedError: names the first other row that differs: an embedding of its own is not implemented.
    """
    if dict(spec.tensors).get(MASK_EMBEDDING) != EMBED_TOKENS:
        return
    shared = min(checkpoint.tensors[EMBED_TOKENS].shape[0], target.tensors[embedding].shape[0])
    for start, stop in row_ranges((shared, spec.hidden_size)):
        copy = checkpoint.read_rows(EMBED_TOKENS, start, stop)
        differs = (copy != target.read_rows(embedding, start, stop).to(copy.dtype)).any(dim=1)
        for row in (int(place) + start for place in differs.nonzero()[:2, 0]):
            if row != spec.mask_token_id:
                raise UnsupportedError(
                    f"{checkpoint.name}: tensor {EMBED_TOKENS!r}: got another row {row} than the target's "
                    f"embedding, expected no difference but in the mask's row {spec.mask_token_id}; "
                    "is it the draft's target?"
                )
