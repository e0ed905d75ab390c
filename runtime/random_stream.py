"""Random numbers of one request, each named by what it is for and by the token it decides.

A number is a hash of (seed, use, position). There is no state, so nothing that other requests, batches or
threads do can shift it: the same seed and the same rounds give the same text. The same rounds: a seed does
not promise the same text for another number of proposals, another draft, or plain decoding, and not for
another engine either, whose logits differ in the last bits.

A proposal that was rejected leaves numbers behind that a later round asks for again: the proposals behind it
were drawn, and their positions are drawn once more. That is exact. A committed token depends only on numbers
of positions up to its own: a block is drawn and accepted from left to right, and acceptance ends at the first
rejection. So when a round ends with position n, everything that is known about the text, the end of the round
included, is a function of the numbers up to n. Those behind n are still independent of it.

The converse is a duty of the caller: what is drawn or verified at a position must not depend on a number of a
later one, and two generations of one conversation must not share a seed, since both count from 0.
"""

from __future__ import annotations

import enum
import hashlib
import secrets

_SEED_BYTES = 16  # any 64-bit seed, signed or not, with room


class Use(enum.Enum):
    """What a number is for. The values are part of the hash: they must not change."""

    PROPOSAL = 0
    ACCEPTANCE = 1
    RESIDUAL = 2  # a token that was not proposed: after a rejection, or behind the last proposal


class RandomStream:
    """The random numbers of one request.

    Attributes:
        seed: the seed in use, also if it was chosen here.
    """

    def __init__(self, seed: int | None = None) -> None:
        """Begin a stream.

        Args:
            seed: -2**63 to 2**64 - 1; None takes a fresh one from the operating system.
        """
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        key = self.seed.to_bytes(_SEED_BYTES, "little", signed=True)
        self._keyed = hashlib.blake2b(key=key, digest_size=8)

    def uniform(self, use: Use, position: int) -> float:
        """A number in [0, 1) with 53 bits.

        Args:
            use: what it is for.
            position: index of the output token it decides; 0 is the first one generated.
        """
        state = self._keyed.copy()
        state.update(bytes([use.value]) + position.to_bytes(8, "little"))
        return (int.from_bytes(state.digest(), "little") >> 11) * 2.0**-53
