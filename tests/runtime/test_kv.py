import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_deploy.bundle.limits import KV_BUCKET, ShapeLimits, round_up
from dflash_deploy.runtime.kv import CacheLength
from toy_engines import toy_manifest


class CacheLengthMachine(RuleBasedStateMachine):
    """Writes and commits in any order the loop could do them."""

    def __init__(self):
        super().__init__()
        self.length = CacheLength(200)
        self.rows = 0

    @precondition(lambda self: self.length.committed < 200)
    @rule(data=st.data())
    def write(self, data):
        self.rows = data.draw(st.integers(1, 200 - self.length.committed))
        kv = self.length.kv_for(self.rows)
        assert self.length.committed + self.rows <= kv <= self.length.capacity
        assert kv % KV_BUCKET == 0 or kv == self.length.capacity
        assert kv - (self.length.committed + self.rows) < KV_BUCKET
        self.length.write(self.rows)

    @rule(data=st.data())
    def commit(self, data):
        before = self.length.committed
        rows = data.draw(st.integers(0, self.rows))
        self.length.commit(rows)
        assert self.length.committed == before + rows
        self.rows = 0  # the rest is forgotten

    @invariant()
    def ordered(self):
        assert 0 <= self.length.committed <= self.length.written <= self.length.capacity


TestCacheLength = CacheLengthMachine.TestCase


def test_rows_that_were_not_written_cannot_be_committed():
    length = CacheLength(64)
    with pytest.raises(ValueError, match="only 0 are written"):
        length.commit(1)
    length.write(4)
    length.commit(2)
    with pytest.raises(ValueError, match="only 2 are written"):
        length.commit(1)


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(ValueError, match="does not fit into 64 slots"):
        CacheLength(64).kv_for(rows)


@given(st.integers(2, 3000), st.integers(2, 16), st.data())
def test_a_request_gets_room_for_its_tokens_and_slack_and_no_more_than_a_bucket(max_length, block, data):
    limits = ShapeLimits.from_manifest(toy_manifest(block_size=block, max_length=max_length))
    tokens = data.draw(st.integers(1, max_length))
    capacity = limits.capacity_for(tokens)
    assert tokens + block <= capacity <= limits.capacity == max_length + block
    assert capacity - tokens - block < KV_BUCKET
    for wrong in (0, max_length + 1):
        with pytest.raises(ValueError, match="expected 1"):
            limits.capacity_for(wrong)


def test_round_up():
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
