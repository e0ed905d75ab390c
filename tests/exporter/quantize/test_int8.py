"""Int8 bundles: rows by themselves, the same tokens with and without a draft, and a check of the quality."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.errors import (
    BundleError,
    OutputError,
    ProviderError,
    RequestError,
    UnsupportedError,
)
from dflash_deploy.bundle.manifest import ProposalLaw, Verify, check_manifest, manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.cli import cli
from dflash_deploy.exporter.bundle_graphs import TargetGraph
from dflash_deploy.exporter.engines.options import BuildOptions
from dflash_deploy.exporter.engines.plan import plan_engines
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.exporter.progress import NullProgress
from dflash_deploy.exporter.quantize.bundle import export_quantized, quantize_bundle
from dflash_deploy.exporter.quantize.int8 import quantised
from dflash_deploy.exporter.quantize.measure import WINDOW, windows
from dflash_deploy.exporter.quantize.smooth import smoothing_factors
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.inspect_bundle import describe_bundle, description_lines
from dflash_deploy.runtime.stats import Mode
from tiny_bundles import TARGET as TINY

IDS = np.random.default_rng(5).integers(0, TINY["vocab_size"], 4 * WINDOW).tolist()
LOOSE = 1.2  # random weights have no outliers to smooth, and little to say


@pytest.fixture(scope="module")
def pair(tiny_bundle):
    return tiny_bundle("dflash2")


@pytest.fixture(scope="module")
def rounded(pair, tmp_path_factory):
    output = tmp_path_factory.mktemp("int8") / "bundle"
    quantize_bundle(pair.bundle, output, IDS, LOOSE)
    return output


def test_weights_are_rounded_to_half_a_step():
    weight = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    weight[3] = 0.0
    steps, scales = quantised(weight)
    assert (steps.dtype, steps.shape, scales.shape) == (np.int8, (7, 5), (5,))
    assert np.abs(steps).max() == 127
    assert np.abs(steps.T * scales[:, None] - weight).max() <= scales.max() / 2 * 1.0001
    assert not steps[:, 3].any()


def test_factors_even_channels_out_and_round_nothing():
    activations = np.array([1.0, 64.0, 0.0], np.float32)
    weight = np.ones((4, 3), np.float32)
    factors = smoothing_factors(activations, [weight])
    assert (np.exp2(np.rint(np.log2(factors))) == factors).all()
    assert factors[1] == 8 * factors[0]  # the square root: half goes to the weights


def test_windows_go_in_turn_to_calibration_and_check():
    calibration, check = windows(range(3 * WINDOW + 10))
    assert [w[0] for w in calibration] == [0, 2 * WINDOW]
    assert [w[0] for w in check] == [WINDOW]


def test_every_known_product_is_rounded_and_nothing_else(pair, rounded):
    for name in (TARGET, DRAFT):
        before, after = (
            onnx.load(folder / f"{name}.onnx", load_external_data=False).graph
            for folder in (pair.bundle, rounded)
        )
        products = [n for n in after.node if n.op_type == "MatMulIntegerToFloat"]
        # q+k+v, o, gate+up and down of each layer; the head; the keys and values of the draft's context.
        assert len(products) == (4 * 4 + 1 if name == TARGET else 4 * 2 + 1 + 1)
        floats = {n.input[1] for n in after.node if n.op_type == "Gemm"}
        assert not any(re.search(r"(mlp|self_attn)\.\w+_proj|embed", weight) for weight in floats)
        assert len(before.input) == len(after.input)
        assert [o.name for o in before.output] == [o.name for o in after.output]
    for name in ("conv", "selector"):
        before, after = (onnx.load(folder / f"{name}.onnx") for folder in (pair.bundle, rounded))
        assert [n.op_type for n in before.graph.node] == [n.op_type for n in after.graph.node]
    # A matrix that is head and embedding in both graphs is there once, in one byte a number.
    sizes = TINY["vocab_size"] * TINY["hidden_size"]
    files = json.loads((rounded / "manifest.json").read_text())["files"]
    old = json.loads((pair.bundle / "manifest.json").read_text())["files"]
    assert files["weights.bin"]["bytes"] < old["weights.bin"]["bytes"]
    assert sizes < files["weights.bin"]["bytes"]


def test_a_row_is_the_same_bits_in_any_company(rounded):
    graph = TargetGraph(rounded, manifest_from_bundle(rounded, Verify.SIZES))
    ids = np.array(IDS[:40])
    graph.reset(64)
    whole = graph.run(ids[None], 0, wanted=["logits"])["logits"][0]
    for rows in (2, 3, 5, 8):
        graph.reset(64)
        parts = [
            graph.run(ids[None, begin : begin + rows], begin, kv=64, wanted=["logits"])["logits"][0]
            for begin in range(0, len(ids) - rows + 1, rows)
        ]
        got = np.concatenate(parts)
        np.testing.assert_array_equal(got, whole[: len(got)])


def test_int8_speculative_equals_int8_plain(rounded):
    with Decoder.open(rounded, threads=1, verify_rows=8) as decoder:
        for begin in range(0, 120, 20):
            prompt = IDS[begin : begin + 20]
            plain = decoder.generate(prompt, 60, mode=Mode.PLAIN, stop_token_ids=[])
            speculative = decoder.generate(prompt, 60, stop_token_ids=[])
            assert speculative.ids == plain.ids
            assert speculative.stats.draft_failures == 0
            assert sum(speculative.stats.proposed) > 0


def test_logits_stay_near_those_of_float32(pair, rounded):
    ids = np.array([IDS[:60]])
    got = {}
    for folder in (pair.bundle, rounded):
        graph = TargetGraph(folder, manifest_from_bundle(folder, Verify.SIZES))
        graph.reset(64)
        got[folder] = graph.run(ids, 0, wanted=["logits", "features"])
    for name in ("logits", "features"):
        before, after = got[pair.bundle][name], got[rounded][name]
        error = np.abs(after - before).mean() / before.std()
        assert 0 < error < 0.05, name


def test_the_manifest_says_what_was_done(pair, rounded):
    before = manifest_from_bundle(pair.bundle, Verify.HASHES)
    after = manifest_from_bundle(rounded, Verify.HASHES)
    assert before.quantization is None
    found = after.quantization
    assert 0.8 < found.perplexity_ratio < LOOSE
    assert 0.5 < found.greedy_agreement <= 1.0
    assert found.tokens == 2 * (WINDOW - 1)
    assert after.graphs[TARGET].passes[-2:] == ("smooth", "int8")
    assert after.draft == before.draft
    lines = "\n".join(description_lines(describe_bundle(rounded)))
    assert f"perplexity {found.perplexity_ratio:.4f} x that of float32" in lines
    assert "int8 weights" in lines
    # The same input gives the same bundle.
    again = rounded.parent / "again"
    quantize_bundle(pair.bundle, again, IDS, LOOSE)
    assert manifest_from_bundle(again, Verify.HASHES) == after


def test_too_bad_a_result_is_refused_and_nothing_is_lost(pair, tmp_path):
    output = tmp_path / "bundle"
    quantize_bundle(pair.bundle, output, IDS, LOOSE)
    kept = (output / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match=r"perplexity: got '.* x that of float32', expected at most 0.5"):
        quantize_bundle(pair.bundle, output, IDS, 0.5)
    assert (output / "manifest.json").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_place_that_cannot_be_written_is_refused_before_any_work(pair, tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        seen = Stages()
        with pytest.raises(OutputError, match="cannot write beside"):
            quantize_bundle(pair.bundle, output, IDS, LOOSE, seen)
        with pytest.raises(OutputError, match="cannot write beside"):
            export_quantized(str(pair.target), str(pair.draft), output, progress=seen)
        assert seen.names == []


class Stages(NullProgress):
    """Remembers which stages began."""

    def __init__(self):
        self.names = []

    def stage(self, name, total_bytes=None):
        self.names.append(name)
        return super().stage(name, total_bytes)


def test_what_cannot_be_quantised_is_refused(pair, rounded, tmp_path):
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="quantised already"):
        quantize_bundle(rounded, output, IDS)
    with pytest.raises(RequestError, match="text: got '3 tokens', expected >= 256"):
        quantize_bundle(pair.bundle, output, [1, 2, 3])
    with pytest.raises(RequestError, match="token id"):
        quantize_bundle(pair.bundle, output, [*IDS, 10_000])
    with pytest.raises(RequestError, match="no tokenizer"):
        quantize_bundle(pair.bundle, output, "some text")
    assert not output.exists()


def test_an_edited_manifest_is_noticed(pair, rounded):
    """What a hand may change of the rounding and of what a draft can be drawn from."""
    after = manifest_from_bundle(rounded, Verify.SIZES)
    before = manifest_from_bundle(pair.bundle, Verify.SIZES)
    with pytest.raises(BundleError, match="quantization: got None, expected a description"):
        check_manifest(replace(after, quantization=None))
    with pytest.raises(BundleError, match=r"quantization: got 'int8 .*, expected none"):
        check_manifest(replace(before, quantization=after.quantization))
    for name, value in (
        ("perplexity_ratio", float("nan")),
        ("perplexity_ratio", -1.0),
        ("greedy_agreement", 7.0),
    ):
        with pytest.raises(BundleError, match=f"quantization.{name}: got"):
            check_manifest(replace(after, quantization=replace(after.quantization, **{name: value})))
    with pytest.raises(BundleError, match="proposal_law: got 'rows', expected one of candidates, fixed"):
        check_manifest(replace(after, draft=replace(after.draft, proposal_law=ProposalLaw.ROWS)))


def test_where_an_int8_bundle_does_not_run_is_said(rounded):
    manifest = manifest_from_bundle(rounded, Verify.SIZES)
    with pytest.raises(UnsupportedError, match=r"bundle's weights are rounded to integers.*inspect"):
        parity_report(rounded, None, None, ["hello"])
    with pytest.raises(ProviderError, match="runs no int8 or int4 weights"):
        plan_engines(rounded, manifest, "tensorrt-rtx", ["8.9"], (), BuildOptions())


def test_command(pair, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("too short", encoding="utf-8")
    run = CliRunner().invoke(
        cli, ["quantize", str(pair.bundle), "--output", str(tmp_path / "b"), "--text", str(text)]
    )
    assert run.exit_code == 2
    assert "no tokenizer" in run.output
    run = CliRunner().invoke(
        cli,
        [
            "export",
            "--target",
            "t",
            "--draft",
            "d",
            "--output",
            "o",
            "--quantize",
            "int8",
            "--dtype",
            "float16",
        ],
    )
    assert run.exit_code == 2
    assert "--quantize int8 rounds float32 weights" in run.output


@pytest.mark.slow
def test_the_demo_pair_in_int8(demo_bundle, tmp_path):
    """5,000 tokens: the same with and without the draft; the perplexity is within 2 %."""
    manifest = quantize_bundle(demo_bundle, tmp_path / "int8")
    assert manifest.quantization.perplexity_ratio < 1.02
    prompts = (Path(__file__).parents[3] / "demo" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    tokens = 0
    with Decoder.open(tmp_path / "int8", verify_rows=4) as decoder:
        for prompt in prompts:
            plain = decoder.generate(prompt, 256, mode=Mode.PLAIN, stop_token_ids=[])
            speculative = decoder.generate(prompt, 256, stop_token_ids=[])
            assert speculative.ids == plain.ids
            assert speculative.stats.acceptance_length > 1.3
            tokens += len(plain.ids)
    assert tokens >= 5000


def test_the_check_sees_a_damaged_weight(pair, tmp_path, monkeypatch):
    """Rounding far too coarsely must be found."""
    from dflash_deploy.exporter.quantize import rounding as module

    def coarse(graph, group, weights, place):
        replace_group(graph, group, [np.sign(weight) * np.abs(weight).max() for weight in weights], place)

    replace_group = module.replace_group
    monkeypatch.setattr(module, "replace_group", coarse)
    with pytest.raises(OutputError, match="perplexity"):
        quantize_bundle(pair.bundle, tmp_path / "bundle", IDS, LOOSE)


def test_weights_with_a_second_name_are_refused_before_the_work(pair, tmp_path):
    """onnx_ir reads no such file."""
    bundle = tmp_path / "bundle"
    shutil.copytree(pair.bundle, bundle)
    os.link(bundle / "weights.bin", tmp_path / "second")
    with pytest.raises(BundleError, match=r"weights.bin: got a file with 2 hard links, expected 1; copy"):
        quantize_bundle(bundle, tmp_path / "int8", IDS, LOOSE)
    assert not (tmp_path / "int8").exists()
