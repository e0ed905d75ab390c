"""The runtime's loop over simple bundles: no cache to roll back, the same tokens as plain decoding."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dflash_deploy.bundle.limits import PREFILL_ROWS
from dflash_deploy.bundle.manifest import Verify
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode
from toy_simple import BLOCK, MAX_LENGTH, VOCAB, target_states, toy_arrays


@pytest.fixture(scope="module")
def seed_decoder(seed_bundle):
    with Decoder.open(seed_bundle.path, threads=1, verify=Verify.SIZES) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def toy_decoder(toy_bundle):
    with Decoder.open(toy_bundle.path, threads=1, verify=Verify.SIZES) as decoder:
        yield decoder


def test_equals_the_seed_programs_vanilla_baseline(seed_decoder, seed_program):
    for prompt, expected in zip(seed_program["greedy.prompts"], seed_program["greedy.outputs"], strict=True):
        for mode in Mode:
            got = seed_decoder.generate(prompt.tolist(), len(expected), mode=mode)
            assert list(got.ids) == expected.tolist(), (mode, prompt)
            assert got.stats.draft_failures == 0


def test_a_prompt_in_several_parts(seed_decoder):
    prompt = np.random.default_rng(0).integers(0, 1000, PREFILL_ROWS + 70).tolist()
    speculative = seed_decoder.generate(prompt, 12)
    assert speculative.ids == seed_decoder.generate(prompt, 12, mode=Mode.PLAIN).ids
    assert speculative.ids == seed_decoder.generate(prompt[-1:], 12).ids, "only the last token counts"


def test_a_prompt_in_several_parts_keeps_its_draft(seed_decoder):
    assert seed_decoder.generate([3] * (PREFILL_ROWS + 70), 12).stats.draft_failures == 0


def chain(start: int, length: int) -> list[int]:
    """What the target says greedily, by arithmetic of its own."""
    greedy = target_states(toy_arrays()[0])[1].argmax(-1)
    out = []
    for _ in range(length):
        start = int(greedy[start])
        out.append(start)
    return out


def test_speculative_equals_plain_with_a_draft_that_is_sometimes_right(toy_decoder):
    every = toy_decoder.with_settings(verify_rows=BLOCK + 1)
    lengths = []
    for first in (0, 6, 13):
        for last in range(VOCAB):
            prompt = [first] * (last % 4) + [last]
            for count in (1, 2, BLOCK, 11):
                got = every.generate(prompt, count)
                assert list(got.ids) == chain(last, count)
                assert got.stats.draft_failures == 0
                lengths += got.stats.acceptance_lengths
            plain = toy_decoder.generate(prompt, 11, mode=Mode.PLAIN)
            assert got.ids == plain.ids
    assert {1, 2, BLOCK + 1} <= set(lengths), "none, some and all proposals were accepted"


def test_stops_and_limits(toy_decoder):
    whole = chain(4, 20)
    stop = whole[2]
    got = toy_decoder.generate([4], 20, stop_token_ids=[stop])
    assert list(got.ids) == whole[: whole.index(stop) + 1]
    full = toy_decoder.generate([4] * (MAX_LENGTH - 5), 99)
    assert list(full.ids) == chain(4, 5)
    narrow = toy_decoder.with_settings(verify_rows=2)
    assert list(narrow.generate([4], 20).ids) == whole


def test_the_manifest_says_what_it_is(seed_bundle):
    target, draft = seed_bundle.manifest.target, seed_bundle.manifest.draft
    assert (target.family, draft.family, draft.format) == ("simple", "simple", "dflash-deploy")
    assert (draft.first_proposal_row, draft.proposals, draft.taps) == (0, 8, (3,))
    assert target.cache.bytes(1, 1000) == draft.cache.bytes(1, 1000) == 0


def test_half_precision_runs(half_bundle, toy_bundle):
    every = np.arange(VOCAB)
    exact = toy_bundle.target_graph.run(every[None], 0)
    got = half_bundle.target_graph.run(every[None], 0)
    # Eleven bits: 5e-4 of each of two products' inputs; states and logits are up to 5 here.
    assert np.abs(got["features"] - exact["features"]).max() < 2e-2
    assert np.abs(got["logits"] - exact["logits"]).max() < 2e-2
    assert half_bundle.manifest.float32_parts
    with Decoder.open(half_bundle.path, threads=1, verify=Verify.SIZES) as decoder:
        for last in range(VOCAB):
            got = decoder.generate([last], 11)
            assert got.ids == decoder.generate([last], 11, mode=Mode.PLAIN).ids
            assert got.stats.draft_failures == 0


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_engines_build_without_a_cache(half_bundle, tmp_path):
    import shutil

    from dflash_deploy.exporter.engines.build import build_engines

    copy = tmp_path / "bundle"
    shutil.copytree(half_bundle.path, copy)
    manifest = build_engines(copy, "tensorrt-rtx", ("8.9",))
    assert {info.graph for info in manifest.engines.values()} == {"target", "draft"}
    assert all(manifest.files[info.file].bytes > 0 for info in manifest.engines.values())
