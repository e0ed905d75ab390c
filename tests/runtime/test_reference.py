"""The real pair against z-lab's own loop: tokens and acceptance lengths, round by round."""

import json
from pathlib import Path

import pytest

from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode

REFERENCE = Path(__file__).parents[2] / "demo" / "reference.json"


@pytest.fixture(scope="module")
def decoder(demo_bundle):
    with Decoder.open(demo_bundle, verify_rows=8) as decoder:  # every proposal, as z-lab's loop
        yield decoder


def reference(count):
    return json.loads(REFERENCE.read_text(encoding="utf-8"))["prompts"][:count]


def check(decoder, case, tokens, with_plain):
    """Compare a generation of at most `tokens` tokens with the reference's, cut at as many."""
    prompt = decoder.codec.encode_prompt(case["prompt"], chat=True)
    assert prompt == case["prompt_ids"]
    expected = case["greedy_ids"][:tokens]
    got = decoder.generate(prompt, tokens)
    assert list(got.ids) == expected, f"{case['prompt']!r}: token {first_difference(got.ids, expected)}"
    assert got.stats.draft_failures == 0
    lengths = list(got.stats.acceptance_lengths)
    if tokens == 128:
        assert lengths == case["acceptance_lengths"]
    else:  # blocks are cut to the budget near its end, so the last rounds may differ
        kept = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) + 8 < tokens]
        assert kept == case["acceptance_lengths"][: len(kept)]
        assert sum(kept) >= 12
    assert got.stats.other_share < 0.2
    if with_plain:
        assert list(decoder.generate(prompt, tokens, mode=Mode.PLAIN).ids) == expected


def first_difference(some, others):
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


@pytest.mark.parametrize("number", [0, 3, 7])
def test_some_prompts(decoder, number):
    check(decoder, reference(20)[number], 32, with_plain=number == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_every_prompt(decoder, number):
    check(decoder, reference(20)[number], 128, with_plain=True)


@pytest.mark.slow
def test_the_mean_acceptance_length_is_the_references(decoder):
    whole = json.loads(REFERENCE.read_text(encoding="utf-8"))
    stats = [decoder.generate(case["prompt_ids"], 128).stats for case in whole["prompts"]]
    rounds = sum(s.rounds for s in stats)
    assert rounds == whole["rounds"]
    assert sum(sum(s.acceptance_lengths) for s in stats) / rounds == pytest.approx(whole["acceptance_length"])
