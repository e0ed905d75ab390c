"""A draft that proposes among fewer tokens: the same text, ids of the target, and what the manifest says."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from dflash_deploy.bundle.errors import RequestError, UnsupportedError
from dflash_deploy.bundle.manifest import (
    DRAFT_VOCABULARY,
    ProposalLaw,
    manifest_alone,
    manifest_from_bundle,
)
from dflash_deploy.bundle.tensors import (
    ANCHOR_IDS,
    CANDIDATES,
    DRAFT,
    DRAFT_LOGITS,
    HIDDEN,
    PROPOSALS,
    SELECTOR,
    TARGET,
    UNARY_LOGITS,
)
from dflash_deploy.cli import cli
from dflash_deploy.exporter.bundle_graphs import BundleGraph, TargetGraph
from dflash_deploy.exporter.parity.run import parity_report
from dflash_deploy.exporter.quantize.bundle import FLOAT_BITS, quantize_bundle
from dflash_deploy.exporter.quantize.draft_vocabulary import likeliest
from dflash_deploy.exporter.quantize.measure import cut, expected_counts
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.inspect_bundle import describe_bundle, description_lines
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.stats import Mode
from tiny_bundles import ANCHOR, drafted
from tiny_bundles import TARGET as TINY

VOCABULARY = TINY["vocab_size"]
IDS = np.random.default_rng(5).integers(0, VOCABULARY, 512).tolist()
KEPT = 40
LOOSE = 3.0  # of perplexity: random weights


@pytest.fixture(scope="module", params=["dflash2", "dflash", "speculators2"])
def pair(request, tiny_bundle):
    return tiny_bundle(request.param)


@pytest.fixture(scope="module", params=[FLOAT_BITS, 8])
def reduced(request, pair, tmp_path_factory):
    output = tmp_path_factory.mktemp("reduced") / "bundle"
    quantize_bundle(pair.bundle, output, IDS, LOOSE, bits=request.param, draft_vocabulary=KEPT)
    return output


def test_plain_and_speculative_tokens_are_the_same(reduced):
    random = np.random.default_rng(6)
    with Decoder.open(reduced, threads=1, verify_rows=4) as decoder:
        for _ in range(4):
            prompt = random.integers(0, VOCABULARY, 20).tolist()
            plain = decoder.generate(prompt, 50, mode=Mode.PLAIN, stop_token_ids=[])
            speculative = decoder.generate(prompt, 50, stop_token_ids=[])
            assert speculative.ids == plain.ids
            assert speculative.stats.draft_failures == 0
            assert sum(speculative.stats.proposed) > 0


def test_proposals_are_target_ids_of_those_kept(pair, reduced):
    kept = set(likeliest(pair.bundle, manifest_from_bundle(pair.bundle), cut(IDS), KEPT).tolist())
    seen = set()
    for seed in range(12):
        found = drafted(reduced, seed)
        seen |= set(found[PROPOSALS].ravel().tolist()) | set(
            found.get(CANDIDATES, np.zeros(0)).ravel().tolist()
        )
    assert seen <= kept
    assert max(seen) >= KEPT  # ids of the draft would stay below


def test_the_logits_are_rows_of_the_whole_heads(pair, tmp_path):
    """In float32 the graph is the one before, seen through the list of ids: logits, and what wins."""
    quantize_bundle(pair.bundle, tmp_path / "bundle", IDS, bits=FLOAT_BITS, draft_vocabulary=KEPT)
    manifest = manifest_from_bundle(pair.bundle)
    kept = likeliest(pair.bundle, manifest, cut(IDS), KEPT)
    name = DRAFT_LOGITS if manifest.draft.selector is None else "stage.logits"
    for seed in range(4):
        whole, part = drafted(pair.bundle, seed), drafted(tmp_path / "bundle", seed)
        logits = whole[name][..., kept]
        np.testing.assert_allclose(part[name], logits, rtol=1e-5, atol=1e-6)
        if manifest.draft.selector is None:
            np.testing.assert_array_equal(part[PROPOSALS], kept[part[name].argmax(-1)])
        else:
            best = np.argsort(-part[name], axis=-1, kind="stable")[..., : manifest.draft.selector.top_k]
            np.testing.assert_array_equal(part[CANDIDATES], kept[best])


def test_the_selector_alone_gives_what_the_draft_gives(pair, tmp_path):
    manifest = manifest_from_bundle(pair.bundle)
    if manifest.draft.selector is None:
        assert SELECTOR not in manifest.graphs
        return
    output = tmp_path / "bundle"
    manifest = quantize_bundle(pair.bundle, output, IDS, bits=FLOAT_BITS, draft_vocabulary=KEPT)
    graph = BundleGraph(output, manifest.graphs[SELECTOR])
    found = drafted(output, 3)
    hidden = found["stage.hidden"].reshape(1, manifest.draft.proposals, -1)
    alone = graph.run({HIDDEN: hidden, UNARY_LOGITS: found["stage.logits"], ANCHOR_IDS: np.array([ANCHOR])})
    for name in (PROPOSALS, CANDIDATES):
        np.testing.assert_array_equal(alone[name], found[name])


def test_the_likeliest_are_those_said_and_expected(pair):
    manifest = manifest_from_bundle(pair.bundle)
    texts = [[7] * 64, [9] * 100]
    kept = likeliest(pair.bundle, manifest, texts, 8)
    assert kept.tolist() == sorted(set(kept.tolist()))
    counts = expected_counts(pair.bundle, manifest, texts)
    assert counts.sum() == pytest.approx(164, rel=1e-4)
    counts[7] += 64
    counts[9] += 100
    stops = set(manifest.stop_token_ids)
    assert {7, 9} | stops <= set(kept.tolist())
    others = sorted(set(range(VOCABULARY)) - stops, key=lambda token: -counts[token])
    assert set(kept.tolist()) - stops == set(others[: 8 - len(stops)])


def test_what_the_manifest_says(pair, reduced):
    before, after = manifest_from_bundle(pair.bundle), manifest_from_bundle(reduced)
    assert (before.draft.draft_vocab_size, after.draft.draft_vocab_size) == (VOCABULARY, KEPT)
    assert after.graphs[DRAFT].passes[0] == DRAFT_VOCABULARY
    assert DRAFT_VOCABULARY not in after.graphs[TARGET].passes
    laws = {ProposalLaw.ROWS: ProposalLaw.FIXED}
    law = before.draft.proposal_law
    assert after.draft.proposal_law is laws.get(law, law)
    model = onnx.load(reduced / "draft.onnx", load_external_data=False)
    computed = {name for node in model.graph.node for name in node.output}
    shapes = [v.type.tensor_type.shape.dim for v in model.graph.value_info if v.name in computed]
    assert shapes
    assert not any(shape[-1].dim_value == VOCABULARY for shape in shapes if shape)
    assert f"among {KEPT} of {VOCABULARY} tokens" in "\n".join(description_lines(describe_bundle(reduced)))
    if after.quantization is None:
        with pytest.raises(UnsupportedError, match=f"proposes among {KEPT} tokens"):
            parity_report(reduced, None, None, ["hello"])
        target = TargetGraph(reduced, after)
        target.reset(64)
        whole = TargetGraph(pair.bundle, before)
        whole.reset(64)
        for name, value in target.run(np.array([IDS[:20]]), 0).items():
            np.testing.assert_array_equal(value, whole.run(np.array([IDS[:20]]), 0)[name])


def test_sampled_tokens_come_from_the_targets_law(reduced):
    """Whatever the draft may propose, a very cold draw is the greedy choice."""
    prompt, cold = IDS[:20], Sampling(temperature=1e-4, seed=3)
    with Decoder.open(reduced, threads=1, verify_rows=4) as decoder:
        greedy = decoder.generate(prompt, 40, mode=Mode.PLAIN, stop_token_ids=[])
        drawn = decoder.generate(prompt, 40, stop_token_ids=[], sampling=cold)
    assert drawn.ids == greedy.ids


def test_what_is_not_possible_is_refused(pair, tmp_path):
    manifest = manifest_from_bundle(pair.bundle)
    least = 1 if manifest.draft.selector is None else manifest.draft.selector.top_k
    output = tmp_path / "bundle"
    for size in (least - 1, VOCABULARY):
        with pytest.raises(RequestError, match=f"draft_vocabulary: got {size}, expected {least} <= tokens"):
            quantize_bundle(pair.bundle, output, IDS, bits=FLOAT_BITS, draft_vocabulary=size)
    with pytest.raises(RequestError, match="bits: got 32, expected 8 or 4"):
        quantize_bundle(pair.bundle, output, IDS, bits=FLOAT_BITS)
    with pytest.raises(RequestError, match="vocabulary_text"):
        quantize_bundle(pair.bundle, output, IDS, vocabulary_text=IDS)
    quantize_bundle(pair.bundle, output, IDS, bits=FLOAT_BITS, draft_vocabulary=KEPT)
    with pytest.raises(UnsupportedError, match=f"proposes among {KEPT} tokens already"):
        quantize_bundle(output, tmp_path / "again", IDS, LOOSE, draft_vocabulary=20)
    assert not (tmp_path / "again").exists()
    # Rounding a reduced bundle is no different from doing both at once.
    both = quantize_bundle(pair.bundle, tmp_path / "both", IDS, LOOSE, draft_vocabulary=KEPT)
    after = quantize_bundle(output, tmp_path / "after", IDS, LOOSE)
    assert after.draft == both.draft
    assert after.graphs[DRAFT].passes == both.graphs[DRAFT].passes
    found = [drafted(tmp_path / name, 1)[PROPOSALS] for name in ("both", "after")]
    np.testing.assert_array_equal(*found)


def test_command(pair, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("too short", encoding="utf-8")
    base = ["quantize", str(pair.bundle), "--output", str(tmp_path / "b")]
    for options, said in (
        (["--bits", "32"], "--bits 32 leaves the target as it is: give --draft-bits 8 or --draft-voc"),
        (["--draft-vocabulary-text", str(text)], "say with --draft-vocabulary how many"),
        (["--bits", "32", "--draft-vocabulary", "40"], "no tokenizer"),
    ):
        run = CliRunner().invoke(cli, [*base, *options])
        assert run.exit_code == 2
        assert said in run.output


@pytest.mark.slow
def test_the_demo_pair_with_a_third_of_its_vocabulary(demo_bundle, tmp_path):
    """The command, with the demo's tokenizer: every token the same, most proposals still there."""
    from dflash_deploy.demo import demo_prompts

    text = tmp_path / "text.txt"
    text.write_text("The sky is blue because air scatters blue light more. " * 40, encoding="utf-8")
    output = tmp_path / "bundle"
    command = ["quantize", str(demo_bundle), "--output", str(output), "--draft-vocabulary", "16384"]
    run = CliRunner().invoke(cli, command)
    assert run.exit_code == 0, run.output
    assert manifest_alone(output).draft.draft_vocab_size == 16384
    rounds, tokens = 0, 0
    with Decoder.open(output, verify_rows=4) as decoder:
        for prompt in demo_prompts():
            plain = decoder.generate(prompt, 128, mode=Mode.PLAIN)
            speculative = decoder.generate(prompt, 128)
            assert plain.ids == speculative.ids
            rounds += speculative.stats.rounds
            tokens += len(speculative.ids)
    assert tokens / rounds > 1.8
    command = [*command, "--bits", "32", "--draft-vocabulary-text", str(text)]
    run = CliRunner().invoke(cli, command)
    assert run.exit_code == 0, run.output
    assert manifest_alone(output).quantization is None
