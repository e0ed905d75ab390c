import json

import pytest

from dflash_deploy.bench.machine import cpu_count, cpu_name
from dflash_deploy.bench.run import bench_decoder, run_bench
from dflash_deploy.bundle.errors import RequestError
from toy_engines import always, expected_lengths, greedy, never, sometimes, toy_decoder
from toy_onnx import write_bundle

PROMPTS = [[5, 9, 2], [4], [7] * 30, [8, 8]]


def test_figures():
    told = []
    decoder = toy_decoder(sometimes)
    result = bench_decoder(decoder, PROMPTS, 40, repeats=2, progress=lambda *done: told.append(done))
    assert json.loads(json.dumps(result)) == {**result, "settings": {**result["settings"]}}
    lengths = [expected_lengths(p, greedy(p, 40), 40, sometimes, 8) for p in PROMPTS]
    assert result["rounds"] == sum(map(len, lengths)) == result["speculative"]["rounds"]
    assert result["acceptance_length"] == pytest.approx(sum(map(sum, lengths)) / result["rounds"])
    assert result["tokens_identical"] is True
    assert result["plain"]["rounds"] == result["plain_exact"]["rounds"] == 39 * 4
    assert result["speculative"]["tokens"] == result["plain"]["tokens"] == 160
    assert result["plain"]["draft_ms"] == 0 < result["speculative"]["draft_ms"]
    plain, speculative = result["plain"], result["speculative"]
    assert result["speedup"] == pytest.approx(speculative["tokens_per_s"] / plain["tokens_per_s"])
    round_ms = speculative["verify_ms"] + speculative["draft_ms"]
    assert result["bound"] == pytest.approx(result["acceptance_length"] / round_ms * plain["verify_ms"])
    assert result["bound_reached"] == pytest.approx(result["speedup"] / result["bound"])
    for way in (plain, speculative):
        per_round = way["verify_ms"] + way["draft_ms"] + way["other_ms"]
        assert 1000 / way["tokens_per_s"] == pytest.approx(per_round * way["rounds"] / 156)
        assert way["other_share"] == pytest.approx(way["other_ms"] / per_round)
    assert result["threads"] == 1
    assert result["settings"]["max_new_tokens"] == 40
    assert told == [(i + 1, 24) for i in range(24)]


def test_fast_plain_may_differ_and_is_counted():
    result = bench_decoder(toy_decoder(always), PROMPTS, 100)
    assert result["tokens_identical"] is True
    assert result["prompts_unlike_fast_plain"] > 0  # the toy's lone rows flip near ties


def test_a_difference_is_told(monkeypatch):
    decoder = toy_decoder()
    compute = decoder.toy_target.compute

    def wrong(cache, inputs, start, rows, several):
        outputs = compute(cache, inputs, start, rows, several)
        if rows == 8:
            outputs["greedy_ids"][0, 3] = 0
        return outputs

    monkeypatch.setattr(decoder.toy_target, "compute", wrong)
    result = bench_decoder(decoder, PROMPTS, 20)
    assert result["tokens_identical"] is False


def test_prompts_of_one_token_budget():
    result = bench_decoder(toy_decoder(), PROMPTS, 1)
    assert (result["rounds"], result["speedup"], result["bound_reached"]) == (0, 0, 0)


@pytest.mark.parametrize(("prompts", "repeats", "words"), [([], 1, "prompts"), (PROMPTS, 0, "repeats")])
def test_bad_requests(prompts, repeats, words):
    with pytest.raises(RequestError, match=words):
        bench_decoder(toy_decoder(), prompts, 5, repeats)


def test_answers_end_where_the_model_ends_them_and_every_way_has_that_many():
    prompt = PROMPTS[0]
    answer = greedy(prompt, 40)
    stop = next(token for token in answer[5:] if token not in answer[:5])
    length = answer.index(stop)
    result = bench_decoder(toy_decoder(sometimes, stops=(stop,)), [prompt], 40)
    for way in ("plain_exact", "speculative"):
        assert result[way]["tokens"] == length  # without the token that ends it
    assert result["plain"]["tokens"] == length  # as many, though it may choose otherwise
    assert result["tokens_identical"] is True


def test_acceptance_by_position():
    result = bench_decoder(toy_decoder(never), PROMPTS, 41)
    assert result["acceptance_by_position"] == [1.0] * 7
    assert result["verified_by_position"][0] == result["rounds"]
    assert bench_decoder(toy_decoder(always), PROMPTS, 41)["acceptance_by_position"][0] == 0.0


def test_a_bundle_is_opened_timed_and_shown(tmp_path):
    write_bundle(tmp_path)
    result = run_bench(tmp_path, PROMPTS, 20, verify_rows=3, threads=1)
    assert result["tokens_identical"] is True
    assert (result["settings"]["verify_rows"], result["settings"]["provider"]) == (3, "cpu")
    assert result["versions"]["onnxruntime"]
    assert cpu_name()
    assert cpu_count() >= 1
