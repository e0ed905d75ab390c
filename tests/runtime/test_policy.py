"""How many rows are verified: what costs and acceptance say, and that the output does not depend on it."""

import numpy as np
import pytest

from dflash_deploy.runtime.calibrate import calibrate
from dflash_deploy.runtime.pair import Pair
from dflash_deploy.runtime.policy import PROBE_ROUNDS, AdaptiveRows, FixedRows, LinearCost, few_counts
from toy_engines import BLOCK, ToyDraft, ToyTarget, toy_manifest


def told(acceptance: float, verify=(20.0, 1.0), draft=(5.0, 1.0), most: int = 8) -> AdaptiveRows:
    """A policy that saw passes of these base and slope, and blocks of this acceptance."""
    policy = AdaptiveRows(most)
    for _ in range(4):
        for requests in (1, 8):
            for rows in (2, most):
                policy.verified(requests, rows, verify[0] + verify[1] * requests * rows)
            policy.drafted(requests, draft[0] + draft[1] * requests)
    random = np.random.default_rng(0)
    for _ in range(600):
        accepted = 0
        while accepted < most - 1 and random.random() < acceptance:
            accepted += 1
        policy.accepted(most - 1, accepted)
    return policy


def test_costs_are_learnt():
    cost = LinearCost()
    assert cost.estimate(3.0) is None
    for size in (1, 2, 5, 9, 16):
        cost.observe(size, 7.0 + 0.5 * size)
    assert cost.estimate(4.0) == pytest.approx(9.0, rel=0.02)
    assert cost.estimate(32.0) == pytest.approx(23.0, rel=0.05)


def test_one_size_alone_says_nothing_of_the_slope_but_is_no_error():
    cost = LinearCost()
    cost.observe(4, 10.0)
    assert cost.estimate(2.0) == pytest.approx(10.0)
    assert cost.estimate(8.0) == pytest.approx(20.0)


def test_a_change_of_the_machine_is_followed():
    cost = LinearCost()
    for factor in (1.0, 3.0):
        for _ in range(100):
            for size in (2, 8):
                cost.observe(size, factor * (10.0 + size))
    assert cost.estimate(8.0) == pytest.approx(54.0, rel=0.05)


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
    chosen = [policy.rows(1) for _ in range(3 * PROBE_ROUNDS)]
    assert set(chosen) == {1, 2}
    assert chosen.count(2) == 3
    # A draft that became good is noticed from these rounds alone.
    rounds = 0
    while policy.rows(1) < 3:
        policy.accepted(1, 1)
        rounds += 1
        assert rounds < 200


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
    assert policy.verify_cost.estimate(8) is not None
    assert policy.draft_cost.estimate(3) is not None
    assert {call["batch"] for call in target.calls} == {1, 3}
    for lane in pair.lanes:
        assert (lane.target.committed, lane.draft.committed, lane.features) == (0, 0, [])
    for cache in (pair._target_cache, pair._draft_cache):
        assert not cache.tokens.any()
