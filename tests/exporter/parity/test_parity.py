"""`parity_report` on tiny random pairs: it passes what is right, and names what is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from damaged_bundle import copied, relabelled, sealed, tap_shifted, weight_changed
from dflash_deploy.bundle.errors import BundleError, PairError, ProviderError, RequestError, UserError
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.bundle.tuned import ALONE, DRAFT_ALONE, TOGETHER
from dflash_deploy.exporter.checkpoint import checkpoint_from_source
from dflash_deploy.exporter.parity import originals
from dflash_deploy.exporter.parity.report import ParityReport
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.exporter.parity.sources import sources_from_manifest
from tiny_bundles import NAMES, TinyBundle

PROMPTS = ["Why is the sky blue?", "Name three rivers."]
Bundles = Callable[[str], TinyBundle]


def report_of(pair: TinyBundle, bundle: Path | None = None, prompts: list[str] | None = None) -> ParityReport:
    return parity_report(
        bundle or pair.bundle, str(pair.target), str(pair.draft), prompts or PROMPTS, new_tokens=16
    )


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_a_right_bundle_passes_and_is_only_read(tiny_bundle: Bundles, name: str) -> None:
    pair = tiny_bundle(name)
    before = digest(pair.bundle)
    report = report_of(pair)
    assert report.passed, "\n".join(report.lines())
    assert digest(pair.bundle) == before
    assert report.lines()[-1] == f"PASS: {len(report.stages)} stages"
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] is True
    assert data["provider"] == "CPUExecutionProvider"
    assert all(stage["samples"] > 0 for stage in data["stages"])
    assert all(stage["tolerance"]["why"] for stage in data["stages"])


def test_a_tuned_graph_with_other_bits_is_named(tiny_bundle: Bundles, tmp_path: Path) -> None:
    pair = tiny_bundle("dflash2-grouped")
    bundle = copied(pair.bundle, tmp_path / "bundle")
    manifest = manifest_from_bundle(bundle)
    assert list(manifest.tuned) == [ALONE, TOGETHER, DRAFT_ALONE]
    path = bundle / manifest.tuned[TOGETHER].file
    model = ir.load(path)
    node = next(node for node in model.graph if node.op_type == "FusedMatMul")
    node.attributes["alpha"] = ir.AttrFloat32("alpha", node.attributes["alpha"].as_float() * (1 + 1e-6))
    ir.save(model, path)
    report = report_of(pair, sealed(bundle))
    assert [stage.name for stage in report.stages if not stage.passed] == ["tuned.cpu-batch"]


def test_stages_stand_in_the_order_data_flows(tiny_bundle: Bundles) -> None:
    names = [stage.name for stage in report_of(tiny_bundle("dflash2")).stages]
    assert names == [
        "manifest",
        *("target.tap.0", "target.tap.1", "target.tap.2", "target.logits", "target.greedy_ids"),
        "tuned.cpu",
        *("draft.context", "conv", "draft.layer.0", "draft.layer.1", "draft.hidden", "draft.logits"),
        *("selector.candidates", "selector.scores", "selector.proposals"),
        *("draft.candidates", "draft.scores", "draft.proposals"),
        "tuned.draft.cpu",
        *("generation.plain", "generation.speculative", "generation.rounds"),
    ]


@pytest.mark.parametrize(("index", "tap"), [(0, 2), (1, 0), (2, 1)])
def test_a_tap_shifted_by_a_layer_is_named(
    tiny_bundle: Bundles, tmp_path: Path, index: int, tap: int
) -> None:
    pair = tiny_bundle("dflash2")
    report = report_of(pair, tap_shifted(copied(pair.bundle, tmp_path / "bundle"), index))
    assert not report.passed
    bad = [stage.name for stage in report.stages if stage.name.startswith("target.") and not stage.passed]
    assert bad == [f"target.tap.{tap}"]
    assert report.first_bad_stage is not None
    assert f"tap {tap} matches the output of layer {tap + 1}" in report.first_bad_stage.reasons[0]
    assert f"target.tap.{tap}: tap {tap} matches the output of layer {tap + 1}" in report.lines()[-1]


@pytest.mark.parametrize(
    ("graph", "weight", "first_bad"),
    [
        ("target", "target.layers.0.self_attn.k_proj.weight", "target.tap.0"),
        ("target", "target.layers.2.mlp.down_proj.weight", "target.tap.2"),
        ("target", "target.norm.weight", "target.logits"),
        ("draft", "draft.fc.weight", "draft.context"),
        ("draft", "draft.layers.0.mlp_conv.base_kernel", "draft.layer.0"),
        ("draft", "draft.layers.1.self_attn.v_proj.weight", "draft.layer.1"),
        ("draft", "draft.norm.weight", "draft.hidden"),
        ("draft", "draft.candidate_selector.successor_codebook", "selector.scores"),
    ],
)
def test_a_corrupted_weight_is_found_where_data_reaches_it_first(
    tiny_bundle: Bundles, tmp_path: Path, graph: str, weight: str, first_bad: str
) -> None:
    pair = tiny_bundle("dflash2")

    def change(values: np.ndarray) -> None:
        values.reshape(-1)[::3] *= 1.02

    report = report_of(pair, weight_changed(copied(pair.bundle, tmp_path / "bundle"), graph, weight, change))
    assert report.first_bad_stage is not None
    assert report.first_bad_stage.name == first_bad, "\n".join(report.lines())


def test_nan_in_the_bundle_fails(tiny_bundle: Bundles, tmp_path: Path) -> None:
    pair = tiny_bundle("dflash2")

    def change(values: np.ndarray) -> None:
        values[0] = np.nan

    broken = weight_changed(copied(pair.bundle, tmp_path / "bundle"), "draft", "draft.norm.weight", change)
    report = report_of(pair, broken)
    bad = report.first_bad_stage
    assert bad is not None
    assert (bad.name, bad.finite_original, bad.finite_bundle) == ("draft.hidden", True, False)
    json.dumps(report.to_dict(), allow_nan=False)


def test_nan_on_both_sides_fails(
    tiny_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny_bundle("dflash2")

    def change(values: np.ndarray) -> None:
        values[0] = np.nan

    broken = weight_changed(copied(pair.bundle, tmp_path / "bundle"), "draft", "draft.norm.weight", change)
    load = originals.draft_original

    def poisoned(*args: Any) -> Any:
        draft = load(*args)
        draft._model.norm.weight.data[0] = float("nan")  # type: ignore[attr-defined]
        return draft

    monkeypatch.setattr("dflash_deploy.exporter.parity.run.draft_original", poisoned)
    report = report_of(pair, broken)
    bad = {stage.name: stage for stage in report.stages if not stage.passed}
    assert not bad["draft.hidden"].finite_original
    assert not bad["draft.hidden"].finite_bundle
    assert {"draft.logits", "draft.scores", "selector.scores"} <= set(bad)
    json.dumps(report.to_dict(), allow_nan=False)


def test_float16_passes_with_a_residual_beyond_float16(tiny_bundle: Bundles) -> None:
    pair = tiny_bundle("dflash2-float16")
    target = originals.TargetOriginal(checkpoint_from_source(str(pair.target)))
    draft = originals.draft_original(checkpoint_from_source(str(pair.draft)), target)
    run = draft.run(target.run([5, 6, 7, 8]).features(draft.taps), originals.Question(4, 9, draft.block_size))
    assert float(np.abs(run.layers[0]).max()) > 1e5, "float16 ends at 65504"
    stages = {stage.name: stage for stage in report_of(pair).stages}
    for name in ("draft.layer.0", "draft.logits", "draft.scores", "draft.proposals"):
        assert stages[name].passed, stages[name].reasons
        assert stages[name].finite_bundle


def test_damage_that_a_hash_shows_is_refused(tiny_bundle: Bundles, tmp_path: Path) -> None:
    pair = tiny_bundle("dflash2")
    broken = copied(pair.bundle, tmp_path / "bundle")
    data = bytearray((broken / "weights.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (broken / "weights.bin").write_bytes(data)
    with pytest.raises(BundleError, match=r"weights\.bin: got SHA-256"):
        report_of(pair, broken)


def test_a_manifest_that_says_otherwise_fails(tiny_bundle: Bundles, tmp_path: Path) -> None:
    pair = tiny_bundle("dflash2")
    broken = copied(pair.bundle, tmp_path / "bundle")
    draft = manifest_from_bundle(broken).draft
    sealed(broken, draft=dataclasses.replace(draft, taps=(0, 2, 1)))
    bad = report_of(pair, broken).first_bad_stage
    assert bad is not None
    assert (bad.name, bad.reasons) == ("manifest", ("draft.taps: got (0, 2, 1), expected (2, 0, 1)",))


def test_bfloat16_is_refused_with_the_provider_named(tiny_bundle: Bundles, tmp_path: Path) -> None:
    pair = tiny_bundle("dflash2")
    other = relabelled(copied(pair.bundle, tmp_path / "bundle"), DType.BFLOAT16)
    with pytest.raises(ProviderError, match=r"CPUExecutionProvider: computes no bfloat16.*--dtype float32"):
        report_of(pair, other)


def test_other_checkpoints_are_refused_with_both_hashes(tiny_bundle: Bundles) -> None:
    pair, other = tiny_bundle("dflash2"), tiny_bundle("dflash")
    with pytest.raises(PairError, match=r"target target: .*got SHA-256 \w{64} .*expected SHA-256 \w{64}"):
        parity_report(pair.bundle, str(other.target), str(pair.draft), PROMPTS)
    with pytest.raises(PairError, match=r"draft draft: .*got SHA-256 \w{64} .*expected SHA-256 \w{64}"):
        parity_report(pair.bundle, str(pair.target), str(other.draft), PROMPTS)


def test_sources_are_found_by_name_only_if_their_hashes_agree(
    tiny_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, other = tiny_bundle("dflash2"), tiny_bundle("dflash")
    manifest = manifest_from_bundle(pair.bundle)
    monkeypatch.chdir(pair.target.parent)
    found = sources_from_manifest(manifest)
    assert [checkpoint.name for checkpoint in found] == ["target", "draft"]
    monkeypatch.chdir(other.target.parent)
    with pytest.raises(UserError, match=r"(?s)say where it is with --target\n.*got SHA-256"):
        sources_from_manifest(manifest)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'target', which was not found; say where it is with --target"):
        sources_from_manifest(manifest)


def test_a_missing_original_says_what_to_install() -> None:
    with pytest.raises(ProviderError, match=r"pip install --no-deps dflash==0\.1\.0"):
        originals.import_original("dflash_that_is_not_there", "dflash==0.1.0")


def test_no_prompt_is_refused(tiny_bundle: Bundles) -> None:
    pair = tiny_bundle("dflash2")
    with pytest.raises(RequestError, match="prompts: got none"):
        parity_report(pair.bundle, str(pair.target), str(pair.draft), [])
    with pytest.raises(RequestError, match="gives no tokens"):
        report_of(pair, prompts=[""])
    with pytest.raises(RequestError, match="new_tokens"):
        parity_report(pair.bundle, str(pair.target), str(pair.draft), PROMPTS, new_tokens=1)


def test_a_long_prompt_is_cut_to_what_the_bundle_holds(tiny_bundle: Bundles) -> None:
    assert report_of(tiny_bundle("dflash2"), prompts=["word " * 200]).passed


@pytest.mark.slow
def test_the_demo_pair_passes_from_the_sources_it_names(demo_bundle: Path, tmp_path: Path) -> None:
    from dflash_deploy.demo import demo_prompts

    report = parity_report(demo_bundle, None, None, demo_prompts(), most_prompts=2)
    assert report.passed, "\n".join(report.lines())
    agreement = {stage.name: stage.agreement for stage in report.stages}
    assert agreement["generation.plain"] == agreement["generation.speculative"] == 1.0
    assert agreement["generation.rounds"] == 1.0
    shifted = tap_shifted(copied(demo_bundle, tmp_path / "bundle"), 2)
    bad = parity_report(shifted, None, None, demo_prompts(), most_prompts=1, new_tokens=4).first_bad_stage
    assert bad is not None
    assert bad.reasons[0].startswith("tap 14 matches the output of layer 15")
