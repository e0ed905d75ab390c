"""Drafts on targets that scale, cap, and look through windows: the whole pair, and its runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.export import export_bundle
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode
from originals import speculators_draft, tiny_target, zlab_draft
from target_cases import options

PROMPTS = [
    "one",
    "a prompt that is longer than a window of twenty, so that sliding layers forget its beginning",
]


def export_pair(folder: Path, family: str, draft: str, **forced: Any) -> tuple[str, str, Path]:
    drawn = options(family, 1, layers=2) | {"max_position_embeddings": 256} | forced
    model = tiny_target(7, folder / "target", family, **drawn)
    common = {"dflash2": draft.endswith("2"), "num_hidden_layers": 1, "block_size": 4}
    if draft.startswith("zlab"):
        zlab_draft(
            7,
            folder / "draft",
            target=model.config,
            target_layer_ids=[0],
            input_embedding_scale=0.25,
            **common,
        )
    else:
        speculators_draft(
            7,
            folder / "draft",
            target=model,
            aux_hidden_state_layer_ids=[1],
            sample_from_anchor=False,
            **common,
        )
    sources = str(folder / "target"), str(folder / "draft")
    export_bundle(*sources, folder / "bundle", DType.FLOAT32)
    return *sources, folder / "bundle"


def check_lossless(bundle: Path) -> None:
    """Speculative tokens are the plain ones, whatever the draft proposes."""
    prompt = list(range(3, 40))
    with Decoder.open(bundle, provider="cpu", threads=1) as decoder:
        answers = [
            decoder.generate(prompt, max_new_tokens=40, mode=mode).ids
            for mode in (Mode.PLAIN, Mode.SPECULATIVE)
        ]
    assert answers[0] == answers[1]


def test_gemma2_with_a_draft_that_gets_its_raw_embeddings(tmp_path: Path) -> None:
    capped = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "sliding_window": 8}
    target, draft, bundle = export_pair(tmp_path, "gemma2", "zlab", **capped)
    report = parity_report(bundle, target, draft, PROMPTS, new_tokens=24)
    assert report.passed, "\n".join(report.lines())
    check_lossless(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["zlab2", "speculators", "speculators2"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "smollm3"])
def test_pair(family: str, draft: str, tmp_path: Path) -> None:
    target, source, bundle = export_pair(tmp_path, family, draft)
    report = parity_report(bundle, target, source, PROMPTS, new_tokens=24)
    assert report.passed, "\n".join(report.lines())
    check_lossless(bundle)
