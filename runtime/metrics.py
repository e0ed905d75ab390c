"""A service's figures for Prometheus: read when they are asked for, nothing is counted twice.

Needs `prometheus_client`, which is imported on use: ``pip install 'dflash-deploy[metrics]'``. Times are in
seconds and sizes in bytes, as Prometheus wants them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..bundle.errors import OutputError, ProviderError, RequestError
from .accept import FinishReason
from .service import Service
from .service_stats import ServiceStats
from .stats import Phase

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PREFIX = "dflash_"
FAILED = "error"  # the `reason` of requests that ended in an error


class ServiceCollector:
    """Gives the figures of a service as Prometheus metrics, each time they are collected."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """The figures of now."""
        return metrics_from_stats(self._service.stats())

    def describe(self) -> Iterable[Metric]:
        """The same: a registry asks for the names, to refuse those it has."""
        return self.collect()


def register_metrics(service: Service, registry: CollectorRegistry) -> ServiceCollector:
    """Let a registry collect a service's figures; `registry.unregister` ends it.

    Args:
        service: may be closed later: its figures stay.
        registry: one for each service: the metrics have no label for it.

    Raises:
        ProviderError: `prometheus_client` is not installed.
        RequestError: the registry has these metrics already.
    """
    _client()
    collector = ServiceCollector(service)
    try:
        registry.register(collector)
    except ValueError as cause:
        raise RequestError(
            f"registry: has a service's metrics already ({cause}); give each service a registry of its own"
        ) from cause
    return collector


class MetricsServer:
    """An HTTP server that a Prometheus server scrapes; close it, or use it as a context manager.

    Attributes:
        port: where it listens.
    """

    def __init__(self, server: Any, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Listen no more. Harmless twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(service: Service, port: int = 9464, address: str = "127.0.0.1") -> MetricsServer:
    """Serve a service's figures, and nothing else, at ``http://ADDRESS:PORT/metrics`` from a thread.

    Args:
        service: see `register_metrics`.
        port: 0 takes a free one.
        address: the default is reached from this machine only; "0.0.0.0" from everywhere. Whoever reaches it
            reads the figures: it asks for no password.

    Raises:
        ProviderError: `prometheus_client` is not installed.
        OutputError: it cannot listen there.
    """
    client = _client()
    registry = client.CollectorRegistry(auto_describe=True)
    register_metrics(service, registry)
    try:
        server, thread = client.start_http_server(port, address, registry)
    except (OSError, OverflowError) as cause:
        raise OutputError(
            f"metrics: cannot listen on {address}:{port} ({cause}); choose another port or address"
        ) from cause
    return MetricsServer(server, thread)


def metrics_from_stats(stats: ServiceStats) -> Iterator[Metric]:
    """Figures as metrics. What each means is said at `ServiceStats`."""
    _client()
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    def counter(name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(PREFIX + name, text, value=value)

    def counters(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[label])
        for given, value in values:
            family.add_metric([given], value)
        return family

    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(PREFIX + name, text, value=value)

    def summary(name: str, text: str, count: int, sum_ms: float) -> Metric:
        return SummaryMetricFamily(PREFIX + name, text, count_value=count, sum_value=sum_ms / 1000.0)

    # Reasons that did not occur yet are there too: a rate needs the 0 before the first 1.
    ended = {reason.value: stats.finished.get(reason.value, 0) for reason in FinishReason}
    ended[FAILED] = stats.failed
    phases = {Phase.PREFILL: stats.prefill_ms, Phase.DRAFT: stats.draft_ms, Phase.VERIFY: stats.verify_ms}

    yield counter("requests_submitted", "Requests taken into the queue.", stats.submitted)
    yield counter("requests_refused", "Requests refused because the queue was full.", stats.refused)
    yield counters("requests_ended", "Requests that ended, by reason.", "reason", ended.items())
    yield gauge("requests_running", "Requests that run now.", stats.running)
    yield gauge("requests_waiting", "Requests that wait now.", stats.waiting)
    yield counter("prompt_tokens", "Prompt tokens of requests that ended.", stats.prompt_tokens)
    yield counter("cached_tokens", "Prompt tokens found in a session's cache.", stats.cached_tokens)
    yield counter("new_tokens", "Tokens produced, of requests that ended.", stats.new_tokens)
    yield counter("rounds", "Verify passes, counted for each request in them.", stats.rounds)
    places = range(1, len(stats.proposed) + 1)
    for name, text, values in (
        ("proposals_verified", "Draft tokens verified, by place in the block.", stats.proposed),
        ("proposals_accepted", "Draft tokens that stood, by place in the block.", stats.accepted),
    ):
        yield counters(name, text, "position", zip(map(str, places), values, strict=True))
    yield gauge("acceptance_length", "Mean tokens a round since the start.", stats.acceptance_length)
    yield counter(
        "draft_failures",
        "Requests that went on without their draft, because it failed.",
        stats.draft_failures,
    )
    yield summary(
        "queue_seconds", "Time in the queue, of requests that ended.", sum(ended.values()), stats.queue_ms
    )
    yield summary(
        "first_token_seconds",
        "Time from submission to the first token.",
        stats.with_tokens,
        stats.first_token_ms,
    )
    yield counters(
        "phase_seconds",
        "Time in engine calls; a call for several requests counts whole for each.",
        "phase",
        ((phase.value, ms / 1000.0) for phase, ms in phases.items()),
    )
    yield counter("cycles", "Rounds of the service.", stats.cycles)
    yield counter("cycle_requests", "Requests in these rounds, summed.", stats.cycle_requests)
    yield counter("busy_seconds", "Time in these rounds.", stats.busy_ms / 1000.0)
    yield gauge("kv_lanes_bytes", "Memory of the running requests' caches, used or not.", stats.lanes_bytes)
    yield gauge("kv_sessions_bytes", "Memory that sessions take between their requests.", stats.kept_bytes)
    yield gauge("kv_sessions", "Sessions that have a cache between their requests.", stats.kept_sessions)
    yield counter("kv_evictions", "Session caches given up for want of room.", stats.evictions)


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as cause:
        raise ProviderError(
            "prometheus_client: is not installed, and metrics need it; pip install 'dflash-deploy[metrics]'"
        ) from cause
    return prometheus_client
