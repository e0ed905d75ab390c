"""Each real program decodes the demo's target. Skipped only where the program is not installed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_deploy.bench.figures import first_difference
from dflash_deploy.bench.measure import Task
from dflash_deploy.bench.peers import PEERS, missing_packages
from dflash_deploy.bench.peers.client import PeerPlace, open_peers
from dflash_deploy.demo import demo_prompts
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode

pytestmark = pytest.mark.slow

TOKENS = 24
AGREE = {"llama.cpp": 4, "onnxruntime-genai-int4": 0}
"""Tokens that must be ours, of those that compute with rounded weights; the others give all of ours."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


@pytest.mark.parametrize("name", PEERS)
def test_it_decodes_our_tokens(name, demo_bundle, demo_target, cache):
    missing = missing_packages(name)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; {PEERS[name].install}")
    with Decoder.open(demo_bundle) as decoder:
        codec = decoder.codec
        assert codec is not None
        ids = tuple(codec.encode_chat(demo_prompts()[3]))
        ours = decoder.generate(list(ids), TOKENS, mode=Mode.PLAIN, stop_token_ids=()).ids
    with ExitStack() as stack:
        (way,) = open_peers(stack, [name], PeerPlace(demo_target, cache), 2)
        assert way.opened.version and way.opened.precision
        first, again = (way.run(Task(ids, TOKENS)) for _ in range(2))
    assert len(first.ids) == TOKENS
    assert first.ids == again.ids  # nothing is left of the run before
    assert 0 < first.first_token_ms < first.total_ms
    place = first_difference(first.ids, ours)
    assert place == -1 or place >= AGREE.get(name, TOKENS)
