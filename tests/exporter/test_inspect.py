"""`dflash inspect` as a library call."""

import json

import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.errors import CheckpointError
from dflash_deploy.cli import cli
from dflash_deploy.exporter.inspect import inspect_checkpoint
from dflash_deploy.exporter.inspect_lines import inspection_lines
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
        aux_hidden_state_layer_ids=[3, 1],
        block_size=4,
        sample_from_anchor=True,
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
    assert text["by default"] == (
        "block_size 16, is_causal as layer_types say, input_embedding_scale 1 (dflash.model)"
    )
    assert text["target must be"] == "hidden 32, 5 layers, vocabulary 160"
    assert text["can export"] == "yes, with such a target"


def test_speculators_draft(folders):
    text = rows(inspect_checkpoint(str(folders / "speculators")))
    assert text["kind"] == "draft, dflash, in the format of speculators"
    assert text["recognised by"] == "speculators_model_type is dflash"
    assert "window 8 from the anchor" in text["attention"]
    assert text["head"] == "its own, 40 of 160 ids"
    assert text["taps"].endswith("counted from 0; aux_hidden_state_layer_ids 3, 1)")
    assert text["block"] == "4 rows, 4 proposals from row 0, the anchor's own"


def test_what_the_original_passes_over_is_said(tmp_path):
    target = tiny_target(4, tmp_path / "target")
    forced = {"target": target, "style_nested_rope": True, "style_borrowed": True, "dflash2": True}
    speculators_draft(4, tmp_path / "draft", **forced)
    found = inspect_checkpoint(str(tmp_path / "draft"))
    borrowed = "embed_tokens.weight, lm_head.weight, verifier_lm_head.weight, verifier_norm.weight"
    assert found["notes"] == [
        "of rope_parameters the entry for sliding_attention serves every layer, as in the original",
        f"{borrowed}: not read, the target's own are used, as in the original",
    ]
    lines = inspection_lines(found)
    assert [line[15:] for line in lines if line.startswith("note")] == found["notes"]


def test_what_the_classes_fill_in_is_said(tmp_path):
    """Of a config with few keys, also what follows from others."""
    rope = {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    }
    plain = {
        "max_position_embeddings": 512,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "block_size": None,
    }
    full = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "use_sliding_window": False}
    zlab_draft(3, tmp_path, dflash2=False, style_flat_rope=False, rope_parameters=rope, **plain, **full)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rms_norm_eps", "layer_types", "attention_bias"):
        del config[key]
    del config["rope_parameters"]["original_max_position_embeddings"]
    path.write_text(json.dumps(config))
    lines = inspection_lines(inspect_checkpoint(str(tmp_path)))
    filled = [line[15:] for line in lines if line.startswith("by default")]
    assert filled[0] == (
        "rms_norm_eps 1e-06, original_max_position_embeddings 512, layer_types 3 times full_attention, "
        "attention_bias false (transformers' Qwen3Config)"
    )
    assert "block_size 16" in filled[1]
    assert "rope           yarn, theta 10000, factor 2, original_max_position_embeddings 512" in "\n".join(
        lines
    )


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
    assert text["attention"] == "no bias"
    assert text["can export"] == "yes, with a draft made for it"


def test_two_targets_are_no_pair(folders):
    text = rows(inspect_checkpoint(str(folders / "target"), str(folders / "zlab")))
    assert "target is no draft; give the draft first, its target with --target" in text["with target"]


def test_a_gguf_file_says_what_it_holds(demo_target):
    text = rows(inspect_checkpoint(str(demo_target)))
    assert "(gguf of F32, Q4_1, Q8_0, dequantised, 272 tensors, 134.5 M numbers)" in text["checkpoint"]


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
    assert rows(found)["kind"] == "draft, of a kind that is not known"
    assert "speculators_model_type: got 'eagle3'" in rows(found)["cannot export"]
    found = inspect_checkpoint(edited(folders, tmp_path, "target", model_type="mamba"))
    assert found["kind"] == "target"
    assert "model_type: got 'mamba'" in rows(found)["cannot export"]


@pytest.mark.parametrize("name", ["FooModel", "LlamaModel", "LlamaForSequenceClassification"])
def test_another_class_is_neither_and_refused_by_name(folders, tmp_path, name):
    found = inspect_checkpoint(edited(folders, tmp_path, "target", architectures=[name]))
    assert found["kind"] == "other"
    assert rows(found)["kind"] == "neither a target nor a draft"
    assert f"architectures: got ['{name}'], expected LlamaForCausalLM for" in rows(found)["cannot export"]


def test_the_exit_code_says_whether_anything_stands_in_the_way(folders, tmp_path):
    tiny_target(3, tmp_path / "other", num_hidden_layers=6, vocab_size=160, hidden_size=32)
    draft, target = str(folders / "zlab"), str(folders / "target")
    foo = edited(folders, tmp_path, "target", architectures=["FooModel"])
    for arguments, code, reason in (
        ([draft], 0, "can export     yes"),
        ([draft, "--target", target], 0, "target: fits"),
        ([draft, "--target", str(tmp_path / "other")], 2, "does not fit: num_target_layers: got 5"),
        ([draft, "--target", foo], 2, "does not fit: target/config.json: architectures: got ['FooModel']"),
        ([target, "--target", target], 2, "target is no draft"),
        ([foo], 2, "architectures: got ['FooModel']"),
    ):
        result = CliRunner().invoke(cli, ["inspect", *arguments])
        assert (result.exit_code, reason in result.output) == (code, True), result.output
        as_json = CliRunner().invoke(cli, ["inspect", *arguments, "--json"])
        assert as_json.exit_code == code
        json.loads(as_json.output)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(str(tmp_path / "nothing"))
