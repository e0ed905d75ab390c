"""From runs to figures: rates, means, and where the tokens of two ways differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.stats import GenerationStats
from .measure import Sample, median_sample
from .own import PLAIN, PLAIN_EXACT, SPECULATIVE

Runs = Sequence[Sequence[Sample]]
"""Of one way: of each task, of each repeat."""


def way_figures(runs: Runs) -> dict[str, Any]:
    """Sums over all tasks, of the median run of each, as rates and means.

    Returns:
        ``tokens_per_s`` is decoding without the prompt, ``end_to_end_tokens_per_s`` with it,
        ``first_token_ms`` the mean over prompts. ``tokens_per_s_by_repeat`` shows how much the machine
        wavered. A bundle's way has its passes as well: ``prefill_ms`` a prompt, the other times a round (a
        plain step is a round of one token), and ``other_share``, the time outside engine calls as a share of
        decoding.
    """
    chosen = median_samples(runs)
    figures: dict[str, Any] = {
        "tokens_per_s": _rate(chosen),
        "end_to_end_tokens_per_s": 1000.0
        * ratio(sum(len(s.ids) for s in chosen), sum(s.total_ms for s in chosen)),
        "first_token_ms": sum(s.first_token_ms for s in chosen) / len(chosen),
        "tokens": sum(len(s.ids) for s in chosen),
        "tokens_per_s_by_repeat": [_rate(repeat) for repeat in zip(*runs, strict=True)],
    }
    stats = [s.stats for s in chosen if s.stats is not None]
    return {**figures, **_passes(stats)} if stats else figures


def _rate(samples: Sequence[Sample]) -> float:
    return 1000.0 * ratio(sum(s.decoded for s in samples), sum(s.decode_ms for s in samples))


def _passes(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    rounds = sum(s.rounds for s in stats)
    decode_ms, other_ms = sum(s.decode_ms for s in stats), sum(s.other_ms for s in stats)
    return {
        "rounds": rounds,
        "prefill_ms": sum(s.prefill_ms for s in stats) / len(stats),
        "verify_ms": sum(s.verify_ms for s in stats) / max(rounds, 1),
        "draft_ms": sum(s.draft_ms for s in stats) / max(rounds, 1),
        "other_ms": other_ms / max(rounds, 1),
        "other_share": ratio(other_ms, decode_ms),
    }


def bundle_figures(plain: Runs, plain_exact: Runs, speculative: Runs) -> dict[str, Any]:
    """The figures of a bundle's three ways, and what speculation was worth.

    Returns:
        ``speedup`` is speculative over plain ``tokens_per_s``. ``bound`` is the speedup if nothing but the
        engines took time: acceptance length / (verify + draft) x plain step. ``acceptance_by_position`` is,
        for each place of a block, the share of its verified proposals that the target agreed with, and
        ``verified_by_position`` how many there were. ``tokens_identical`` compares speculative with
        plain_exact; ``prompts_unlike_fast_plain`` counts the prompts where `plain` chose otherwise somewhere.
    """
    runs = {PLAIN: plain, PLAIN_EXACT: plain_exact, SPECULATIVE: speculative}
    ways = {name: way_figures(of_way) for name, of_way in runs.items()}
    stats = [s.stats for s in median_samples(speculative) if s.stats is not None]
    rounds = ways[SPECULATIVE]["rounds"]
    acceptance = ratio(sum(sum(s.acceptance_lengths) for s in stats), rounds)
    speedup = ratio(ways[SPECULATIVE]["tokens_per_s"], ways[PLAIN]["tokens_per_s"])
    round_ms = ways[SPECULATIVE]["verify_ms"] + ways[SPECULATIVE]["draft_ms"]
    bound = acceptance * ratio(ways[PLAIN]["verify_ms"], round_ms)
    proposed, accepted = _by_place([s.proposed for s in stats]), _by_place([s.accepted for s in stats])
    unlike_exact = differences(speculative, plain_exact)
    return {
        **ways,
        "speedup": speedup,
        "acceptance_length": acceptance,
        "acceptance_by_position": [ratio(a, p) for a, p in zip(accepted, proposed, strict=True)],
        "verified_by_position": proposed,
        "bound": bound,
        "bound_reached": ratio(speedup, bound),
        "tokens_identical": unlike_exact["prompts"] == 0,
        "prompts_unlike_fast_plain": differences(speculative, plain)["prompts"],
        "rounds": rounds,
        "draft_failures": sum(s.draft_failures for s in stats),
    }


def _by_place(counts: Sequence[tuple[int, ...]]) -> list[int]:
    longest = max(map(len, counts), default=0)
    return [sum(c[place] for c in counts if place < len(c)) for place in range(longest)]


def differences(runs: Runs, reference: Runs) -> dict[str, Any]:
    """Where the tokens of a way leave those of another.

    Every repeat counts: two runs of the same way must not differ, either.

    Returns:
        ``prompts``: in how many there is a difference; ``first_token``: the earliest place of one, counted
        from 0, None if there is none; ``first_tokens``: that of each prompt.
    """
    places = [
        min(
            (
                place
                for run in of_task
                for place in [first_difference(run.ids, expected[0].ids)]
                if place >= 0
            ),
            default=None,
        )
        for of_task, expected in zip(runs, reference, strict=True)
    ]
    found = [place for place in places if place is not None]
    return {"prompts": len(found), "first_token": min(found, default=None), "first_tokens": places}


def first_difference(some: Sequence[int], others: Sequence[int]) -> int:
    """Place of the first token that differs, or that only one has; -1 if there is none."""
    for place, (a, b) in enumerate(zip(some, others, strict=False)):
        if a != b:
            return place
    return -1 if len(some) == len(others) else min(len(some), len(others))


def median_samples(runs: Runs) -> list[Sample]:
    """The median run of each task."""
    return [median_sample(of_task) for of_task in runs]


def ratio(part: float, whole: float) -> float:
    """A quotient; 0 if there is nothing to divide by."""
    return part / whole if whole > 0 else 0.0
