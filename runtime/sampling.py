"""How a request wants its tokens chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from ..bundle.errors import RequestError, field_error
from .checks import check_integer, check_number


@dataclass(frozen=True)
class Sampling:
    """The settings, in the order in which they act on the target's logits.

    The order is that of transformers: `logit_bias`, `repetition_penalty`, presence and frequency penalties,
    the ban of stop tokens while too few tokens are out, `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        logit_bias: added to the logits of these token ids.
        repetition_penalty: logits of tokens in the prompt or the output are divided by it if positive, and
            multiplied if negative. 1 does nothing, more discourages.
        presence_penalty: subtracted from the logits of tokens in the output, -2 to 2.
        frequency_penalty: subtracted once for each time the token is in the output, -2 to 2.
        temperature: divides the logits. 0 takes the best token, the lowest id if several are; the three
            filters then change nothing.
        top_k: only the k best tokens, value descending, then id ascending: exactly k, also on a tie
            (transformers keeps all that tie with the last one).
        top_p: only the best tokens that together first reach this probability, in the same order.
        min_p: only tokens at least this fraction as probable as the best one.
        seed: of the request's random numbers; None takes a fresh one. See `random_stream`.
        logprobs: None gives none; n gives the log-probability of every token and of the n best. They are the
            target's own: softmax of its logits as they are, at temperature 1 and before everything above.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Keep a copy of the bias that nobody can change."""
        if isinstance(self.logit_bias, Mapping):  # anything else is for `check` to refuse
            object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def __reduce__(self) -> tuple[type[Sampling], tuple[object, ...]]:
        """Pickle and copy by the settings: a mapping proxy can do neither."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Sampling, tuple((values | {"logit_bias": dict(self.logit_bias)}).values())

    @property
    def has_penalties(self) -> bool:
        """Whether logits are changed before the temperature divides them."""
        return bool(self.logit_bias) or self.repetition_penalty != 1.0 or self.counts_output

    @property
    def counts_output(self) -> bool:
        """Whether it matters how often a token is in the output."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_logits(self) -> bool:
        """Whether the target's greedy choices are not enough."""
        return self.temperature > 0.0 or self.has_penalties or self.logprobs is not None

    def check(self, vocab_size: int) -> None:
        """Refuse settings that make no sense.

        Raises:
            RequestError: names the setting, what it is and what it may be.
        """
        check_number("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0.0)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, "an integer >= 1, or None for no limit", low=1)
        check_number("top_p", self.top_p, "0 < top_p <= 1", lambda x: 0.0 < x <= 1.0)
        check_number("min_p", self.min_p, "0 <= min_p <= 1", lambda x: 0.0 <= x <= 1.0)
        check_number(
            "repetition_penalty", self.repetition_penalty, "0.01 to 100", lambda x: 0.01 <= x <= 100.0
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), "-2 to 2", lambda x: -2.0 <= x <= 2.0)
        _check_bias(self.logit_bias, vocab_size)
        if self.seed is not None:
            expected = "an integer of 64 bits, or None for a fresh one"
            check_integer("seed", self.seed, expected, low=-(2**63), high=2**64 - 1)
        if self.logprobs is not None:
            expected = f"0 to {vocab_size} (the vocabulary), or None for none"
            check_integer("logprobs", self.logprobs, expected, low=0, high=vocab_size)


def _check_bias(bias: object, vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise field_error(RequestError, "logit_bias", bias, "a mapping from token ids to numbers")
    for token, value in bias.items():
        check_integer(
            "logit_bias", token, f"token ids, 0 to {vocab_size - 1}, as keys", low=0, high=vocab_size - 1
        )
        check_number(
            f"logit_bias[{token}]", value, "a number of at most 1e30 in size", lambda x: abs(x) <= 1e30
        )
