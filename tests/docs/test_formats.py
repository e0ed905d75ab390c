"""The pages of the draft formats: they explain every key that a loader reads, and show what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_deploy.exporter.drafts.body import CLASS_DEFAULTS, FULL, SLIDING
from dflash_deploy.exporter.drafts.fields import Fields
from dflash_deploy.exporter.drafts.formats import read_draft
from dflash_deploy.exporter.drafts.spec import DraftFamily, DraftFormat
from dflash_deploy.exporter.inspect import inspect_checkpoint
from dflash_deploy.exporter.inspect_lines import inspection_lines
from dflash_deploy.exporter.simple.seed import seed_checkpoints
from originals import speculators_draft, tiny_target, zlab_draft
from support_table import checkpoint_with

FORMATS = Path(__file__).parents[2] / "docs" / "formats"
PAGES = {
    DraftFormat.ZLAB: "zlab.md",
    DraftFormat.SPECULATORS: "speculators.md",
}
_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu"}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_SLIDES = {"use_sliding_window": True, "sliding_window": 32}


def example_pair(format_: DraftFormat, folder: Path) -> None:
    """Make the pair of a format's page: folders ``target`` and ``draft``. Nothing is left to the seed."""
    target = tiny_target(
        7,
        folder / "target",
        "qwen3",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters=_ROPE,
        tie_word_embeddings=True,
    )
    shared = {"target": target, "mask_token_id": 255, "block_size": 8, "attention_bias": False, **_SIZES}
    shared |= {"intermediate_size": 96, "rms_norm_eps": 1e-6, **_SLIDES}
    if format_ is DraftFormat.ZLAB:
        zlab_draft(
            7,
            folder / "draft",
            **shared | {"target": target.config},
            dflash2=True,
            style_nested=True,
            style_flat_rope=False,
            num_hidden_layers=3,
            layer_types=[SLIDING, SLIDING, FULL],
            is_causal=None,
            target_layer_ids=[1, 2, 4],
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=4,
            selector_top_k=4,
            output_multiplier=0.196,
            final_logit_softcapping=20.0,
            input_embedding_scale=None,
            rope_parameters=_ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        )
        return
    speculators_draft(
        7,
        folder / "draft",
        **shared,
        dflash2=False,
        style_shuffled_map=False,
        style_nested_rope=True,
        style_borrowed=False,
        model_type="qwen3",
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        sliding_window_non_causal=None,
        aux_hidden_state_layer_ids=[2, 3, 6],
        draft_vocab_size=64,
        sample_from_anchor=True,
        rope_parameters=_ROPE,
    )


def read(page: str) -> str:
    return (FORMATS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("format_", PAGES)
def test_the_inspection_is_what_comes_out(format_, tmp_path):
    example_pair(format_, tmp_path)
    lines = inspection_lines(inspect_checkpoint(str(tmp_path / "draft"), str(tmp_path / "target")))
    shown = re.search(
        r"```sh\ndflash inspect draft --target target\n```\n\n```text\n(.*?)\n```",
        read(PAGES[format_]),
        re.DOTALL,
    )
    assert shown is not None
    assert shown[1].splitlines() == lines


class Seen:
    """The keys that loaders ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: set[str] = set()
        value, use = Fields.value, Fields.use

        def seen_value(fields: Fields, key: str, *default: object, **named: object) -> object:
            self.keys.add(key)
            return value(fields, key, *default, **named)

        def seen_use(fields: Fields, *keys: str) -> None:
            self.keys.update(keys)
            use(fields, *keys)

        monkeypatch.setattr(Fields, "value", seen_value)
        monkeypatch.setattr(Fields, "use", seen_use)


def explained(page: str, section: str = "") -> set[str]:
    """Names in the first column of the tables of a page, or of its sections whose titles begin so."""
    sections = re.split(r"^## ", read(page), flags=re.MULTILINE)
    text = "".join(part for part in sections if part.startswith(section))
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("format_", PAGES)
def test_every_key_is_explained(format_, monkeypatch):
    seen = Seen(monkeypatch)
    for family in DraftFamily:
        read_draft(checkpoint_with(format_, family))
    names = explained("transformer.md") | explained(PAGES[format_], "config.json")
    assert names == seen.keys


def test_the_classes_defaults_are_the_codes():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", read("transformer.md"), re.MULTILINE)
    for name, *cells in rows:
        for cell, (kind, defaults) in zip(cells, CLASS_DEFAULTS.items(), strict=True):
            stated = re.match(r"`([^`]+)`", cell)
            assert (None if stated is None else json.loads(stated[1])) == defaults.get(name), (kind, name)
    assert {name for name, *_ in rows} >= CLASS_DEFAULTS["qwen3"].keys()


def test_every_key_of_the_simple_format_is_explained(monkeypatch, tmp_path):
    from dflash_deploy.exporter.checkpoint import checkpoint_from_source
    from dflash_deploy.exporter.simple.pair import pair_from_checkpoints

    seen = Seen(monkeypatch)
    pair_from_checkpoints(*(checkpoint_from_source(str(path)) for path in seed_checkpoints(tmp_path)))
    assert not sorted(seen.keys - explained("simple.md", "config.json"))
