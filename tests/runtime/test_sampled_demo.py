"""Samples of the demo pair at temperature 0.8: with the draft they are as probable as without it."""

import math
from pathlib import Path
from statistics import mean, stdev

import pytest

from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.stats import Mode

PROMPTS = Path(__file__).parents[2] / "demo" / "prompts.txt"
SAMPLES, TOKENS, TEMPERATURE = 200, 24, 0.8


def logprobs(service: Service, prompts: list[str], mode: Mode) -> tuple[list[float], float]:
    """Mean log-probability a token of each sample, and tokens a round."""
    tickets = []
    for index in range(SAMPLES):
        # Both ways draw with other numbers: agreement must not come from equal texts.
        seed = 2 * index + (mode is Mode.PLAIN)
        sampling = Sampling(temperature=TEMPERATURE, seed=seed, logprobs=0)
        prompt = prompts[index % len(prompts)]
        tickets.append(
            service.submit(prompt, TOKENS, wait_s=900, mode=mode, sampling=sampling, stop_token_ids=[])
        )
    answers = [ticket.result() for ticket in tickets]
    rounds = sum(answer.stats.rounds for answer in answers)
    tokens = sum(answer.stats.new_tokens - 1 for answer in answers)
    return [mean(p.logprob for p in answer.logprobs) for answer in answers], tokens / rounds


@pytest.mark.slow
def test_samples_are_as_probable_with_the_draft(demo_bundle):
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    with Service.open(demo_bundle, ServiceSettings(max_requests=8, max_length=256, verify_rows=4)) as service:
        speculative, acceptance = logprobs(service, prompts, Mode.SPECULATIVE)
        plain, one = logprobs(service, prompts, Mode.PLAIN)
    assert one == 1.0
    assert acceptance > 1.2, "the draft does nothing here: this test proves little"
    error = math.sqrt((stdev(speculative) ** 2 + stdev(plain) ** 2) / SAMPLES)
    print(f"speculative {mean(speculative):.4f}, plain {mean(plain):.4f}, standard error {error:.4f}")
    print(f"acceptance length {acceptance:.3f}")
    assert abs(mean(speculative) - mean(plain)) < 3.0 * error
    # It can fail: greedy answers are far more probable than samples.
    with Decoder.open(demo_bundle) as decoder:
        greedy = [
            decoder.generate(p, TOKENS, sampling=Sampling(logprobs=0), stop_token_ids=[])
            for p in prompts[:10]
        ]
    best = mean(mean(p.logprob for p in answer.logprobs) for answer in greedy)
    assert best - mean(plain) > 3.0 * error
