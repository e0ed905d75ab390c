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
        proposed: for each place of a block, how many proposals were verified there.
        accepted: how many of these the target agreed with.
        cached_tokens: tokens of the prompt that were in the cache already.
        queue_ms: time between submission and the first pass; 0 without a service.
        first_token_ms: time between submission, or the first read, and the first token.
        prefill_ms: engine calls for the prompt.
        draft_ms: engine calls of the draft in the rounds. A call for several requests counts whole for each.
        verify_ms: engine calls of the target in the rounds.
        total_ms: all the time spent, without the time between two reads of the stream; in a service the time
            from the first pass to the last.
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
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    cached_tokens: int
    queue_ms: float
    first_token_ms: float
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
    def acceptance_by_position(self) -> tuple[float, ...]:
        """For each place of a block, the share of its verified proposals that the target agreed with."""
        return tuple(a / p for a, p in zip(self.accepted, self.proposed, strict=True))

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
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    new_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0
    first_token_ms: float = 0.0
    draft_failures: int = 0
    draft_failure: str | None = None

    def round(self, proposed: int, accepted: int, length: int) -> None:
        """Book a round: proposals verified, proposals the target agreed with, tokens produced."""
        self.acceptance_lengths.append(length)
        self.new_tokens += length
        missing = proposed - len(self.proposed)
        self.proposed += [0] * missing
        self.accepted += [0] * missing
        for place in range(proposed):
            self.proposed[place] += 1
            self.accepted[place] += place < accepted

    def stats(self, target_kv_length: int, draft_kv_length: int) -> GenerationStats:
        """Close the books."""
        return GenerationStats(
            mode=self.mode,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            rounds=len(self.acceptance_lengths),
            acceptance_lengths=tuple(self.acceptance_lengths),
            proposed=tuple(self.proposed),
            accepted=tuple(self.accepted),
            cached_tokens=self.cached_tokens,
            queue_ms=self.queue_ms,
            first_token_ms=self.first_token_ms,
            prefill_ms=self.ms[Phase.PREFILL],
            draft_ms=self.ms[Phase.DRAFT],
            verify_ms=self.ms[Phase.VERIFY],
            total_ms=self.total_ms,
            draft_failures=self.draft_failures,
            draft_failure=self.draft_failure,
            target_kv_length=target_kv_length,
            draft_kv_length=draft_kv_length,
        )
