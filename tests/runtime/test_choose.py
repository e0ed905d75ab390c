"""What a round commits. The law of it is in test_sampling_law.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.runtime.accept import FinishReason, accept_greedy
from dflash_deploy.runtime.choose import Chooser, ProposalError, Proposed
from dflash_deploy.runtime.law import Law
from dflash_deploy.runtime.sampling import Sampling

V = 6
rng = np.random.default_rng(11)
TARGET = (rng.normal(size=(V, V)) * 2).astype(np.float32)  # [previous token, token]
DRAFT = (rng.normal(size=(V, 3, V)) * 2).astype(np.float32)  # [anchor, row, token]
PENALTIES = Sampling(
    repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.6, logit_bias={2: 1.0, 4: -0.5}
)
tokens = st.integers(0, V - 1)


def rows_of(choices) -> np.ndarray:
    """Logits whose best tokens are these."""
    rows = np.zeros((len(choices), V), np.float32)
    rows[np.arange(len(choices)), choices] = 1.0
    return rows


@given(data=st.data())
def test_at_temperature_0_it_is_greedy_acceptance(data):
    proposals = data.draw(st.lists(tokens, max_size=5))
    greedy = data.draw(st.lists(tokens, min_size=len(proposals) + 1, max_size=len(proposals) + 1))
    budget, stops = data.draw(st.integers(1, 7)), data.draw(st.frozensets(tokens, max_size=2))
    chooser = Chooser(Sampling(), [0], V, stops)
    got = chooser.accept(chooser.propose_fixed(proposals), rows_of(greedy), budget)
    expected = accept_greedy(proposals, greedy, budget, stops)
    assert (got.ids, got.finish) == (expected.ids, expected.finish)
    assert got.accepted == min(expected.accepted, len(got.ids))


def decode(sampling: Sampling, family: str, length: int = 30, **options) -> list[int]:
    """Generate with the tables as target and draft; token 0 is the prompt."""
    chooser = Chooser(sampling, [0], V, (), **options)
    output = [0]
    while len(output) <= length:
        anchor = output[-1]
        if family == "plain":
            proposed = Proposed()
        elif family == "rows":
            proposed = chooser.propose_rows(DRAFT[anchor])
        elif family == "fixed":
            proposed = chooser.propose_fixed(DRAFT[anchor].argmax(1).tolist())
        else:
            candidates = np.argsort(-DRAFT[anchor], axis=1)[:, :4]
            scores = np.take_along_axis(DRAFT[anchor], candidates, axis=1)
            proposed = chooser.propose_candidates(
                candidates, np.repeat(scores[:, None], 4, axis=1) + TARGET[:4, :4]
            )
        got = chooser.accept(proposed, TARGET[[anchor, *proposed.ids]], length + 1 - len(output))
        chooser.commit(got.ids)
        output += got.ids
        if got.finish is not None:
            break
    return output


@pytest.mark.parametrize("family", ["rows", "candidates", "fixed"])
@pytest.mark.parametrize("sampling", [Sampling(), PENALTIES], ids=["plain", "penalties"])
def test_at_temperature_0_speculative_is_plain(sampling, family):
    plain = decode(sampling, "plain")
    assert len(plain) == 31
    assert decode(sampling, family) == plain
    assert decode(Sampling(temperature=1e-6), family) == decode(Sampling(), "plain")


def test_penalties_change_the_text():
    assert decode(PENALTIES, "plain") != decode(Sampling(), "plain")


@pytest.mark.parametrize("family", ["rows", "candidates", "fixed"])
def test_a_seed_repeats_and_other_seeds_differ(family):
    texts = [tuple(decode(Sampling(1.0, seed=seed), family)) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("frequency", [0.6, -2.0])  # the second makes a block of one token, repeated
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_laws_in_a_block_follow_what_is_proposed(temperature, frequency):
    """To the last bit: a row's law is the same whether the tokens before it are proposed or committed."""
    for seed in range(40):
        sampling = Sampling(
            temperature,
            top_p=0.95,
            repetition_penalty=1.7,
            presence_penalty=0.9,
            frequency_penalty=frequency,
            seed=seed,
        )
        chooser = Chooser(sampling, [0, 3], V, {5}, min_tokens=4)
        chooser.commit([1, 3])
        proposed = chooser.propose_rows(DRAFT[3])
        for index in range(3):
            plain = Chooser(sampling, [0, 3], V, {5}, min_tokens=4)
            plain.commit([1, 3, *proposed.ids[:index]])
            alone = plain.propose_rows(DRAFT[3][index : index + 1]).laws[0]
            assert proposed.laws[index].probs.tolist() == alone.probs.tolist()
            if index < 2:
                assert alone.prob(5) == 0.0


def test_history_is_what_was_committed_and_not_what_was_accepted():
    """A stop string may cut a round: its rest must leave no trace."""
    sampling = Sampling(1.0, frequency_penalty=1.0, seed=1)
    one, other = Chooser(sampling, [0], V, ()), Chooser(sampling, [0], V, ())
    got = one.accept(one.propose_rows(DRAFT[0]), TARGET[[0, 1, 2, 3]], 9)
    one.commit(got.ids[:1])
    other.commit(got.ids[:1])
    assert one.position == other.position == 1
    assert one.propose_rows(DRAFT[1]).laws[0].probs.tolist() == (
        other.propose_rows(DRAFT[1]).laws[0].probs.tolist()
    )


def test_the_same_law_is_always_accepted():
    for seed in range(200):
        chooser = Chooser(Sampling(0.7, seed=seed), [0], V, ())
        proposed = chooser.propose_rows(DRAFT[0])
        got = chooser.accept(proposed, np.concatenate((DRAFT[0], TARGET[:1])), 9)
        assert got.ids[:3] == proposed.ids
        assert (got.accepted, len(got.ids), got.finish) == (3, 4, None)


def test_a_rejection_where_nothing_is_left_still_gives_a_possible_token():
    """Laws that are equal up to rounding, and the rounding rejects."""
    draft = Law(None, np.array([0.5 + 2e-16, 0.5 + 2e-16, 0.0]))

    class Highest:
        seed = 0

        def uniform(self, use, position):
            return 1.0 - 2.0**-53

    chooser = Chooser(Sampling(1.0), [0], 3, ())
    chooser.random = Highest()
    logits = np.array([[0.0, 0.0, -np.inf]] * 2, np.float32)
    got = chooser.accept(Proposed((0,), (draft,)), logits, 1)
    assert got.accepted == 0, "the case does not happen"
    assert got.ids[0] in (0, 1)


def test_what_the_target_excludes_never_comes_out():
    target = np.array([[0.0, 1.0, -np.inf, -np.inf, -np.inf, -np.inf]] * 4, np.float32)
    for seed in range(200):
        chooser = Chooser(Sampling(1.5, seed=seed), [0], V, ())
        got = chooser.accept(chooser.propose_rows(DRAFT[1]), target, 9)
        assert set(got.ids) <= {0, 1}


def test_nothing_behind_a_stop_and_the_stop_wins_over_the_budget():
    chooser = Chooser(Sampling(), [0], V, {2})
    proposed = chooser.propose_fixed([1, 2, 3])
    got = chooser.accept(proposed, rows_of([1, 2, 3, 4]), 2)
    assert (got.ids, got.finish, got.accepted) == ((1, 2), FinishReason.STOP, 2)
    got = chooser.accept(proposed, rows_of([1, 5, 3, 4]), 2)
    assert (got.ids, got.finish, got.accepted) == ((1, 5), FinishReason.LENGTH, 1)


def test_rows_are_looked_at_as_far_as_needed():
    """A spoilt row behind the rejection, the stop or the budget is nobody's business."""
    rows = rows_of([1, 2, 3, 4])
    rows[2:] = np.nan
    chooser = Chooser(Sampling(), [0], V, {2})
    assert chooser.accept(chooser.propose_fixed([1, 2, 3]), rows, 9).finish is FinishReason.STOP
    assert chooser.accept(chooser.propose_fixed([1, 4, 3]), rows, 9).ids == (1, 2)
    assert Chooser(Sampling(), [0], V, ()).accept(Proposed((1, 2, 3), (Law.point(1),) * 3), rows, 2).ids


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_spoilt_target_row_is_an_engine_error(bad):
    rows = rows_of([1, 2])
    rows[1] = bad
    chooser = Chooser(Sampling(1.0), [0], V, ())
    chooser.commit([1, 1])
    with pytest.raises(EngineError, match=r"row 1 of the round \(output token 3\).*dflash parity"):
        chooser.accept(chooser.propose_fixed([1]), np.stack([rows[0] * 1000, rows[1]]), 9)
    rows[1] = 0.0
    rows[1, 3] = bad
    if bad != -np.inf:  # one impossible token among others is fine
        with pytest.raises(EngineError, match="row 1"):
            chooser.accept(chooser.propose_fixed([1]), np.stack([rows[0] * 1000, rows[1]]), 9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_spoilt_draft_costs_the_proposals_only(bad):
    rows = DRAFT[0].copy()
    rows[1, 4] = bad
    chooser = Chooser(Sampling(1.0), [0], V, ())
    with pytest.raises(ProposalError, match="logits of proposal 2 are not finite"):
        chooser.propose_rows(rows)
    scores = np.zeros((2, 3, 3), np.float32)
    scores[1, :, 2] = bad
    with pytest.raises(ProposalError, match="proposal 2"):
        chooser.propose_candidates(np.array([[0, 1, 2]] * 2), scores)
    for wrong in ([[0, 1, 6]], [[-1, 1, 2]], [[3, 1, 3]]):
        with pytest.raises(ProposalError, match="tokens of proposal 1"):
            chooser.propose_candidates(np.array(wrong), scores[:1])
    with pytest.raises(ProposalError, match="tokens of proposal 2"):
        chooser.propose_fixed([0, V])
    assert chooser.position == 0


def test_a_path_goes_through_the_rows_of_the_choice_before():
    """Candidates in any order; the law of a row is the softmax over them behind the one chosen before."""
    candidates = np.array([[5, 0, 3], [4, 1, 2], [0, 5, 2]])
    scores = rng.normal(size=(3, 3, 3)).astype(np.float32)
    scores[0] = scores[0, 0]
    for seed in range(60):
        proposed = Chooser(Sampling(0.8, seed=seed), [0], V, ()).propose_candidates(candidates, scores)
        before = 0
        for index, token in enumerate(proposed.ids):
            weights = np.exp(scores[index, before].astype(np.float64) / 0.8)
            law = proposed.laws[index]
            for candidate, weight in zip(candidates[index], weights / weights.sum(), strict=True):
                assert law.prob(candidate) == pytest.approx(weight, rel=1e-12)
            before = candidates[index].tolist().index(token)


def test_no_stop_before_the_least_number_of_tokens():
    rows = rows_of([2, 2, 2, 2])
    rows[:, 3] = 0.5
    chooser = Chooser(Sampling(), [0], V, {2}, min_tokens=2)
    got = chooser.accept(chooser.propose_fixed([3, 3, 3]), rows, 9)
    assert (got.ids, got.finish) == ((3, 3, 2), FinishReason.STOP)
    with pytest.raises(
        EngineError, match=r"allows only stop tokens, but output token 0 .* lower min_new_tokens"
    ):
        chooser.accept(Proposed(), np.where(rows[:1] == 1.0, 0.0, -np.inf), 9)


def test_a_draft_that_can_only_stop_proposes_less():
    chooser = Chooser(Sampling(1.0), [0], V, {2, 3}, min_tokens=9)
    proposed = chooser.propose_candidates(np.array([[1, 2], [3, 2]]), np.zeros((2, 2, 2), np.float32))
    assert proposed.ids == (1,)
    only_stops = np.full((1, V), -np.inf)
    only_stops[0, 2] = 0.0
    assert chooser.propose_rows(only_stops).ids == ()


def test_log_probabilities_are_the_targets_own():
    """Whatever the temperature, the filters and the penalties are."""
    sampling = Sampling(0.5, top_k=2, repetition_penalty=1.5, logit_bias={1: 9.0}, seed=3, logprobs=3)
    chooser = Chooser(sampling, [0, 1, 2], V, ())
    rows = TARGET[[0, 1, 2, 3]]
    rows[0, :3] = rows[0].max()  # a tie
    got = chooser.accept(chooser.propose_rows(DRAFT[0]), rows, 9)
    assert len(got.logprobs) == len(got.ids)
    for index, (token, entry) in enumerate(zip(got.ids, got.logprobs, strict=True)):
        row = rows[index].astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        assert entry.id == token
        assert entry.logprob == pytest.approx(expected[token], rel=1e-12)
        order = sorted(range(V), key=lambda i: (-row[i], i))[:3]
        assert [pair[0] for pair in entry.best] == order
        assert [pair[1] for pair in entry.best] == pytest.approx(expected[order].tolist(), rel=1e-12)
    none = Chooser(Sampling(logprobs=0), [0], V, ()).accept(Proposed(), rows[:1], 9)
    assert none.logprobs[0].best == ()
    assert Chooser(Sampling(), [0], V, ()).accept(Proposed(), rows[:1], 9).logprobs == ()


@pytest.mark.parametrize(
    ("shape", "budget"), [((1, V), 1), ((3, V), 1), ((2, V + 1), 1), ((2, V), 0), ((2,), 1)]
)
def test_arguments_that_do_not_fit_are_a_bug(shape, budget):
    chooser = Chooser(Sampling(), [0], V, ())
    with pytest.raises(ValueError, match="expected logits"):
        chooser.accept(chooser.propose_fixed([1]), np.zeros(shape, np.float32), budget)
    with pytest.raises(ValueError, match=r"expected \[P, 6\]"):
        chooser.propose_rows(np.zeros((2, V + 1), np.float32))
    with pytest.raises(ValueError, match=r"expected \[P, k\] and \[P, k, k\]"):
        chooser.propose_candidates(np.zeros((2, 3), np.int64), np.zeros((2, 3, 2), np.float32))
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        Chooser(Sampling(repetition_penalty=2.0), [0], V, ()).commit([V])


def test_a_prompt_may_hold_tokens_that_have_no_logit():
    """Rows of a padded embedding behind the vocabulary."""
    one, other = (Chooser(Sampling(1.0, repetition_penalty=2.0), ids, V, ()) for ids in ([3, V], [3]))
    assert (
        one.propose_rows(DRAFT[0]).laws[0].probs.tolist()
        == other.propose_rows(DRAFT[0]).laws[0].probs.tolist()
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_round_keeps_its_promises(data):
    """Any draft and any target with exclusions: shapes of the outcome, and only possible tokens."""
    excluded = data.draw(st.frozensets(tokens, max_size=V - 1))
    target = np.array(TARGET[[0, 1, 2, 3]])
    target[:, sorted(excluded)] = -np.inf
    stops, budget = data.draw(st.frozensets(tokens, max_size=2)), data.draw(st.integers(1, 6))
    sampling = Sampling(
        data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        data.draw(st.sampled_from([None, 2])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
        seed=data.draw(st.integers(0, 99)),
    )
    chooser = Chooser(sampling, [0], V, stops)
    proposed = chooser.propose_rows(DRAFT[0])
    got = chooser.accept(proposed, target, budget)
    assert 1 <= len(got.ids) <= min(budget, 4)
    assert got.accepted <= len(got.ids) <= got.accepted + 1
    assert got.ids[: got.accepted] == proposed.ids[: got.accepted]
    assert not excluded & set(got.ids)
    assert not stops & set(got.ids[:-1])
    if got.ids[-1] in stops:
        assert got.finish is FinishReason.STOP
    else:
        assert got.finish is (FinishReason.LENGTH if len(got.ids) == budget else None)
