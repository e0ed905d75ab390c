import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.runtime.accept import FinishReason, accept_greedy

tokens = st.integers(0, 3)  # few, so that matches and stops happen


@st.composite
def rounds(draw):
    proposals = draw(st.lists(tokens, max_size=7))
    greedy = draw(st.lists(tokens, min_size=len(proposals) + 1, max_size=len(proposals) + 1))
    return proposals, greedy, draw(st.integers(1, 9)), draw(st.frozensets(tokens, max_size=2))


@given(rounds())
def test_outcome_is_greedy_decoding_cut_at_stop_and_budget(case):
    proposals, greedy, budget, stops = case
    got = accept_greedy(proposals, greedy, budget, stops)

    # The same, told the other way round: a token is committed while all before it were proposed rightly.
    expected: list[int] = []
    for index, token in enumerate(greedy):
        if proposals[:index] != greedy[:index] or len(expected) == budget:
            break
        expected.append(token)
        if token in stops:
            break
    assert list(got.ids) == expected
    assert 1 <= len(got.ids) <= min(budget, len(greedy))
    assert got.accepted + 1 >= len(got.ids)
    if expected[-1] in stops:
        assert got.finish is FinishReason.STOP
    else:
        assert got.finish is (FinishReason.LENGTH if len(expected) == budget else None)
    assert not any(token in stops for token in got.ids[:-1])


def test_stop_wins_over_length_in_the_same_block():
    assert accept_greedy([5, 6, 7], [5, 6, 7, 8], 3, {7}).finish is FinishReason.STOP
    assert accept_greedy([5, 6, 7], [5, 6, 7, 8], 2, {7}).finish is FinishReason.LENGTH


def test_accepted_counts_proposals_before_the_cut():
    assert accept_greedy([5, 6, 7], [5, 6, 9, 9], 9, {5}).accepted == 2
    assert accept_greedy((), [5], 1, ()).accepted == 0


@pytest.mark.parametrize(
    ("proposals", "greedy", "budget"), [([1], [1], 1), ([], [], 1), ([], [1, 2], 1), ([1], [1, 2], 0)]
)
def test_arguments_that_do_not_fit_are_a_bug(proposals, greedy, budget):
    with pytest.raises(ValueError, match="one row more than proposals"):
        accept_greedy(proposals, greedy, budget, ())
