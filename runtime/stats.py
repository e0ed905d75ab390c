"""What a generation did and how long it took."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Mode(enum.Enum):
    """How tokens are made."""

    SPECULATIVE = "speculative"
    PLAIN = "plain"


class Phase(enum.Enum):
    """What an engine call was for."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one generation. Times are wall clock in milliseconds.

    Attributes:
        mode: as asked for.
        prompt_tokens: length of the prompt.
        new_tokens: tokens produced.
        rounds: passes of the target behind the prefill, plain steps included.
        acceptance_lengths: tokens each round added to the output, cut as the output is (z-lab's
            ``acceptance_lengths``): the token that prefill gives is not in it.
        prefill_ms: engine calls for the prompt.
        draft_ms: engine calls of the draft in the rounds.
        verify_ms: engine calls of the target in the rounds.
        total_ms: all the time spent, without the time between two reads of the stream.
        draft_failures: times the draft gave up; the request went on plain from there.
        draft_failure: why, as text.
        target_kv_length: committed slots of the target's cache at the end.
        draft_kv_length: committed slots of the draft's cache at the end; 0 without a draft.
    """

    mode: Mode
    prompt_tokens: int
    new_tokens: int
    rounds: int
    acceptance_lengths: tuple[int, ...]
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    total_ms: float
    draft_failures: int
    draft_failure: str | None
    target_kv_length: int
    draft_kv_length: int

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round; 0 if there was no round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    @property
    def decode_ms(self) -> float:
        """Everything but the prefill."""
        return self.total_ms - self.prefill_ms

    @property
    def other_ms(self) -> float:
        """Everything that is not an engine call."""
        return self.total_ms - self.prefill_ms - self.draft_ms - self.verify_ms

    @property
    def other_share(self) -> float:
        """`other_ms` as a share of `decode_ms`."""
        return self.other_ms / self.decode_ms if self.decode_ms > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: the tokens behind the first one over `decode_ms`; 0 if there are none."""
        return 1000.0 * (self.new_tokens - 1) / self.decode_ms if self.new_tokens > 1 else 0.0


@dataclass
class Recorder:
    """Gathers the figures while a generation runs."""

    mode: Mode
    prompt_tokens: int
    ms: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    total_ms: float = 0.0
    acceptance_lengths: list[int] = field(default_factory=list)
    new_tokens: int = 0
    draft_failures: int = 0
    draft_failure: str | None = None

    def stats(self, target_kv_length: int, draft_kv_length: int) -> GenerationStats:
        """Close the books."""
        return GenerationStats(
            mode=self.mode,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            rounds=len(self.acceptance_lengths),
            acceptance_lengths=tuple(self.acceptance_lengths),
            prefill_ms=self.ms[Phase.PREFILL],
            draft_ms=self.ms[Phase.DRAFT],
            verify_ms=self.ms[Phase.VERIFY],
            total_ms=self.total_ms,
            draft_failures=self.draft_failures,
            draft_failure=self.draft_failure,
            target_kv_length=target_kv_length,
            draft_kv_length=draft_kv_length,
        )
