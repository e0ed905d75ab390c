"""The format of simple checkpoints: a folder with config.json and model.safetensors.

Tensors have the names and shapes that `spec` lists; they are stored in float32, float16 or bfloat16. The
page docs/formats/simple.md lists the fields of both config files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bundle.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..drafts.fields import Fields, refuse_unknown
from ..drafts.names import match_tensors
from .spec import SimpleDraftSpec, SimpleTargetSpec

if TYPE_CHECKING:
    import numpy as np

TARGET_TYPE = "dflash-simple-target"
DRAFT_TYPE = "dflash-simple"

# Decide nothing, and are written by everybody's tools.
_HARMLESS = {"dtype", "torch_dtype", "transformers_version"}


def target_from_checkpoint(checkpoint: Checkpoint) -> SimpleTargetSpec:
    """Parse a simple target's config and tensor list.

    Raises:
        CheckpointError: a key or tensor is missing, of a wrong shape or out of range.
        UnsupportedError: another model_type, or a key or tensor that nothing uses.
    """
    fields = _fields(checkpoint, TARGET_TYPE)
    vocab = fields.whole("vocab_size")
    spec = SimpleTargetSpec(
        vocab_size=vocab,
        hidden_size=fields.whole("hidden_size"),
        num_layers=fields.whole("num_hidden_layers"),
        max_position_embeddings=fields.whole("max_position_embeddings", minimum=2),
        stop_token_ids=_stop_ids(fields, vocab),
        bos_token_id=_optional_id(fields, "bos_token_id", vocab),
        checkpoint_dtype="unknown",
        tensors=(),
    )
    refuse_unknown(checkpoint.config, fields.used | _HARMLESS, "", fields.where)
    tensors = match_tensors(checkpoint, spec.shapes(), {}, {}, "a simple target")
    return replace(spec, checkpoint_dtype=_dtype(checkpoint, tensors), tensors=tensors)


def draft_from_checkpoint(checkpoint: Checkpoint) -> SimpleDraftSpec:
    """Parse a simple draft's config and tensor list; raises as `target_from_checkpoint`."""
    fields = _fields(checkpoint, DRAFT_TYPE)
    vocab = fields.whole("vocab_size")
    spec = SimpleDraftSpec(
        vocab_size=vocab,
        hidden_size=fields.whole("hidden_size"),
        block_size=fields.whole("block_size", minimum=2),
        num_denoise_steps=fields.whole("num_denoise_steps"),
        mask_token_id=_checked_id(fields, "mask_token_id", fields.whole("mask_token_id", minimum=0), vocab),
        checkpoint_dtype="unknown",
        tensors=(),
    )
    refuse_unknown(checkpoint.config, fields.used | _HARMLESS, "", fields.where)
    tensors = match_tensors(checkpoint, spec.shapes(), {}, {}, "a simple draft")
    return replace(spec, checkpoint_dtype=_dtype(checkpoint, tensors), tensors=tensors)


def target_to_folder(folder: Path, arrays: Mapping[str, np.ndarray], **options: Any) -> Path:
    """Write a simple target; sizes are read off the arrays.

    Args:
        folder: made if it is not there.
        arrays: every parameter, see `spec`.
        options: further config keys, ``max_position_embeddings`` among them.
    """
    vocab, hidden = arrays["token_embed"].shape
    depth = sum(name.startswith("layers.") for name in arrays)
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": depth}
    return _write(folder, {"model_type": TARGET_TYPE, **sizes, **options}, arrays)


def draft_to_folder(folder: Path, arrays: Mapping[str, np.ndarray], **options: Any) -> Path:
    """Write a simple draft, like `target_to_folder`; needs ``num_denoise_steps`` and ``mask_token_id``."""
    vocab, hidden = arrays["token_embed"].shape
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "block_size": len(arrays["W_mix"])}
    return _write(folder, {"model_type": DRAFT_TYPE, **sizes, **options}, arrays)


def _write(folder: Path, config: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def _fields(checkpoint: Checkpoint, model_type: str) -> Fields:
    fields = Fields(f"{checkpoint.name}/config.json", "", ("", checkpoint.config))
    fields.text("model_type", one_of=(model_type,))
    return fields


def _stop_ids(fields: Fields, vocab: int) -> tuple[int, ...]:
    value = fields.value("eos_token_id", None)
    if value is None:
        return ()
    ids = fields.wholes("eos_token_id") if isinstance(value, list) else (value,)
    return tuple(dict.fromkeys(_checked_id(fields, "eos_token_id", i, vocab) for i in ids))


def _optional_id(fields: Fields, key: str, vocab: int) -> int | None:
    value = fields.value(key, None)
    return None if value is None else _checked_id(fields, key, value, vocab)


def _checked_id(fields: Fields, key: str, value: object, vocab: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
        raise fields.error(key, value, f"0 <= id < {vocab}, the vocab_size", CheckpointError)
    return value


def _dtype(checkpoint: Checkpoint, tensors: tuple[tuple[str, str], ...]) -> str:
    """The dtypes that occur, e.g. ``float32``."""
    return ", ".join(sorted({checkpoint.tensors[stored].dtype for _, stored in tensors}))
