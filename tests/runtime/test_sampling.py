"""Settings and the laws they make, against transformers and against plain sorting."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import RequestError
from dflash_deploy.runtime.choose import Chooser
from dflash_deploy.runtime.law import Law, law_from_scores, top_indices
from dflash_deploy.runtime.sampling import Sampling

LAST_UNIFORM = 1.0 - 2.0**-53


def dense(law: Law, size: int) -> np.ndarray:
    probs = np.zeros(size)
    probs[slice(None) if law.ids is None else law.ids] = law.probs
    return probs


def law_of(sampling: Sampling, row, prompt=(), output=(), stops=(), min_tokens=0) -> np.ndarray:
    """The law of one row, through the front door."""
    chooser = Chooser(sampling, prompt, len(row), stops, min_tokens)
    chooser.commit(output)
    return dense(chooser.propose_rows(np.asarray(row)[None]).laws[0], len(row))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature: got -0.1, expected a finite number >= 0"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": "1"}, "temperature: got '1'"),
        ({"top_k": 0}, "top_k: got 0, expected an integer >= 1"),
        ({"top_k": 2.0}, "top_k: got 2.0"),
        ({"top_k": True}, "top_k: got True"),
        ({"top_p": 0.0}, "top_p: got 0.0, expected 0 < top_p <= 1"),
        ({"top_p": 1.01}, "top_p: got 1.01"),
        ({"min_p": -0.1}, "min_p: got -0.1, expected 0 <= min_p <= 1"),
        ({"min_p": 2}, "min_p: got 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0, expected 0.01 to 100"),
        ({"presence_penalty": 2.1}, "presence_penalty: got 2.1, expected -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty: got -3, expected -2 to 2"),
        ({"logit_bias": {10: 1.0}}, "logit_bias: got 10, expected token ids, 0 to 9, as keys"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias: got '3'"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\]: got inf"),
        ({"logit_bias": [1.0]}, r"logit_bias: got \[1.0\], expected a mapping"),
        ({"seed": 2**64}, "seed: got 18446744073709551616"),
        ({"seed": 1.5}, "seed: got 1.5, expected an integer of 64 bits"),
        ({"logprobs": -1}, "logprobs: got -1, expected 0 to 10"),
        ({"logprobs": 11}, "logprobs: got 11"),
    ],
)
def test_senseless_settings_are_refused_by_name(changes, message):
    with pytest.raises(RequestError, match=message):
        Sampling(**changes).check(10)


def test_sensible_settings_pass():
    Sampling().check(10)
    every = Sampling(1, 100, 1, 1.0, 1.3, -2, 2.0, {0: -100, 9: 5.5}, -1, 10)
    every.check(10)
    replace(every, top_k=np.int64(3), temperature=np.float32(0.5)).check(10)


def test_the_bias_cannot_be_changed_from_outside():
    bias = {1: 2.0}
    sampling = Sampling(logit_bias=bias)
    bias[1] = 3.0
    assert dict(sampling.logit_bias) == {1: 2.0}
    with pytest.raises(TypeError):
        sampling.logit_bias[1] = 3.0  # type: ignore[index]
    assert replace(sampling, top_k=3).logit_bias == sampling.logit_bias
    assert hash(sampling) == hash(Sampling(logit_bias={1: 2.0}))


def test_settings_can_be_pickled():
    sampling = Sampling(0.5, logit_bias={1: 2.0}, seed=4)
    assert pickle.loads(pickle.dumps(sampling)) == sampling


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"temperature": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_only_plain_greedy_does_without_logits(changes, needed):
    assert Sampling(**changes).needs_logits is needed
    assert Chooser(Sampling(**changes), (), 5, {1}).needs_logits is needed


def test_a_ban_of_stop_tokens_needs_logits_while_it_lasts():
    chooser = Chooser(Sampling(), (), 5, {1}, min_tokens=2)
    needed = []
    for _ in range(3):
        needed.append(chooser.needs_logits)
        chooser.commit([0])
    assert needed == [True, True, False]
    assert not Chooser(Sampling(), (), 5, (), min_tokens=2).needs_logits


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "top_p": 0.9},
    {"logit_bias": {0: 3.0, 3: -2.0}},
    {"logit_bias": {2: 5.0}, "repetition_penalty": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("size", [5, 60, 3000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_the_law_is_that_of_transformers(changes, temperature, size):
    """Their processors in float64, in the order in which `generate` puts them."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    torch.set_num_threads(1)
    sampling = Sampling(temperature, **changes)
    rng = np.random.default_rng(size)
    prompt, output, stops = [0, 2, 2, 4], [1, 2], [3, 4]
    steps = []
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias.items()}
        steps.append(process.SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1.0:
        steps.append(process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(process.MinNewTokensLengthLogitsProcessor(len(prompt), 3, stops, device="cpu"))
    steps.append(process.TemperatureLogitsWarper(temperature))
    if sampling.top_k is not None:
        steps.append(process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(process.MinPLogitsWarper(sampling.min_p))
    for _ in range(5):
        row = (rng.normal(size=size) * 3).astype(np.float32)
        ids, scores = torch.tensor([prompt + output]), torch.from_numpy(row.astype(np.float64))[None]
        for step in steps:
            scores = step(ids, scores)
        theirs = scores[0].softmax(0).numpy()
        ours = law_of(sampling, row, prompt, output, stops, min_tokens=3)
        assert ((ours > 0) == (theirs > 0)).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-300)


def test_presence_and_frequency_count_the_output_only():
    row = np.array([1.0, 2.0, -1.0, 0.5], np.float32)
    sampling = Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = np.exp(row - np.array([0.0, 0.5 + 0.25, 0.5 + 0.75, 0.0]))
    got = law_of(sampling, row, prompt=[0, 0, 1], output=[2, 1, 2, 2])
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-13)
    both = replace(sampling, repetition_penalty=2.0)
    expected = np.exp([1.0 / 2, 2.0 / 2 - 0.75, -1.0 * 2 - 1.25, 0.5])
    got = law_of(both, row, prompt=[0, 0, 1], output=[2, 1, 2, 2])
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-13)


def test_the_order_of_bias_and_penalties():
    """Bias moves the logit over 0 before the repetition penalty looks at its sign, then counts subtract."""
    row = np.array([-1.0, 0.0], np.float32)
    sampling = Sampling(1.0, logit_bias={0: 3.0}, repetition_penalty=2.0, presence_penalty=0.5)
    expected = np.exp([(-1.0 + 3.0) / 2.0 - 0.5, 0.0])
    np.testing.assert_allclose(law_of(sampling, row, output=[0]), expected / expected.sum(), rtol=1e-13)


def test_ties_keep_exactly_k_and_the_lower_ids():
    row = np.array([1.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    assert (law_of(Sampling(1.0, top_k=3), row) > 0).tolist() == [True, True, False, True, False]
    assert law_of(Sampling(0.0), row).tolist() == [0, 1, 0, 0, 0]
    flat = np.zeros(10, np.float32)
    assert np.flatnonzero(law_of(Sampling(1.0, top_p=0.35), flat)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(law_of(Sampling(1.0, min_p=1.0), flat)).tolist() == list(range(10))


values = st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 0.5, 2.0])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_best_k_are_those_of_a_full_sort(data):
    size = data.draw(st.sampled_from([1, 5, 63, 200, 900]))
    scores = np.random.default_rng(data.draw(st.integers(0, 999))).normal(size=size)
    if data.draw(st.booleans()):
        scores = np.round(scores * 2)  # ties
    if data.draw(st.booleans()):
        scores[scores < 0] = -np.inf
    k = data.draw(st.integers(1, size))
    by_value = sorted(range(size), key=lambda i: (-scores[i], i))
    assert top_indices(scores, k).tolist() == sorted(by_value[:k])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_nucleus_is_that_of_a_full_sort(data):
    row = np.array(data.draw(st.lists(values, min_size=1, max_size=12)))
    row[data.draw(st.integers(0, len(row) - 1))] = 1.0
    top_p = data.draw(st.floats(0.01, 1.0, exclude_max=True))
    probs = np.exp(row) / np.exp(row).sum()
    kept, mass = [], 0.0
    for index in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        kept.append(index)
        mass += probs[index]
        if mass >= top_p:
            break
    if abs(mass - top_p) > 1e-9 and abs(mass - probs[kept[-1]] - top_p) > 1e-9:  # not on the edge
        assert np.flatnonzero(law_of(Sampling(1.0, top_p=top_p), row)).tolist() == sorted(kept)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    temperature=st.sampled_from([1e-300, 1e-6, 0.1, 1.0, 1e6]),
    top_k=st.sampled_from([None, 1, 3]),
    top_p=st.sampled_from([1.0, 0.5, 1.0 - 2.0**-53]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
@pytest.mark.filterwarnings("error")
def test_a_draw_is_possible_and_nothing_warns(data, temperature, top_k, top_p, min_p):
    row = np.array(data.draw(st.lists(values, min_size=2, max_size=8)), np.float32)
    row[data.draw(st.integers(0, len(row) - 1))] = 3e38
    law = law_from_scores(row, None, temperature, top_k, top_p, min_p)
    assert abs(law.probs.sum() - 1.0) < 1e-12
    for u in (0.0, LAST_UNIFORM, data.draw(st.floats(0.0, LAST_UNIFORM))):
        assert law.prob(law.draw(u)) > 0.0


def test_a_draw_is_the_inverse_of_the_cumulated_law():
    law = Law(np.array([2, 5, 9]), np.array([0.25, 0.0, 0.75]))
    draws = [law.draw(u) for u in (0.0, 0.2499, 0.25, 0.5, LAST_UNIFORM)]
    assert draws == [2, 2, 9, 9, 9]
    assert [law.prob(i) for i in (0, 2, 5, 9, 10)] == [0.0, 0.25, 0.0, 0.75, 0.0]
    assert Law(None, np.array([0.5, 0.5, 0.0])).draw(LAST_UNIFORM) == 1


laws = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=4, max_size=4).filter(any)


@settings(max_examples=300, deadline=None)
@given(p=laws, q=laws, shapes=st.tuples(st.booleans(), st.booleans()), u=st.floats(0.0, LAST_UNIFORM))
def test_what_is_left_of_a_law(p, q, shapes, u):
    """Dense or sparse, either of them: the same token, and never one the target excludes."""

    def law(weights: list[float], sparse: bool) -> Law:
        probs = np.array(weights) / sum(weights)
        ids = np.flatnonzero(probs)
        return Law(ids, probs[ids]) if sparse else Law(None, probs)

    full, other = law(p, False), law(q, False)
    token = law(p, shapes[0]).draw_beyond(law(q, shapes[1]), u)
    assert token == full.draw_beyond(other, u)
    assert full.prob(token) > 0.0
    rest = np.maximum(full.probs - other.probs, 0.0)
    assert rest[token] > 0.0 or not rest.any()


def test_half_precision_logits_are_computed_in_float64():
    row = np.array([1.0, 2.0, 3.0], np.float16)
    np.testing.assert_allclose(
        law_of(Sampling(0.1), row), np.exp([-20.0, -10.0, 0.0]) / np.exp([-20.0, -10.0, 0.0]).sum()
    )
