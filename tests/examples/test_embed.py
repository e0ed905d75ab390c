"""The script and the worker thread of `examples/embed`, run as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_deploy.bundle.errors import EngineError
from dflash_deploy.runtime.service import Service, ServiceSettings

PROMPTS = ("hello", "what is it?", "euro é", "zzz", "why is the sky blue?", "ab", "c", "the end.")


def _command(embed: Path, name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(embed / name), *map(str, arguments)]


def _answers(bundle: Path, prompts: tuple[str, ...], length: int) -> list[str]:
    """What the service gives for each prompt alone."""
    with Service.open(bundle, threads=1) as service:
        return [service.generate(prompt, length).text for prompt in prompts]


def _check_script(embed: Path, bundle: Path, prompt: str, length: int) -> None:
    command = _command(embed, "script.py", bundle, prompt, "--max-new-tokens", length)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *text, tokens, speed, right = done.stdout.splitlines()
    assert "\n".join(text) == _answers(bundle, (prompt,), length)[0]
    assert tokens.startswith(f"{length} tokens, ended by length")
    assert "tokens/s" in speed
    assert right.startswith("draft right, by place: ")


def test_the_script(embed, text_bundle):
    _check_script(embed, text_bundle, "hello", 30)


def test_a_line_in_is_a_line_out(embed, text_bundle):
    """Good jobs and bad ones, through the process's own standard streams."""
    jobs = [json.dumps({"id": str(n), "prompt": p, "max_new_tokens": 20}) for n, p in enumerate(PROMPTS)]
    bad = ["no json", "[1]", '{"prompt": "no id"}', '{"id": "a"}', '{"id": "b", "prompt": ""}']
    bad += ['{"id": "c", "prompt": 5}', '{"id": "d", "prompt": "x", "length": 3}']
    command = _command(embed, "worker_thread.py", text_bundle, "--max-requests", 3)
    done = subprocess.run(command, input="\n".join(jobs + bad), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    right = {o["id"]: o["text"] for o in outcomes if o["status"] == "length"}
    expected = _answers(text_bundle, PROMPTS, 20)
    assert right == {str(n): text for n, text in enumerate(expected)}
    failed = sorted((o["id"], o["error"]) for o in outcomes if o["status"] == "failed")
    assert [name for name, _ in failed] == ["", "", "", "a", "b", "c", "d"]
    errors = dict(failed)
    assert errors["a"].startswith('no job: \'{"id": "a"}\' (prompt is missing)')
    assert "expected some text" in errors["b"]
    assert errors["d"].endswith("('length' is none of id, prompt, max_new_tokens, deadline_s)")
    assert len(outcomes) == len(jobs) + len(bad)


@pytest.mark.parametrize("arguments", [("script.py", "x", "hi"), ("worker_thread.py", "x")])
def test_a_bundle_that_is_not_there_is_one_line(embed, tmp_path, arguments):
    name, bundle, *rest = arguments
    command = _command(embed, name, tmp_path / bundle, *rest)
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith(f"{name}: bundle: no manifest.json in ")


def test_a_signal_ends_it_politely(embed, text_bundle):
    """What runs is finished, what waits is told, and nothing is lost."""
    command = _command(embed, "worker_thread.py", text_bundle, "--max-requests", 1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for number in range(60):
            job = {"id": str(number), "prompt": "hello", "max_new_tokens": 390}
            process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(20) == 0
    outcomes = [first, *rest]
    assert sorted(int(o["id"]) for o in outcomes) == list(range(60))
    statuses = [o["status"] for o in outcomes]
    assert set(statuses) == {"length", "not done"}
    done = statuses.index("not done")
    assert set(statuses[done:]) == {"not done"}
    assert len({o["text"] for o in outcomes[:done]}) == 1


def _slow(service: Service, seconds: float, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every pass of the target take a while; set when the first begins."""
    target, begun = service.decoder.runners[0], threading.Event()
    run = target.run

    def slow_run(*arguments):
        begun.set()
        time.sleep(seconds)
        return run(*arguments)

    monkeypatch.setattr(target, "run", slow_run)
    return begun


def test_what_outlasts_the_grace_is_cancelled(embed, text_bundle, monkeypatch):
    from worker_thread import Job, Outcome, Workers

    outcomes: list[Outcome] = []
    with Service.open(text_bundle, ServiceSettings(max_requests=2), threads=1) as service:
        begun = _slow(service, 0.02, monkeypatch)
        workers = Workers(service, outcomes.append)
        for name in "abc":
            workers.put(Job(name, "hello", 380))
        assert begun.wait(10)
        began = time.monotonic()
        workers.stop(grace_s=0.1)
        assert time.monotonic() - began < 2.0
    assert {o.id: o.status for o in outcomes} == dict.fromkeys("abc", "not done")
    assert not any(thread.name.startswith("worker-") for thread in threading.enumerate())


def test_a_job_has_its_deadline_and_the_next_one_its_own(embed, text_bundle, monkeypatch):
    from worker_thread import Job, Outcome, Workers

    outcomes: list[Outcome] = []
    with Service.open(text_bundle, ServiceSettings(max_requests=1), threads=1) as service:
        with monkeypatch.context() as slowly:
            _slow(service, 0.05, slowly)
            workers = Workers(service, outcomes.append)
            workers.put(Job("late", "hello", 380, deadline_s=0.3))
            workers.put(Job("also", "hello", 2, deadline_s=60))
            workers.finish()
        whole = service.generate("hello", 380).text
    assert [(o.id, o.status) for o in outcomes] == [("late", "deadline"), ("also", "length")]
    assert outcomes[0].text
    assert whole.startswith(outcomes[0].text)


def test_an_engine_that_fails_costs_one_job(embed, text_bundle, monkeypatch):
    from worker_thread import Job, Outcome, Workers

    outcomes: list[Outcome] = []
    with Service.open(text_bundle, ServiceSettings(max_requests=1), threads=1) as service:
        target, calls = service.decoder.runners[0], []
        run = target.run

        def broken(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise EngineError("target broke")
            return run(*arguments)

        monkeypatch.setattr(target, "run", broken)
        workers = Workers(service, outcomes.append)
        workers.put(Job("first", "hello", 20))
        workers.put(Job("second", "hello", 20))
        workers.finish()
    assert [(o.id, o.status, o.error) for o in outcomes] == [
        ("first", "failed", "target broke"),
        ("second", "length", None),
    ]


@pytest.mark.slow
def test_over_the_real_pair(embed, demo_bundle):
    prompts = ("What is photosynthesis?", "Write a haiku.", "Count to five.")
    _check_script(embed, demo_bundle, prompts[0], 24)
    jobs = [json.dumps({"id": p, "prompt": p, "max_new_tokens": 24}) for p in prompts]
    command = _command(embed, "worker_thread.py", demo_bundle, "--max-requests", 3)
    done = subprocess.run(command, input="\n".join(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = {o["id"]: o["text"] for o in map(json.loads, done.stdout.splitlines())}
    assert [texts[p] for p in prompts] == _answers(demo_bundle, prompts, 24)
