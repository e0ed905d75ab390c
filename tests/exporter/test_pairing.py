"""Which draft fits which target, by specs alone."""

from dataclasses import replace

import pytest

from dflash_deploy.bundle.errors import PairError, UnsupportedError
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint
from dflash_deploy.exporter.drafts.formats import draft_from_checkpoint
from dflash_deploy.exporter.drafts.spec import DraftFormat
from dflash_deploy.exporter.pairing import check_pair
from dflash_deploy.exporter.targets.families import target_from_checkpoint
from originals import tiny_target, zlab_draft


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target(3, folder / "target", num_hidden_layers=5, vocab_size=160, hidden_size=32)
    zlab_draft(
        3, folder / "draft", target=target.config, dflash2=True, target_layer_ids=[3, 1], mask_token_id=90
    )
    draft = draft_from_checkpoint(SafetensorsCheckpoint(folder / "draft"))
    return draft, target_from_checkpoint(SafetensorsCheckpoint(folder / "target"))


def test_fits(pair):
    assert check_pair(*pair) == ()


@pytest.mark.parametrize(
    ("draft_changes", "target_changes", "error", "message"),
    [
        (
            {"hidden_size": 64},
            {},
            PairError,
            "hidden_size: got 64, expected 32, the target's hidden_size; choose the",
        ),
        (
            {"target_hidden_size": 48},
            {},
            PairError,
            r"fc.weight's input: got 96, expected 64, the target's taps",
        ),
        (
            {"num_target_layers": 36},
            {},
            PairError,
            "num_target_layers: got 36, expected 5, the target's num_hidden",
        ),
        ({"num_target_layers": None, "taps": (3, 5)}, {}, PairError, "target_layer_ids: got 5, expected < 5"),
        (
            {"num_target_layers": None, "taps": (4, 1)},
            {},
            UnsupportedError,
            "target_layer_ids: got 4, expected a layer",
        ),
        ({"vocab_size": 161}, {}, PairError, "vocab_size: got 161, expected 160, the target's vocab_size"),
        (
            {"mask_token_id": 160},
            {},
            PairError,
            "mask_token_id: got 160, expected < 160, the rows of the target's",
        ),
        (
            {"mask_token_id": 192},
            {"embedding_rows": 192},
            PairError,
            "mask_token_id: got 192, expected < 192",
        ),
    ],
)
def test_refusals(pair, draft_changes, target_changes, error, message):
    draft, target = pair
    with pytest.raises(error, match=message):
        check_pair(replace(draft, **draft_changes), replace(target, **target_changes))


def test_a_speculators_tap_may_be_the_last_layer(pair):
    """There the last id is the state before the final norm, which is what a tap means here."""
    draft, target = pair
    draft = replace(draft, format=DraftFormat.SPECULATORS, num_target_layers=None, taps=(4, 0))
    assert check_pair(draft, target) == ()


def test_mask_in_a_padded_row_is_fine(pair):
    draft, target = pair
    assert check_pair(replace(draft, mask_token_id=180), replace(target, embedding_rows=192)) == ()


@pytest.mark.parametrize(
    ("draft_changes", "target_changes", "roles"),
    [
        ({"mask_token_id": 2}, {}, "a stop id;"),
        ({"mask_token_id": 1}, {}, "bos_token_id;"),
        ({"mask_token_id": 7, "pad_token_id": 7}, {}, "pad_token_id;"),
        (
            {"mask_token_id": 2, "pad_token_id": 2},
            {"bos_token_id": 2},
            "a stop id and bos_token_id and pad_token_id;",
        ),
    ],
)
def test_mask_that_is_also_something_else_warns_once(pair, draft_changes, target_changes, roles):
    draft, target = pair
    warnings = check_pair(replace(draft, **draft_changes), replace(target, **target_changes))
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"mask_token_id: got {draft_changes['mask_token_id']}, which is also {roles}"
    )


def test_learned_mask_does_not_warn(pair):
    draft, target = pair
    assert check_pair(replace(draft, mask_token_id=2, learned_mask=True), target) == ()


def test_a_layer_tapped_twice_warns(pair):
    """Both originals run with it: their features hold the layer twice, and so do ours."""
    draft, target = pair
    (warning,) = check_pair(replace(draft, taps=(0, 0, 1)), target)
    assert warning.startswith("target_layer_ids: got [0, 0, 1] (layers counted from 0), which has one twice")
