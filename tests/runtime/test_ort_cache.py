"""Caches that are looked at whole: as long as is needed, and nothing that is needed gets lost."""

import numpy as np
import pytest

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.bundle.limits import KV_BUCKET
from dflash_deploy.bundle.tensors import BATCH, CAPACITY, DType, TensorInfo
from dflash_deploy.runtime import ort_cache
from dflash_deploy.runtime.ort_cache import OrtCache

INFOS = tuple(TensorInfo(f"past_key.{i}", DType.FLOAT32, (BATCH, 2, CAPACITY, 3)) for i in range(2))


def cache(whole: bool = True, capacity: int = 1000, batch: int = 3) -> OrtCache:
    return OrtCache(object(), INFOS, capacity, batch, "cpu", whole)


def fill(made: OrtCache, slots: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    values = [random.standard_normal((3, 2, slots, 3)).astype(np.float32) for _ in INFOS]
    for tensor, value in zip(made.tensors.values(), values, strict=True):
        tensor.to_host()[:, :, :slots] = value
    return values


def test_one_that_is_looked_at_in_part_stays_as_it_is():
    made = cache(whole=False)
    before = dict(made.tensors)
    assert made.slots_for(64, 900) == 64
    assert (made.slots, made.tensors) == (1000, before)


def test_it_grows_by_what_is_needed_and_a_little_more_and_keeps_what_is_in_it():
    made = cache()
    assert made.slots == KV_BUCKET
    values = fill(made, KV_BUCKET)
    seen = []
    for needed in range(1, 1001):
        made.bindings[0, 1, ()] = (None, {})
        slots = made.slots_for(needed, needed)
        assert needed <= slots <= min(needed * 9 // 8 + 2 * KV_BUCKET, 1000)
        if not seen or slots != seen[-1]:
            seen.append(slots)
            assert not made.bindings or slots == KV_BUCKET  # the memory moved
        for tensor, value in zip(made.tensors.values(), values, strict=True):
            assert tensor.shape == (3, 2, slots, 3)
            np.testing.assert_array_equal(tensor.to_host()[:, :, :KV_BUCKET], value)
            assert not tensor.to_host()[:, :, KV_BUCKET:].any()
    assert seen[-1] == 1000
    assert len(seen) < 16


def test_it_shrinks_when_half_of_it_would_do_and_keeps_what_is_needed():
    made = cache()
    made.slots_for(640, 640)
    values = fill(made, 640)
    assert made.slots_for(64, 384) == 640  # another lane needs more than half
    assert made.slots_for(64, 320) == 320
    for tensor, value in zip(made.tensors.values(), values, strict=True):
        np.testing.assert_array_equal(tensor.to_host(), value[:, :, :320])


def test_what_was_saved_goes_back_into_a_shorter_one():
    made = cache()
    made.slots_for(500, 500)
    values = fill(made, 500)
    saved = made.save(1, 400)
    for part, value in zip(saved, values, strict=True):
        np.testing.assert_array_equal(part, value[1, :, :400])
    other = cache()
    other.load(2, saved)
    assert 400 <= other.slots < 500 + KV_BUCKET
    for part, again in zip(saved, other.save(2, 400), strict=True):
        np.testing.assert_array_equal(part, again)
    assert not any(part.any() for part in other.save(0, 400))


@pytest.mark.parametrize("enough_for", [0, 1])
def test_no_memory_is_an_error_that_says_what_to_do_and_leaves_the_cache_as_it_was(monkeypatch, enough_for):
    made, real, blocks = cache(), ort_cache.Block, []
    values = fill(made, KV_BUCKET)
    made.bindings[0, 1, ()] = (None, {})

    def scarce(*asked):
        if len(blocks) == enough_for:
            raise MemoryError
        blocks.append(real(*asked))
        return blocks[-1]

    monkeypatch.setattr(ort_cache, "Block", scarce)
    with pytest.raises(EngineError, match=r"no memory for 3 x 1000 slots; lower max_new_tokens"):
        made.slots_for(1000, 1000)
    assert made.slots == made.slots_for(KV_BUCKET, KV_BUCKET) == KV_BUCKET
    assert made.bindings
    monkeypatch.undo()
    for slots in (KV_BUCKET, 1000):
        assert made.slots_for(slots, slots) == slots
        for tensor, value in zip(made.tensors.values(), values, strict=True):
            assert tensor.shape == (3, 2, slots, 3)
            np.testing.assert_array_equal(tensor.to_host()[:, :, :KV_BUCKET], value)
    assert not made.bindings
