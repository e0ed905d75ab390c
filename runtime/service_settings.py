"""How a service works, and what that takes: memory, lanes, shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..bundle.errors import RequestError, field_error
from ..bundle.limits import ShapeLimits
from ..bundle.tuned import least_rows
from .calibrate import calibrate
from .checks import check_integer
from .decoder import Decoder
from .pair import Pair, prefill_rows
from .policy import AdaptiveRows, FixedRows, RowPolicy, few_counts
from .scheduler import Scheduler


@dataclass(frozen=True)
class ServiceSettings:
    """How a service works.

    Attributes:
        max_requests: most requests that run at once; each has a part of the caches.
        max_waiting: most requests that wait; one more is refused with BusyError.
        max_length: longest sequence in tokens, prompt and output; None takes the bundle's. Each of
            `max_requests` may fill caches of this length. They are allocated when the service opens; but
            where the target's graph looks at whole caches (`target.cpu-batch`, say), they begin short and
            grow, so that an EngineError for memory can come while serving.
        kv_budget_bytes: most memory for keys and values, of running requests and of sessions between their
            requests; None allows the sessions together as much as the running ones.
        verify_rows: rows the target verifies in a round; None chooses for each round what promises the most
            tokens. Requests with a temperature have a fixed number in any case: all proposals, or this.
        prefill_rows: most rows of prompts computed in one cycle while other requests wait for their round.
    """

    max_requests: int = 8
    max_waiting: int = 64
    max_length: int | None = None
    kv_budget_bytes: int | None = None
    verify_rows: int | None = None
    prefill_rows: int = 128


def scheduler_from_settings(decoder: Decoder, settings: ServiceSettings) -> tuple[Scheduler, int, int]:
    """Allocate lanes over a decoder's engines.

    Returns:
        The scheduler; bytes of keys and values of its lanes, at most; bytes that are left for sessions.

    Raises:
        RequestError: a setting is out of range, or the caches do not fit into the budget.
        EngineError: there is no memory for the caches, or the target's engine failed.
    """
    for name, least in (("max_requests", 1), ("max_waiting", 0), ("prefill_rows", 1)):
        check_integer(name, getattr(settings, name), f">= {least}", least)
    manifest, exact, max_length = decoder.manifest, decoder.settings.exact, decoder.settings.max_length
    target, draft = decoder.runners
    fixed, lanes = target.limits, settings.max_requests
    if fixed is not None and lanes > fixed.batch:
        raise field_error(
            RequestError,
            "max_requests",
            lanes,
            f"at most {fixed.batch}, the batch that the engines were built for",
            "build them again with a larger --max-batch",
        )
    capacity = (ShapeLimits.from_manifest(manifest, max_length) if fixed is None else fixed).capacity
    lanes_bytes = sum(m.cache.bytes(lanes, capacity) for m in (manifest.target, manifest.draft))
    budget = 2 * lanes_bytes if settings.kv_budget_bytes is None else settings.kv_budget_bytes
    check_integer(
        "kv_budget_bytes",
        budget,
        f">= {lanes_bytes}, for {lanes} requests of {max_length} tokens",
        lanes_bytes,
        todo="lower max_requests or max_length",
    )
    most = manifest.draft.proposals + 1
    rows = most if settings.verify_rows is None else settings.verify_rows
    check_integer("verify_rows", rows, f"1 to {most} (anchor and proposals)", 1, most)
    pair = Pair(manifest, target, draft, capacity, lanes, exact)
    policy: RowPolicy = FixedRows(rows)
    if settings.verify_rows is None:
        fewest = partial(least_rows, target.info.passes, exact=exact)
        policy = adaptive = AdaptiveRows(most, fewest, None if fixed is None else few_counts(most))
        calibrate(pair, manifest.draft, adaptive)
    parts = prefill_rows(fixed, settings.prefill_rows)
    scheduler = Scheduler(pair, manifest.draft, parts, settings.prefill_rows, policy, rows)
    return scheduler, lanes_bytes, budget - lanes_bytes
