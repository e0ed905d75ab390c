"""`dflash inspect` as a library call."""

import json

import pytest

from dflash_deploy.bundle.errors import CheckpointError
from dflash_deploy.exporter.inspect import inspect_checkpoint, inspection_lines
from originals import speculators_draft, tiny_target, zlab_draft


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    target = tiny_target(3, folder / "target", num_hidden_layers=5, vocab_size=160, hidden_size=32)
    zlab_draft(
        3,
        folder / "zlab",
        target=target.config,
        dflash2=True,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=20,
        is_causal=None,
        target_layer_ids=[3, 1],
        mask_token_id=2,
        block_size=None,
        output_multiplier=0.196,
        final_logit_softcapping=20.0,
        input_embedding_scale=None,
    )
    speculators_draft(
        2,
        folder / "speculators",
        target=target.config,
        dflash2=False,
        draft_vocab_size=40,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        use_sliding_window=True,
        sliding_window=8,
    )
    return folder


def rows(found) -> dict[str, str]:
    lines = inspection_lines(found)
    assert len(lines) <= 24, "an inspection fits a screen"
    return {line[:14].strip(): line[15:] for line in lines}


def test_draft(folders):
    found = inspect_checkpoint(str(folders / "zlab"))
    json.dumps(found)
    assert (found["kind"], found["format"], found["family"]) == ("draft", "z-lab", "dflash2")
    assert found["problem"] is None
    assert found["spec"]["taps"] == [3, 1]
    assert {"key": "block_size", "value": 16, "source": "dflash.model"} in found["defaults"]
    assert found["needs"] == {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "more_layers_than": 3,
        "vocab_size": 160,
        "more_embedding_rows_than": 2,
    }
    assert "pair" not in found
    text = rows(found)
    assert text["kind"] == "draft, dflash2, in the format of z-lab"
    assert text["recognised by"].startswith("architectures has DFlash2DraftModel")
    assert text["attention"] == "0-1: window 20 from the query, causal in the block; 2: full, whole block"
    assert text["taps"].startswith("3, 1 ")
    assert text["block"] == "16 rows, 15 proposals from row 1"
    assert text["head"] == "the target's, 160 ids, logits times 0.196, soft-capped at 20"
    assert "block_size 16 (dflash.model)" in text["by default"]
    assert text["target must be"] == "hidden 32, 5 layers, vocabulary 160, more than 2 embedding rows"


def test_speculators_draft(folders):
    text = rows(inspect_checkpoint(str(folders / "speculators")))
    assert text["kind"] == "draft, dflash, in the format of speculators"
    assert text["recognised by"] == "speculators_model_type is dflash"
    assert "window 8 from the anchor" in text["attention"]
    assert text["head"] == "its own, 40 of 160 ids"


def test_pair(folders):
    found = inspect_checkpoint(str(folders / "zlab"), str(folders / "target"))
    assert found["pair"]["target"] == "target"
    assert found["pair"]["problem"] is None
    text = rows(found)
    assert text["with target"] == "target: fits"
    assert text["warning"].startswith("mask_token_id: got 2, which is also a stop id")


def test_pair_that_does_not_fit(folders, tmp_path):
    tiny_target(3, tmp_path / "other", num_hidden_layers=6, vocab_size=160, hidden_size=32)
    found = inspect_checkpoint(str(folders / "zlab"), str(tmp_path / "other"))
    assert found["pair"]["problem"].startswith("num_target_layers: got 5, expected 6")
    assert rows(found)["with target"].startswith("other: does not fit: num_target_layers: got 5")


def test_target(folders):
    found = inspect_checkpoint(str(folders / "target"))
    json.dumps(found)
    assert (found["kind"], found["problem"]) == ("target", None)
    text = rows(found)
    assert text["family"] == "llama"
    assert text["vocabulary"].startswith("160 ids, 160 embedding rows, head ")
    assert text["stops at"] == "2"


def edited(folders, tmp_path, name, **changes):
    folder = tmp_path / name
    folder.mkdir()
    for path in (folders / name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_what_cannot_be_exported_is_an_entry(folders, tmp_path):
    found = inspect_checkpoint(
        edited(folders, tmp_path, "zlab", attention_sink_bias=True), str(folders / "target")
    )
    assert found["problem"].startswith("attention_sink_bias: got True, expected no such key")
    assert (found["format"], found["spec"]) == ("z-lab", None)
    assert found["pair"]["problem"] == "the draft itself cannot be exported"
    text = rows(found)
    assert text["cannot export"] == found["problem"]
    assert text["recognised by"].startswith("architectures has")


def test_unknown_kinds_are_entries(folders, tmp_path):
    found = inspect_checkpoint(edited(folders, tmp_path, "speculators", speculators_model_type="eagle3"))
    assert found["kind"] == "draft"
    assert "speculators_model_type: got 'eagle3'" in rows(found)["cannot export"]
    found = inspect_checkpoint(edited(folders, tmp_path, "target", model_type="mamba"))
    assert found["kind"] == "target"
    assert "model_type: got 'mamba'" in rows(found)["cannot export"]


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(str(tmp_path / "nothing"))
