"""A service's figures for Prometheus: in a real registry, and over HTTP."""

from __future__ import annotations

import ast
import logging
import socket
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from dflash_deploy.bundle.errors import EngineError, OutputError, ProviderError, RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.metrics import register_metrics, serve_metrics
from dflash_deploy.runtime.service import Service, ServiceSettings
from toy_engines import at_slot, toy_decoder

prometheus_client = pytest.importorskip("prometheus_client")
ROOT = Path(__file__).parents[2]


SETTINGS = ServiceSettings(max_requests=2, verify_rows=4, kv_budget_bytes=1 << 20)


def _service(**options: object) -> Service:
    return Service(toy_decoder(**options), SETTINGS, own=True)


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry(auto_describe=True)


def _broken_draft(call: int, outputs: dict) -> None:
    if call > 2:
        raise EngineError("draft broke")


def test_they_are_the_services_own_figures(registry, monkeypatch):
    """Every figure, after requests that ended in every way but one."""
    decoder = toy_decoder(spoiler=at_slot(2))
    passes, unlimited = threading.Semaphore(1), threading.Event()
    unlimited.set()
    monkeypatch.setattr(
        decoder.runners[0], "before", lambda _: unlimited.is_set() or passes.acquire(timeout=30)
    )
    with Service(decoder, SETTINGS, own=True) as service:
        register_metrics(service, registry)
        with service.session() as session:
            first = session.submit([1, 2, 3], 30).result()
            session.submit([1, 2, 3, *first.ids], 20).result()
            service.generate([4, 5], 10)
            unlimited.clear()  # one pass, so that the request is not through before it is cancelled
            ticket = service.submit([4, 5], 300)
            next(ticket)
            ticket.cancel()
            unlimited.set()
            passes.release()
            ticket.result()
            stats = service.stats()
            value = registry.get_sample_value

            for name in ("submitted", "refused", "prompt_tokens", "cached_tokens", "new_tokens", "rounds"):
                metric = f"requests_{name}" if name in ("submitted", "refused") else name
                assert value(f"dflash_{metric}_total") == getattr(stats, name), name
            assert stats.cached_tokens > 0
            for name in ("cycles", "cycle_requests", "draft_failures"):
                assert value(f"dflash_{name}_total") == getattr(stats, name)
            for reason, count in (
                ("length", 3),
                ("cancelled", 1),
                ("stop", 0),
                ("deadline", 0),
                ("error", 0),
            ):
                assert value("dflash_requests_ended_total", {"reason": reason}) == count, reason
            assert len(stats.proposed) == 3
            for place, (proposed, accepted) in enumerate(zip(stats.proposed, stats.accepted, strict=True), 1):
                position = {"position": str(place)}
                assert value("dflash_proposals_verified_total", position) == proposed > 0
                assert value("dflash_proposals_accepted_total", position) == accepted
            assert accepted == 0 < stats.accepted[0]  # the spoilt slot is the third
            assert value("dflash_acceptance_length") == stats.acceptance_length > 2
            assert value("dflash_queue_seconds_count") == 4
            assert value("dflash_queue_seconds_sum") == stats.queue_ms / 1000
            assert value("dflash_first_token_seconds_count") == stats.with_tokens == 4
            assert value("dflash_first_token_seconds_sum") == stats.first_token_ms / 1000 > 0
            for phase in ("prefill", "draft", "verify"):
                seconds = getattr(stats, f"{phase}_ms") / 1000
                assert value("dflash_phase_seconds_total", {"phase": phase}) == seconds > 0
            assert value("dflash_busy_seconds_total") == stats.busy_ms / 1000 > 0
            assert value("dflash_kv_lanes_bytes") == stats.lanes_bytes > 0
            assert value("dflash_kv_sessions_bytes") == stats.kept_bytes > 0
            assert value("dflash_kv_sessions") == 1
            assert value("dflash_kv_evictions_total") == 0
            assert (value("dflash_requests_running"), value("dflash_requests_waiting")) == (0, 0)
        assert value("dflash_kv_sessions_bytes") == 0
    assert value("dflash_requests_submitted_total") == 4  # also behind the end


def test_what_fails_is_counted(registry):
    with _service(fault=_broken_draft) as service:
        register_metrics(service, registry)
        service.generate([1, 2, 3], 60)
        service.decoder.toy_target.fail_at = 0
        with pytest.raises(EngineError):
            service.generate([1, 2, 3], 60)
    assert registry.get_sample_value("dflash_draft_failures_total") == 1
    assert registry.get_sample_value("dflash_requests_ended_total", {"reason": "error"}) == 1


def test_reasons_are_all_there_from_the_start(registry):
    with _service() as service:
        register_metrics(service, registry)
        for reason in (*(each.value for each in FinishReason), "error"):
            assert registry.get_sample_value("dflash_requests_ended_total", {"reason": reason}) == 0


def test_a_registry_takes_one_service_and_gives_it_back(registry):
    with _service() as service, _service() as other:
        collector = register_metrics(service, registry)
        with pytest.raises(RequestError, match="a registry of its own"):
            register_metrics(other, registry)
        registry.unregister(collector)
        register_metrics(other, registry)


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def test_one_scrape_over_http():
    from prometheus_client.parser import text_string_to_metric_families

    with _service() as service:
        service.generate([1, 2, 3], 30)
        with serve_metrics(service, port=0) as server:
            families = {
                family.name: family for family in text_string_to_metric_families(_scrape(server.port))
            }
            with pytest.raises(OutputError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}"):
                serve_metrics(service, server.port)
            with pytest.raises(OutputError, match="choose another port"):
                serve_metrics(service, 70000)
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert families["dflash_new_tokens"].samples[0].value == 30
    for family in families.values():
        assert family.name.startswith("dflash_")
        assert family.documentation.endswith(".")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with _service() as service:
        for attempt in (lambda: serve_metrics(service, 0), lambda: register_metrics(service, None)):
            with pytest.raises(ProviderError, match=r"pip install 'dflash-deploy\[metrics\]'"):
                attempt()


def test_the_library_prints_nothing(capfd, caplog):
    """It logs: a draft that fails is a warning of this package's logger, and nothing is on the streams."""
    for folder in ("runtime", "bundle", "exporter", "plugins"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id != "print", f"{file}:{node.lineno}"
    with caplog.at_level(logging.WARNING, "dflash_deploy"), _service(fault=_broken_draft) as service:
        service.generate([1, 2, 3], 60)
    assert capfd.readouterr() == ("", "")
    (record,) = caplog.records
    assert record.name.startswith("dflash_deploy.runtime.")
    assert "draft broke" in record.getMessage()
