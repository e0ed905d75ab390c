"""A bundle behind HTTP in OpenAI's chat-completions format: a FastAPI app to start from.

    python openai_server.py BUNDLE --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")

What the format has and a bundle cannot do is refused with status 400, never ignored. There is no
authentication, no TLS and no limit on a body's size: put it behind a proxy that has them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai_format import Answer, ApiError, ChatRequest, failed, refused
from starlette.exceptions import HTTPException

from dflash_deploy.bundle.errors import BusyError, DflashError, RequestError
from dflash_deploy.runtime.decoder import Generation
from dflash_deploy.runtime.metrics import register_metrics
from dflash_deploy.runtime.service import Service, ServiceSettings
from dflash_deploy.runtime.ticket import Ticket

logger = logging.getLogger("openai_server")


class Events(StreamingResponse):
    """A stream that frees its request's place when the client is gone, wherever it was just then."""

    def __init__(self, answer: Answer, ticket: Ticket) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(ticket), media_type="text/event-stream", headers=headers)
        self._ticket = ticket

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._ticket.cancel()


async def result_unless_gone(ticket: Ticket, request: Request) -> Generation | None:
    """Wait for the whole answer, or for the client to go away: then None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, leaving = asyncio.create_task(ticket.wait()), asyncio.create_task(gone())
    try:
        await asyncio.wait({result, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await result if result.done() else None
    finally:
        ticket.cancel()
        leaving.cancel()
        result.cancel()


def create_app(service: Service, model: str, deadline_s: float | None = None) -> FastAPI:
    """The app; it closes the service when it ends.

    Raises:
        RequestError: the bundle has no chat template.
    """
    codec = service.decoder.codec
    if codec is None or not codec.has_chat_template:
        raise RequestError("bundle: has no chat template, and chat completions need one")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title=model, lifespan=lifespan)
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "dflash-deploy"}

    def check_model(name: str) -> None:
        if name != model:
            message = f"the model {name!r} does not exist; this server has {model!r}"
            raise ApiError(404, message, "invalid_request_error", "model_not_found", "model")

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        check_model(asked.model)
        if asked.stream_options is not None and not asked.stream:
            raise refused("stream_options: only a stream has them", "stream_options")
        try:
            ticket = await service.submit_async(
                [message.message() for message in asked.messages],
                asked.length(service.max_length),
                sampling=asked.sampling(),
                stop=asked.stop_strings(),
                deadline_s=deadline_s,
            )
        except BusyError:
            raise
        except RequestError as error:
            raise asked.refused(error) from error
        answer = Answer(model, codec, asked)
        if asked.stream:
            return Events(answer, ticket)
        result = await result_unless_gone(ticket, request)
        return Response(status_code=499) if result is None else JSONResponse(answer.whole(result))

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return card

    @app.get("/health")
    def health() -> dict[str, Any]:
        stats = service.stats()
        return {"status": "ok", "running": stats.running, "waiting": stats.waiting}

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> Response:
        return ApiError(429, str(error), "rate_limit_error", "rate_limit_exceeded").response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # its place is a number of characters
            return refused(f"the request is not JSON: {first['ctx']['error']}").response()
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return refused(f"{place or 'the request'}: {first['msg']}", place or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), "invalid_request_error").response()

    @app.exception_handler(DflashError)
    @app.exception_handler(Exception)
    async def server_error(_: Request, error: Exception) -> Response:
        return failed(error).response()

    add_metrics(app, service)
    return app


def add_metrics(app: FastAPI, service: Service) -> None:
    """Figures for Prometheus under /metrics, if its client is installed."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    except ImportError:
        logger.info("no /metrics: prometheus_client is not installed")
        return
    registry = CollectorRegistry(auto_describe=True)
    register_metrics(service, registry)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="name that clients say [default: the bundle's folder]")
    parser.add_argument("--max-requests", type=int, default=8)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--max-length", type=int, help="tokens of a prompt and its answer")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="longest time for an answer")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    settings = ServiceSettings(
        max_requests=arguments.max_requests,
        max_waiting=arguments.max_waiting,
        max_length=arguments.max_length,
    )
    service = Service.open(arguments.bundle, settings)
    app = create_app(service, arguments.model or arguments.bundle.resolve().name, arguments.deadline_s)
    uvicorn.run(app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=30)


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:  # says what to do; a bug keeps its traceback
        sys.exit(f"{Path(__file__).name}: {error}")
