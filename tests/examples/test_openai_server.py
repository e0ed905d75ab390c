"""`examples/embed/openai_server.py` as clients see it: the official one, and the bytes sent (D04, D07)."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from dflash_deploy.bundle.errors import EngineError, RequestError
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.service import Service, ServiceSettings
from text_bundle import write_text_bundle

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

MODEL = "toy"
HELLO = [{"role": "user", "content": "hello"}]
PATH = "/v1/chat/completions"


@dataclass
class Brake:
    """Stands before the target's engine: slows it down, breaks it, counts its passes."""

    seconds: float = 0.0
    fail_at: int | None = None
    passes: int = 0
    after: Callable[[int], None] = field(default=lambda passes: None)

    def hold(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> Brake:
        target = service.decoder.runners[0]
        run = target.run

        def braked(*arguments: Any) -> Any:
            self.passes += 1
            if self.passes == self.fail_at:
                raise EngineError("target broke: a path, an address")
            time.sleep(self.seconds)
            given = run(*arguments)
            self.after(self.passes)
            return given

        monkeypatch.setattr(target, "run", braked)
        return self


@dataclass(frozen=True)
class Server:
    """A server that runs, and a client for it."""

    service: Service
    port: int

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options)

    def request(
        self, method: str, path: str, body: Any = None, raw: bytes | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = raw if raw is not None else None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, text

    def chat(self, **fields: Any) -> tuple[int, dict[str, str], str]:
        return self.request("POST", PATH, {"model": MODEL, "messages": HELLO, **fields})

    def events(self, **fields: Any) -> list[Any]:
        """Data of the events of a stream; the last one is "[DONE]"."""
        status, headers, text = self.chat(stream=True, **fields)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
        *events, empty = text.split("\n\n")
        assert empty == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        datas = [event.removeprefix("data: ") for event in events]
        assert datas.pop() == "[DONE]"
        return [json.loads(data) for data in datas]


@contextmanager
def serving(bundle: Path, deadline_s: float | None = None, **settings: Any) -> Iterator[Server]:
    from openai_server import create_app

    service = Service.open(bundle, ServiceSettings(**settings), threads=1)
    app = create_app(service, MODEL, deadline_s)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        _until(lambda: server.started)
        yield Server(service, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)
        service.close()
        assert not thread.is_alive()


def _until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.fixture(scope="module")
def server(text_bundle) -> Iterator[Server]:
    """One server for all tests that leave it as it is."""
    with serving(text_bundle, max_requests=4) as made:
        yield made


# What is asked in both ways: greedily to the limit, sampled to the end token, and to a stop string.
CASES: dict[str, dict[str, Any]] = {
    "length": {"temperature": 0, "max_tokens": 30},
    "end token": {"temperature": 1, "seed": 3, "max_completion_tokens": 390},
    "stop string": {"temperature": 1, "seed": 1, "max_tokens": 200, "stop": ["mhx", "never"]},
    "one token": {"temperature": 0, "max_tokens": 1},
    "everything": {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"12": -100, "20": 2.5},
        "stop": "never",
        "max_tokens": 40,
        "user": "somebody",
        "n": 1,
        "response_format": {"type": "text"},
        "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    },
}
FINISHES = {"length": "length", "end token": "stop", "stop string": "stop", "one token": "length"}


@pytest.mark.parametrize("name", CASES)
def test_the_official_client(server, name):
    """Whole and streamed, they are the same answer, and it is what the service gives."""
    case = CASES[name]
    with server.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, **case)
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}, **case
            )
        )
    options = {**case, **case.get("extra_body", {})}
    sampling = Sampling(
        **{k: v for k, v in options.items() if k in Sampling.__dataclass_fields__ and k != "logit_bias"},
        logit_bias={int(k): v for k, v in case.get("logit_bias", {}).items()},
    )
    length = case.get("max_tokens", case.get("max_completion_tokens"))
    direct = server.service.generate(HELLO, length, sampling=sampling, stop=case.get("stop", ()))
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == direct.text
    assert choice.finish_reason == direct.finish_reason.value == FINISHES.get(name, choice.finish_reason)
    assert whole.usage.completion_tokens == len(direct.ids)
    assert whole.usage.prompt_tokens == direct.stats.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    *deltas, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content for chunk in deltas) == direct.text
    assert {chunk.choices[0].finish_reason for chunk in deltas} == {None}
    assert last.choices[0].finish_reason == choice.finish_reason
    assert usage.choices == []
    assert usage.usage.to_dict() == whole.usage.to_dict()
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    if name == "stop string":
        assert "mhx" not in direct.text


@pytest.mark.parametrize("with_usage", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_wire(server, name, with_usage):
    """D07, event by event."""
    case = {k: v for k, v in CASES[name].items() if k != "extra_body"}
    if with_usage:
        case["stream_options"] = {"include_usage": True}
    events = server.events(**case)
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert (event["id"], event["model"], event["created"]) == (
            events[0]["id"],
            MODEL,
            events[0]["created"],
        )
        assert ("usage" in event) is with_usage
    if with_usage:
        usage = events.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
        assert {event["usage"] for event in map(dict, events)} == {None}
    choices = [event["choices"] for event in events]
    assert {len(each) for each in choices} == {1}
    first, *middle, last = [each[0] for each in choices]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] in ("stop", "length")
    assert [first["finish_reason"], *(each["finish_reason"] for each in middle)] == [None] * (len(middle) + 1)
    assert all(each["delta"].keys() == {"content"} and each["delta"]["content"] for each in middle)


def test_a_character_over_several_tokens_is_one_delta(server):
    """The bias leaves the two bytes of one character, and a letter."""
    case = {"temperature": 1, "seed": 4, "max_tokens": 60, "logit_bias": {"7": 100, "8": 100, "9": 100}}
    deltas = [event["choices"][0]["delta"].get("content", "") for event in server.events(**case)]
    _, _, text = server.chat(**case)
    assert "".join(deltas) == json.loads(text)["choices"][0]["message"]["content"]
    assert "é" in "".join(deltas)


def test_logprobs(server):
    case = {"temperature": 1, "seed": 4, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    with server.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, **case)
        chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **case))
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    streamed = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert [t.to_dict() for t in streamed] == [t.to_dict() for t in tokens]
    sampling = Sampling(temperature=1, seed=4, logprobs=3)
    direct = server.service.generate(HELLO, 40, sampling=sampling)
    assert [t.logprob for t in tokens] == [t.logprob for t in direct.logprobs]
    codec = server.service.decoder.codec
    for token, chosen in zip(tokens, direct.logprobs, strict=True):
        assert token.token == (codec.decode([chosen.id]) or codec.token(chosen.id))
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.logprob
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    assert any(token.bytes is None for token in tokens)  # a byte of a character
    assert not any(choice["logprobs"] for e in server.events(max_tokens=5) for choice in e["choices"])


def test_messages_in_every_form(server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    several = [
        {"role": "developer", "content": "be nice"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "on?"},
    ]
    _, _, text = server.chat(messages=several, temperature=0, max_tokens=20)
    plain = [{"role": m["role"], "content": m["content"]} for m in several]
    plain[0]["role"], plain[1]["content"] = "system", "hello"
    direct = server.service.generate(plain, 20)
    assert json.loads(text)["choices"][0]["message"]["content"] == direct.text


def test_without_a_limit_it_goes_on_to_the_contexts_end(server):
    _, _, text = server.chat(temperature=0)
    usage = json.loads(text)["usage"]
    assert usage["total_tokens"] == server.service.max_length == 400
    assert json.loads(text)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"40": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, None),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"4": 1e40}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused(server, fields, param, stream):
    if stream and "stream_options" in fields:
        return
    status, _, text = server.chat(**fields, stream=stream)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
        assert error["message"].startswith(param), error
    assert "max_new_tokens" not in error["message"]
    assert "prompt" not in error["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"junk", "the request is not JSON: "),
        (b"[]", "the request: Input should be a valid dictionary"),
        (b'{"model": "toy", "messages": []}', "messages: List should have at least 1 item"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_the_clients_terms(server, raw, message):
    status, _, text = server.request("POST", PATH, raw=raw)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "messages" if b"messages" in raw else None)
    assert error["message"].startswith(message)


def test_errors_have_openais_format(server):
    for method, path, raw, status in (
        ("POST", PATH, b"{", 400),
        ("POST", PATH, b"\xff", 400),
        ("GET", PATH, None, 405),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/models/gpt", None, 404),
    ):
        got, _, text = server.request(method, path, raw=raw)
        assert got == status, text
        assert json.loads(text)["error"]["message"]
    with server.client() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match=r"temperature: got -3\.0"):
            client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-3)


def test_models_and_health(server):
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).object == "model"
    status, _, text = server.request("GET", "/health")
    assert (status, json.loads(text)) == (200, {"status": "ok", "running": 0, "waiting": 0})


def test_metrics(server):
    server.chat(temperature=0, max_tokens=3)
    before = server.service.stats()
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert f"\ndflash_new_tokens_total {float(before.new_tokens)}\n" in text


def test_without_prometheus_there_are_no_metrics(text_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with serving(text_bundle) as made:
        assert made.request("GET", "/metrics")[0] == 404
        assert made.chat(temperature=0, max_tokens=3)[0] == 200


def test_a_bundle_without_a_chat_template_is_refused(tmp_path):
    from openai_server import create_app

    manifest = write_text_bundle(tmp_path)
    with Service.open(tmp_path, threads=1) as service:
        object.__setattr__(service.decoder, "codec", None)
        with pytest.raises(RequestError, match="no chat template"):
            create_app(service, MODEL)
    assert manifest.tokenizer.file


def test_a_bundle_that_is_not_there_is_one_line(embed, tmp_path):
    command = [sys.executable, str(embed / "openai_server.py"), str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("openai_server.py: bundle: no manifest.json in ")


def test_a_service_that_is_closed_is_not_the_clients_fault(text_bundle):
    with serving(text_bundle) as made:
        made.service.close()
        status, _, text = made.chat(max_tokens=3)
        assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")


# ---------------------------------------------------------------- many at once


def test_together_as_alone(server):
    """Requests of all kinds at once, by the asynchronous client, streamed or not: each as if alone."""
    cases = [
        {
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "seed": seed,
            "max_tokens": length,
        }
        for seed, (text, temperature, length) in enumerate(
            [("hello", 0, 60), ("what is it?", 1, 40), ("ab", 0.7, 90), ("euro é", 0, 10), ("so", 1.3, 30)]
            * 3
        )
    ]

    async def one(client: openai.AsyncOpenAI, case: dict[str, Any], stream: bool) -> str:
        if not stream:
            whole = await client.chat.completions.create(model=MODEL, **case)
            return whole.choices[0].message.content
        pieces = await client.chat.completions.create(model=MODEL, stream=True, **case)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])

    async def all_at_once() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, case, n % 2 == 0) for n, case in enumerate(cases)))

    together = asyncio.run(all_at_once())
    alone = [
        server.service.generate(
            case["messages"],
            case["max_tokens"],
            sampling=Sampling(temperature=case["temperature"], seed=case["seed"]),
        ).text
        for case in cases
    ]
    assert together == alone
    assert server.service.stats().cycle_requests > server.service.stats().cycles  # they did run together


def test_no_room_is_told_and_a_client_that_waits_is_served(text_bundle, monkeypatch):
    with serving(text_bundle, max_requests=1, max_waiting=0) as made:
        brake = Brake(0.01).hold(made.service, monkeypatch)
        with made.client(max_retries=0) as client, made.client(max_retries=9) as patient:
            stream = client.chat.completions.create(
                model=MODEL, messages=HELLO, temperature=0, stream=True, max_tokens=300
            )
            next(iter(stream))
            for streamed in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    client.chat.completions.create(model=MODEL, messages=HELLO, stream=streamed)
                assert caught.value.response.headers["retry-after"] == "1"
                assert caught.value.code == "rate_limit_exceeded"
            stream.close()
            brake.seconds = 0.0
            whole = patient.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=9)
        assert whole.choices[0].message.content == made.service.generate(HELLO, 9).text
        assert made.service.stats().refused >= 2


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_costs_one_round(text_bundle, monkeypatch, stream):
    """Without a network, so that the moment is exact: after the disconnect at most one more pass begins."""
    from openai_server import create_app

    with Service.open(text_bundle, ServiceSettings(max_requests=1), threads=1) as service:
        app = create_app(service, MODEL)
        brake = Brake(0.05).hold(service, monkeypatch)

        async def call() -> int:
            gone, loop = asyncio.Event(), asyncio.get_running_loop()
            brake.after = lambda passes: loop.call_soon_threadsafe(gone.set) if passes == 8 else None
            body = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": stream}
            received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
            seen = []

            async def receive() -> dict[str, Any]:
                if received:
                    return received.pop()
                await gone.wait()
                seen.append(brake.passes)
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                pass

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
            scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
            await app(scope, receive, send)
            return seen[0]

        at = asyncio.run(call())
        _until(lambda: service.stats().running == 0)
        assert brake.passes <= at + 1
        stats = service.stats()
        assert stats.finished == {"cancelled": 1}
        assert stats.waiting == 0
        brake.seconds = 0.0
        assert service.generate(HELLO, 20).ids == service.generate(HELLO, 20).ids


def test_clients_that_leave_over_the_network(text_bundle, monkeypatch):
    """Before the first token, in mid-stream, and while they wait for the whole; what comes next is right."""
    with serving(text_bundle, max_requests=2, max_waiting=8) as made:
        right = made.service.generate(HELLO, 25).text
        threads = threading.active_count()
        brake = Brake(0.01).hold(made.service, monkeypatch)
        for stream in (True, False, True, False):
            body = json.dumps(
                {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": stream}
            ).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", made.port)) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                if stream:
                    while b'"delta": {"content"' not in connection.recv(65536):
                        pass
                else:
                    _until(lambda: made.service.stats().running == 1)
            _until(lambda: made.service.stats().running == 0, 3)
        passes = brake.passes
        assert passes < 200  # four answers of 390 tokens were asked for
        assert made.service.stats().finished["cancelled"] == 4
        brake.seconds = 0.0
        _, _, text = made.chat(temperature=0, max_tokens=25)
        assert json.loads(text)["choices"][0]["message"]["content"] == right
        assert threading.active_count() <= threads + 5  # the event loop's own pool


# ---------------------------------------------------------------- what fails


def test_an_error_behind_the_first_byte_is_an_event(text_bundle, monkeypatch):
    with serving(text_bundle) as made:
        brake = Brake(fail_at=10).hold(made.service, monkeypatch)
        events = made.events(temperature=0, max_tokens=100)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert any(e["choices"][0]["delta"].get("content") for e in events[:-1])
        assert {e["choices"][0]["finish_reason"] for e in events[:-1]} == {None}
        assert set(events[-1]) == {"error"}
        assert events[-1]["error"]["type"] == "server_error"
        assert "target broke" not in str(events)  # that is for the log
        brake.fail_at = brake.passes + 10
        with made.client(max_retries=0) as client:
            stream = client.chat.completions.create(
                model=MODEL, messages=HELLO, temperature=0, stream=True, max_tokens=100
            )
            with pytest.raises(openai.APIError, match="the request failed on the server's side"):
                list(stream)
            brake.fail_at = brake.passes + 10
            with pytest.raises(openai.InternalServerError, match="the request failed on the server's side"):
                client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=100)
        assert made.chat(temperature=0, max_tokens=5)[0] == 200
        assert made.service.stats().failed == 3


def test_a_deadline_is_an_error_and_no_finish_reason(text_bundle, monkeypatch):
    with serving(text_bundle, deadline_s=0.3) as made:
        Brake(0.02).hold(made.service, monkeypatch)
        status, _, text = made.chat(temperature=0)
        assert (status, json.loads(text)["error"]["code"]) == (504, "timeout")
        last = made.events(temperature=0)[-1]
        assert last["error"]["code"] == "timeout"


def test_a_service_that_closes_ends_its_streams_with_an_error(text_bundle, monkeypatch):
    with serving(text_bundle) as made:
        brake = Brake(0.01).hold(made.service, monkeypatch)
        closing = threading.Thread(target=lambda: (_until(lambda: brake.passes > 5), made.service.close()))
        closing.start()
        last = made.events(temperature=0)[-1]
        closing.join()
        assert last["error"]["code"] == "unavailable"


# ---------------------------------------------------------------- as a process


def _check_process(embed: Path, bundle: Path, prompt: str, length: int) -> str:
    command = [sys.executable, str(embed / "openai_server.py"), str(bundle), "--port", "0", "--model", "m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            found = re.search(r"running on http://127\.0\.0\.1:(\d+)", line)
            if found:
                break
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="none")
        messages = [{"role": "user", "content": prompt}]
        with client:
            stream = client.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=length, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) == -signal.SIGTERM, rest  # uvicorn ends in order, then lets it through
        assert "Application shutdown complete" in rest
        assert "Traceback" not in rest
    return text


def test_as_a_process(embed, text_bundle, server):
    assert _check_process(embed, text_bundle, "hello", 20) == server.service.generate("hello", 20).text


@pytest.mark.slow
def test_over_the_real_pair(embed, demo_bundle):
    prompt = "What is photosynthesis?"
    text = _check_process(embed, demo_bundle, prompt, 32)
    with Service.open(demo_bundle) as service:
        assert text == service.generate(prompt, 32).text
    with serving(demo_bundle, max_requests=4, max_length=512) as made, made.client() as client:
        case = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48}
        for extra in (
            {"temperature": 0},
            {"temperature": 0.8, "seed": 7},
            {"temperature": 0, "stop": "plants"},
        ):
            whole = client.chat.completions.create(**case, **extra)
            stream = client.chat.completions.create(
                **case, **extra, stream=True, stream_options={"include_usage": True}
            )
            *deltas, last, usage = list(stream)
            assert "".join(d.choices[0].delta.content for d in deltas) == whole.choices[0].message.content
            assert last.choices[0].finish_reason == whole.choices[0].finish_reason
            assert usage.usage.completion_tokens == whole.usage.completion_tokens
        assert "plants" not in whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "stop"
