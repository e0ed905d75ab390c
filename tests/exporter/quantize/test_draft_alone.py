"""A rounded draft beside a target in float32, whose numbers stay, and so do the tokens."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.errors import BundleError, ProviderError, RequestError, UnsupportedError
from dflash_deploy.bundle.manifest import INT8, manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, DRAFT_LOGITS, PROPOSALS, TARGET
from dflash_deploy.cli import cli
from dflash_deploy.exporter.engines.options import BuildOptions
from dflash_deploy.exporter.engines.plan import plan_engines
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.exporter.quantize.bundle import FLOAT_BITS, quantize_bundle
from dflash_deploy.runtime import ort_engine
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.inspect_bundle import describe_bundle, description_lines
from dflash_deploy.runtime.stats import Mode
from tiny_bundles import TARGET as TINY
from tiny_bundles import drafted

VOCABULARY = TINY["vocab_size"]
IDS = np.random.default_rng(5).integers(0, VOCABULARY, 512).tolist()
KEPT = 40


VOCABULARIES = {"dflash2": None, "speculators2": KEPT}
"""Of the rounded drafts; both ways are the same code for either format."""


@pytest.fixture(scope="module", params=VOCABULARIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pair(name, tiny_bundle):
    return tiny_bundle(name)


@pytest.fixture(scope="module")
def rounded(name, pair, tmp_path_factory):
    output = tmp_path_factory.mktemp("rounded") / "bundle"
    kept = VOCABULARIES[name]
    quantize_bundle(pair.bundle, output, IDS, bits=FLOAT_BITS, draft_bits=8, draft_vocabulary=kept)
    return output


def test_the_target_is_untouched_and_tokens_are_those_of_the_float32_bundle(pair, rounded):
    before, after = manifest_from_bundle(pair.bundle), manifest_from_bundle(rounded)
    assert after.quantization is None
    assert not after.is_rounded(TARGET)
    assert INT8 in after.graphs[DRAFT].passes
    assert INT8 in after.tuned["draft.cpu"].passes
    assert after.graphs[TARGET].passes == before.graphs[TARGET].passes
    assert (rounded / after.graphs[TARGET].file).stat().st_size > 0
    random = np.random.default_rng(6)
    with (
        Decoder.open(pair.bundle, threads=1) as plain,
        Decoder.open(rounded, threads=1, verify_rows=4) as fast,
    ):
        for _ in range(4):
            prompt = random.integers(0, VOCABULARY, 20).tolist()
            expected = plain.generate(prompt, 50, mode=Mode.PLAIN, stop_token_ids=[]).ids
            assert fast.generate(prompt, 50, mode=Mode.PLAIN, stop_token_ids=[]).ids == expected
            speculative = fast.generate(prompt, 50, stop_token_ids=[])
            assert speculative.ids == expected
            assert speculative.stats.draft_failures == 0
            assert sum(speculative.stats.proposed) > 0


def test_the_draft_is_close_to_the_one_before(pair, tmp_path):
    assert manifest_from_bundle(pair.bundle).tokenizer.file is None  # no text is needed
    quantize_bundle(pair.bundle, tmp_path / "bundle", bits=FLOAT_BITS, draft_bits=8)
    operators = {n.op_type for n in onnx.load(tmp_path / "bundle" / "draft.onnx").graph.node}
    assert "MatMulIntegerToFloat" in operators
    manifest = manifest_from_bundle(pair.bundle)
    logits = DRAFT_LOGITS if manifest.draft.selector is None else "stage.logits"
    same = []
    for seed in range(6):
        whole, found = drafted(pair.bundle, seed), drafted(tmp_path / "bundle", seed)
        size = np.abs(whole[logits]).max()
        assert 0 < np.abs(found[logits] - whole[logits]).max() < 0.1 * size
        same.append(found[PROPOSALS] == whole[PROPOSALS])
    assert np.mean(same) > 0.5


def test_what_it_is_not_for(pair, rounded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ort_engine, "check_provider", lambda *_: None)  # as if CUDA were there
        with pytest.raises(ProviderError, match="int8 and int4 weights are for the CPU"):
            Decoder.open(rounded, provider="cuda")
    with pytest.raises(ProviderError, match="runs no int8 or int4 weights"):
        plan_engines(
            rounded, manifest_from_bundle(rounded), "tensorrt-rtx", ("8.9",), (TARGET,), BuildOptions()
        )
    with pytest.raises(
        UnsupportedError, match=r"draft's weights are rounded to integers.*its target is that"
    ):
        parity_report(rounded, str(pair.target), str(pair.draft), ["x"])
    with pytest.raises(BundleError, match="this bundle is quantised already"):
        quantize_bundle(rounded, tmp_path / "again", IDS)
    for options, words in (
        ({"bits": 8, "draft_bits": FLOAT_BITS}, "draft_bits: got 32, expected 8 beside a target of 8"),
        ({"bits": FLOAT_BITS, "draft_bits": 4}, "draft_bits: got 4, expected 8 or 32 beside a target of 32"),
        ({"bits": FLOAT_BITS, "draft_bits": FLOAT_BITS}, "bits: got 32, expected 8 or 4"),
    ):
        with pytest.raises(RequestError, match=words):
            quantize_bundle(pair.bundle, tmp_path / "again", IDS, **options)
    assert list(tmp_path.iterdir()) == []


def test_inspect_says_so(rounded):
    described = describe_bundle(rounded)
    assert described["draft"]["rounded"] is True
    assert described["quantization"] is None
    assert any(line.startswith("draft weights") and "int8" in line for line in description_lines(described))


@pytest.mark.slow
def test_the_demo_pair(demo_bundle, tmp_path):
    """The command: float32's own tokens, and about as many proposals stand as with the draft in float32."""
    from dflash_deploy.demo import demo_prompts

    output = tmp_path / "bundle"
    command = ["quantize", str(demo_bundle), "--output", str(output), "--bits", "32", "--draft-bits", "8"]
    run = CliRunner().invoke(cli, command)
    assert run.exit_code == 0, run.output
    rounds = {demo_bundle: 0, output: 0}
    tokens = []
    for bundle in rounds:
        with Decoder.open(bundle, verify_rows=4) as decoder:
            answers = [decoder.generate(prompt, 64) for prompt in demo_prompts()]
        rounds[bundle] = sum(answer.stats.rounds for answer in answers)
        tokens.append([answer.ids for answer in answers])
    assert tokens[0] == tokens[1]
    assert rounds[output] < 1.03 * rounds[demo_bundle]
