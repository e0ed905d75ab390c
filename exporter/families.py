"""Families of pairs by the draft's config: a dict of strings, imported on use."""

from __future__ import annotations

import importlib

from .checkpoint import Checkpoint, checkpoint_from_source
from .plan import Pair

# model_type of a draft's config.json -> module with `pair_from_checkpoints(target, draft) -> Pair`.
FAMILIES = {"dflash-simple": "simple.pair"}
# A transformer draft has its base model's model_type: `drafts.formats` tells them apart by other signs.
_TRANSFORMER = "transformer_pair"


def pair_from_sources(target: str, draft: str) -> Pair:
    """Open both checkpoints and check that they fit; reads no weights.

    Args:
        target: folder, .gguf file or hub id.
        draft: folder or hub id.

    Raises:
        CheckpointError, UnsupportedError, PairError: see there.
    """
    small = checkpoint_from_source(draft)  # a wrong one is not to be found out behind a large target
    return pair_from_checkpoints(checkpoint_from_source(target), small)


def pair_from_checkpoints(target: Checkpoint, draft: Checkpoint) -> Pair:
    """Parse both checkpoints in the draft's family and check that they fit.

    Raises:
        CheckpointError, UnsupportedError, PairError: see there.
    """
    model_type = draft.config.get("model_type")
    module = FAMILIES.get(model_type, _TRANSFORMER) if isinstance(model_type, str) else _TRANSFORMER
    family = importlib.import_module(f".{module}", __package__)
    pair: Pair = family.pair_from_checkpoints(target, draft)
    return pair
