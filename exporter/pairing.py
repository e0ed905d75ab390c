"""Whether a draft and a target belong together, by their specs alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..bundle.errors import PairError, UnsupportedError, field_error
from .drafts.spec import DraftFormat, DraftSpec
from .drafts.zlab import LAST_LAYER
from .targets.spec import TargetSpec

_OTHER_TARGET = "choose the target this draft was trained for"


def check_pair(draft: DraftSpec, target: TargetSpec) -> tuple[str, ...]:
    """Check that `draft` can run on `target`.

    Returns:
        Warnings, each once: what is legal but costs acceptance.

    Raises:
        PairError: names the first field that does not fit, its value and the target's.
        UnsupportedError: the draft taps the target's last layer in a way that is not defined.
    """
    _same("hidden_size", draft.hidden_size, target.hidden_size, "hidden_size")
    _same("fc.weight's input", *_fc_inputs(draft, target), "taps * hidden_size")
    if draft.num_target_layers is not None:
        _same("num_target_layers", draft.num_target_layers, target.num_layers, "num_hidden_layers")
    for tap in draft.taps:
        if tap >= target.num_layers:
            raise field_error(
                PairError,
                "target_layer_ids",
                tap,
                f"< {target.num_layers}, the target's num_hidden_layers",
                _OTHER_TARGET,
            )
        if draft.format is DraftFormat.ZLAB and tap == target.num_layers - 1:
            raise field_error(UnsupportedError, "target_layer_ids", tap, LAST_LAYER)
    # The codebooks and the vocabulary map have as many rows as the draft's vocab_size says.
    _same("vocab_size", draft.vocab_size, target.vocab_size, "vocab_size")
    if draft.mask_token_id >= target.embedding_rows:
        raise field_error(
            PairError,
            "mask_token_id",
            draft.mask_token_id,
            f"< {target.embedding_rows}, the rows of the target's embedding",
            _OTHER_TARGET,
        )
    return _warnings(draft, target)


def _fc_inputs(draft: DraftSpec, target: TargetSpec) -> tuple[int, int]:
    return len(draft.taps) * draft.target_hidden_size, len(draft.taps) * target.hidden_size


def _same(what: str, got: int, expected: int, name: str) -> None:
    if got != expected:
        raise field_error(PairError, what, got, f"{expected}, the target's {name}", _OTHER_TARGET)


def _warnings(draft: DraftSpec, target: TargetSpec) -> tuple[str, ...]:
    return (*_tap_warnings(draft), *_mask_warnings(draft, target))


def _tap_warnings(draft: DraftSpec) -> Iterator[str]:
    """Both originals take a layer twice without a word, but no published draft does."""
    if len(set(draft.taps)) < len(draft.taps):
        yield (
            f"target_layer_ids: got {list(draft.taps)} (layers counted from 0), which has one twice; "
            "a draft that was trained with others will accept few tokens"
        )


def _mask_warnings(draft: DraftSpec, target: TargetSpec) -> Iterator[str]:
    if draft.learned_mask:
        return
    roles = [
        role
        for role, holds in (
            ("a stop id", draft.mask_token_id in target.stop_token_ids),
            ("bos_token_id", draft.mask_token_id == target.bos_token_id),
            ("pad_token_id", draft.mask_token_id == draft.pad_token_id),
        )
        if holds
    ]
    if roles:
        what = f"mask_token_id: got {draft.mask_token_id}, which is also {' and '.join(roles)}"
        yield f"{what}; a draft trained with a mask of its own will accept few tokens"
