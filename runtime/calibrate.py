"""What passes cost on this machine, measured when a service opens."""

from __future__ import annotations

from time import perf_counter

from ..bundle.limits import EXACT_ROWS
from ..bundle.manifest import DraftInfo
from ..bundle.tensors import LOGIT_SUMS, PROPOSALS
from .lane import Lane
from .pair import Pair
from .passes import DraftPass, TargetPass
from .policy import AdaptiveRows
from .stats import Phase

_REPEATS = 2  # the first finds memory and kernels cold


def calibrate(pair: Pair, info: DraftInfo, policy: AdaptiveRows) -> None:
    """Tell a policy what a few passes over lanes that nobody has yet cost; they are as new afterwards.

    Raises:
        EngineError: the target's engine failed.
    """
    most = info.proposals + 1
    for count in sorted({1, len(pair.lanes)}):
        lanes = pair.lanes[:count]
        least = policy.least(count)
        for rows in sorted({least, max(2, least), max(most // 2, least), most}, reverse=True):
            for _ in range(_REPEATS):
                policy.verify_cost.measure(count, rows, _verify_ms(pair, lanes, rows))
        for _ in range(_REPEATS):
            policy.draft_cost.measure(count, 1, _draft_ms(pair, info, lanes))
        for lane in lanes:
            pair.free(lane)


def _verify_ms(pair: Pair, lanes: list[Lane], rows: int) -> float:
    began = perf_counter()
    pair.run_target([(lane, TargetPass([0] * rows, rows, Phase.VERIFY, True)) for lane in lanes])
    took_ms = (perf_counter() - began) * 1000.0
    for lane in lanes:
        lane.features = lane.features[-1:]
    return took_ms


def _draft_ms(pair: Pair, info: DraftInfo, lanes: list[Lane]) -> float:
    _verify_ms(pair, lanes, EXACT_ROWS)
    for lane in lanes:
        lane.features = lane.features[-1:]
        lane.target.commit(1)
    asked = DraftPass(0, info.proposals, (PROPOSALS, LOGIT_SUMS), Phase.DRAFT)
    began = perf_counter()
    pair.run_draft([(lane, asked) for lane in lanes])
    return (perf_counter() - began) * 1000.0
