"""The loop against z-lab's own `dflash_generate`, on a tiny random pair whose drafts hit."""

import time
from types import SimpleNamespace

import pytest

from dflash_deploy.bundle.tensors import DType
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import Mode

torch = pytest.importorskip("torch")
original = pytest.importorskip("dflash.model")

BLOCK, VOCAB = 5, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from dflash_deploy.exporter.export import export_bundle
    from originals import tiny_target, zlab_draft

    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target(1, folder / "target", vocab_size=VOCAB, num_hidden_layers=3)
    draft = zlab_draft(
        0,
        folder / "draft",
        target=target.config,
        dflash2=True,
        block_size=BLOCK,
        mask_token_id=3,
        num_hidden_layers=2,
        selector_rank=4,
        selector_top_k=4,
        final_logit_softcapping=None,
        output_multiplier=1.0,
        dtype=torch.float32,
    )
    export_bundle(str(folder / "target"), str(folder / "draft"), folder / "bundle", DType.FLOAT32)
    with Decoder.open(folder / "bundle", threads=1) as adaptive:
        decoder = adaptive.with_settings(verify_rows=adaptive.manifest.draft.proposals + 1)
        yield SimpleNamespace(target=target, draft=draft, decoder=decoder)


def zlab(pair, monkeypatch, prompt, count, stops):
    """z-lab's tokens and acceptance lengths; its clock wants a GPU."""
    monkeypatch.setattr(original, "_cuda_time", time.perf_counter)
    with torch.inference_mode():
        result = original.dflash_generate(
            pair.draft, pair.target, torch.tensor([prompt]), count, stops, return_stats=True
        )
    return result.output_ids[0, len(prompt) :].tolist(), list(result.acceptance_lengths)


def random_prompt(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, 1 + 7 * seed), generator=generator)[0].tolist()


def test_tokens_and_acceptance_lengths(pair, monkeypatch):
    lengths = []
    for prompt in map(random_prompt, range(4)):
        for count in (1, 2, 3, BLOCK, BLOCK + 1, 24):
            ids, expected = zlab(pair, monkeypatch, prompt, count, None)
            plain = pair.decoder.generate(prompt, count, mode=Mode.PLAIN, stop_token_ids=[])
            got = pair.decoder.generate(prompt, count, stop_token_ids=[])
            assert list(got.ids) == list(plain.ids) == ids
            assert list(got.stats.acceptance_lengths) == expected
            assert got.finish_reason is FinishReason.LENGTH
            lengths += expected
    assert {1, BLOCK} < set(lengths), "drafts hit too seldom or always: this test proves little"


def test_stop_ids(pair, monkeypatch):
    prompt = random_prompt(1)
    full, _ = zlab(pair, monkeypatch, prompt, 20, None)
    for stop in sorted(set(full)):
        ids, expected = zlab(pair, monkeypatch, prompt, 20, [stop, 3])
        got = pair.decoder.generate(prompt, 20, stop_token_ids=[stop, 3])
        assert list(got.ids) == ids
        assert list(got.stats.acceptance_lengths) == expected
        assert got.finish_reason is FinishReason.STOP
