"""Numbers that depend on seed, use and position, and on nothing else."""

import hashlib

import pytest

from chi_square import chi_square
from dflash_deploy.runtime.random_stream import RandomStream, Use


def test_a_number_does_not_depend_on_what_was_asked_before():
    names = [(use, position) for use in Use for position in range(50)]
    stream, other = RandomStream(7), RandomStream(7)
    forwards = {name: stream.uniform(*name) for name in names}
    backwards = {name: other.uniform(*name) for name in reversed(names)}
    assert forwards == backwards
    assert len(set(forwards.values())) == len(names)


def test_seeds_keep_their_meaning():
    """A change here changes the text of every seed that anybody wrote down.

    The first one by hand: blake2b, keyed with the seed as 16 bytes, of one byte for the use and eight for the
    position; its first 8 bytes as a little-endian integer, the upper 53 bits.
    """
    hashed = hashlib.blake2b(bytes(9), key=bytes(16), digest_size=8).digest()
    assert RandomStream(0).uniform(Use.PROPOSAL, 0) == (int.from_bytes(hashed, "little") >> 11) / 2**53
    assert RandomStream(0).uniform(Use.PROPOSAL, 0) == 0.05783455508265678
    assert RandomStream(-1).uniform(Use.ACCEPTANCE, 1) == 0.741115548646868
    assert RandomStream(2**64 - 1).uniform(Use.RESIDUAL, 10**6) == 0.42195139018687255


def test_numbers_are_uniform_over_positions_and_over_seeds():
    for numbers in (
        [RandomStream(3).uniform(Use.PROPOSAL, position) for position in range(20_000)],
        [RandomStream(seed).uniform(Use.RESIDUAL, 5) for seed in range(20_000)],
    ):
        assert all(0.0 <= number < 1.0 for number in numbers)
        counts = [0] * 50
        for number in numbers:
            counts[int(number * 50)] += 1
        assert chi_square(counts, [1 / 50] * 50) > 1e-4
    assert any(number * 2**52 % 1 for number in numbers), "53 bits"


def test_uses_are_independent():
    stream = RandomStream(1)
    for one, other in ((Use.PROPOSAL, Use.ACCEPTANCE), (Use.ACCEPTANCE, Use.RESIDUAL)):
        counts = [0] * 16
        for position in range(8_000):
            counts[int(stream.uniform(one, position) * 4) * 4 + int(stream.uniform(other, position) * 4)] += 1
        assert chi_square(counts, [1 / 16] * 16) > 1e-4


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_any_seed_of_64_bits(seed):
    assert RandomStream(seed).seed == seed
    assert RandomStream(seed).uniform(Use.PROPOSAL, 0) == RandomStream(seed).uniform(Use.PROPOSAL, 0)


def test_without_a_seed_each_request_gets_its_own_and_can_be_repeated():
    streams = [RandomStream(None) for _ in range(20)]
    assert len({stream.seed for stream in streams}) == 20
    for stream in streams:
        again = RandomStream(stream.seed)
        assert again.uniform(Use.PROPOSAL, 3) == stream.uniform(Use.PROPOSAL, 3)
