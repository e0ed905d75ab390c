"""How many rows are verified: what costs and acceptance say, and that the output does not depend on it."""

import numpy as np
import pytest

from dflash_deploy.runtime.calibrate import calibrate
from dflash_deploy.runtime.pair import Pair
from dflash_deploy.runtime.pass_cost import PassCost
from dflash_deploy.runtime.policy import PROBE_ROUNDS, AdaptiveRows, FixedRows, few_counts
from toy_engines import BLOCK, ToyDraft, ToyTarget, toy_manifest


def told(
    acceptance: float, verify=(20.0, 1.0), draft=(5.0, 1.0), most: int = 8, observations: int = 600
) -> AdaptiveRows:
    """A policy that saw passes of these base and slope, and blocks of this acceptance."""
    policy = AdaptiveRows(most)
    for requests in (1, 8):
        for rows in (2, most):
            policy.verify_cost.measure(requests, rows, verify[0] + verify[1] * requests * rows)
        policy.draft_cost.measure(requests, 1, draft[0] + draft[1] * requests)
    random = np.random.default_rng(0)
    for _ in range(observations):
        accepted = 0
        while accepted < most - 1 and random.random() < acceptance:
            accepted += 1
        policy.accepted(most - 1, accepted)
    return policy


def test_costs_between_measured_sizes_are_on_a_line():
    cost = PassCost()
    assert cost.estimate(1, 3) is None
    for requests in (1, 5):
        for rows in (2, 8):
            cost.measure(requests, rows, 7.0 + requests * rows)
    for requests, rows in ((1, 2), (1, 5), (3, 8), (2, 3), (5, 12), (9, 8)):
        assert cost.estimate(requests, rows) == pytest.approx(7.0 + requests * rows)
    assert cost.estimate(1, 1) == pytest.approx(9.0)  # below the least, a pass is not cheaper


def test_of_two_measurements_the_faster_counts():
    cost = PassCost()
    for took in (12.0, 10.0, 11.0):
        cost.measure(1, 4, took)
    assert cost.estimate(1, 4) == 10.0


def test_one_size_alone_says_nothing_of_smaller_ones_but_is_no_error():
    cost = PassCost()
    cost.observe(1, 4, 10.0)
    assert cost.estimate(1, 2) == pytest.approx(10.0)
    assert cost.estimate(1, 8) == pytest.approx(20.0)


def test_a_change_of_the_machine_is_followed_and_rounds_that_are_all_alike_do_not_hide_the_others():
    cost = PassCost()
    for rows in (1, 8):
        cost.measure(1, rows, 10.0 + rows)
    for factor in (1.0, 3.0):
        for _ in range(200):
            cost.observe(1, 8, factor * 18.0)
    assert cost.estimate(1, 8) == pytest.approx(54.0, rel=0.02)
    assert cost.estimate(1, 1) == pytest.approx(33.0, rel=0.02)


def test_one_slow_pass_changes_little():
    cost = PassCost()
    cost.measure(1, 4, 10.0)
    cost.observe(1, 4, 10_000.0)
    assert cost.estimate(1, 4) < 12.0


def test_a_draft_that_knows_nothing_is_found_out_soon():
    policy = told(0.0, observations=0)
    rounds = 0
    while (rows := policy.rows(1)) > 1:
        policy.accepted(rows - 1, 0)
        rounds += 1
    assert rounds <= 15


def test_a_good_draft_is_verified_whole_and_a_bad_one_not_at_all():
    assert told(0.97).rows(1) == 8
    assert told(0.02).rows(1) == 1
    # Between: the row that costs as much as it gives is the last.
    middle = told(0.6).rows(1)
    assert 2 < middle < 8


def test_company_makes_rows_dearer():
    policy = told(0.6)
    rows = [policy.rows(requests) for requests in (1, 4, 16, 64)]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]


def test_where_plain_decoding_wins_the_draft_is_asked_again_now_and_then():
    policy = told(0.02)
    chosen = [policy.rows(1) for _ in range(7 * PROBE_ROUNDS)]
    assert set(chosen) == {1, 2}
    assert [index + 1 for index, rows in enumerate(chosen) if rows == 2] == [
        PROBE_ROUNDS,
        3 * PROBE_ROUNDS,  # in vain: then less often
        7 * PROBE_ROUNDS,
    ]
    # A draft that became good is noticed from these rounds alone.
    rounds = 0
    while policy.rows(1) < 3:
        policy.accepted(1, 1)
        rounds += 1
        assert rounds < 1000


def test_an_engine_meets_few_shapes():
    assert few_counts(8) == (2, 4, 8)
    assert few_counts(2) == (2,)
    policy = told(0.6)
    wanted = policy.rows(1)
    policy.counts = few_counts(8)
    assert wanted not in policy.counts
    assert {policy.rows(requests) for requests in (1, 4, 16, 64)} <= {1, 2, 4, 8}


def test_nothing_known_is_no_error():
    policy = AdaptiveRows(8)
    assert policy.rows(1) == 8
    assert FixedRows(3).rows(9) == 3


def test_calibration_leaves_lanes_as_new():
    manifest = toy_manifest()
    target, draft = ToyTarget(manifest), ToyDraft(manifest)
    pair = Pair(manifest, target, draft, 64, 3)
    policy = AdaptiveRows(BLOCK)
    calibrate(pair, manifest.draft, policy)
    assert policy.verify_cost.estimate(1, 8) is not None
    assert policy.draft_cost.estimate(3, 1) is not None
    assert {call["batch"] for call in target.calls} == {1, 3}
    for lane in pair.lanes:
        assert (lane.target.committed, lane.draft.committed, lane.features) == (0, 0, [])
    for cache in (pair._target_cache, pair._draft_cache):
        assert not cache.tokens.any()
