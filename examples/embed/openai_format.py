"""OpenAI's chat-completions format: what is asked, what is answered, and errors. For `openai_server.py`."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from dflash_deploy.bundle.errors import RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.choose import TokenLogprob
from dflash_deploy.runtime.decoder import Generation
from dflash_deploy.runtime.sampling import Sampling
from dflash_deploy.runtime.text import TextCodec
from dflash_deploy.runtime.ticket import Ticket

logger = logging.getLogger("openai_server")

RETRY_AFTER_S = 1
LEAST_LOGPROB = -9999.0  # OpenAI's figure for a token that cannot come; JSON has no -inf
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(
        self, status: int, message: str, kind: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 429 else None
        return JSONResponse(self.body, self.status, headers)


def unavailable() -> ApiError:
    return ApiError(503, "the server is going down", "server_error", "unavailable")


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", code, param)


# ---------------------------------------------------------------- what is asked


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def message(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; a proxy's matter


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(Strict):
    """OpenAI's fields; `top_k`, `min_p` and `repetition_penalty` are what other servers add to them."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Without influence on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    def sampling(self) -> Sampling:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise refused(f"top_logprobs: got {self.top_logprobs}, expected 0 to 20", "top_logprobs")
        given = {
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        temperature = 1.0 if self.temperature is None else self.temperature  # 1 is OpenAI's default
        return Sampling(temperature, **{name: value for name, value in given.items() if value is not None})

    def length(self, most: int) -> int:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise refused("max_tokens: leave it out beside max_completion_tokens", "max_tokens")
        length = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return most if length is None else length

    def stop_strings(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def refused(self, error: RequestError) -> ApiError:
        """What the runtime says of a request, about the parameters that the client sent."""
        place, _, rest = str(error).partition(":")
        ours, bracket, index = place.partition("[")
        if ours == "service":  # is closed
            return unavailable()
        length = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
        theirs = {
            "prompt": "messages",
            "chat template": "messages",
            "max_new_tokens": length,
            "logprobs": "top_logprobs",
        }
        name = theirs.get(ours, ours)
        return refused(f"{name}{bracket}{index}:{rest}", name)


# ---------------------------------------------------------------- what is answered


class Answer:
    """One completion, as the format has it."""

    def __init__(self, model: str, codec: TextCodec, asked: ChatRequest) -> None:
        self._codec = codec
        self._with_logprobs = bool(asked.logprobs)
        self._with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, result: Generation) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "finish_reason": finish_reason(result),
            "logprobs": self._logprobs(result.logprobs),
        }
        return {
            "object": "chat.completion",
            **self._head,
            "choices": [choice],
            "usage": usage(result),
        }

    async def events(self, ticket: Ticket) -> AsyncIterator[str]:
        """Server-sent events. The status went out with the first: from then on an error is an event too."""
        try:
            yield self._event({"role": "assistant", "content": ""})
            waiting: list[TokenLogprob] = []  # of tokens whose text is not complete
            async for chunk in ticket:
                waiting += chunk.logprobs
                if chunk.text:
                    yield self._event({"content": chunk.text}, logprobs=self._logprobs(waiting))
                    waiting = []
            result = await ticket.wait()
            yield self._event({}, finish_reason(result), self._logprobs(waiting))
            if self._with_usage:
                yield sse(
                    {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage(result)}
                )
        except ApiError as error:
            yield sse(error.body)
        except Exception as error:
            yield sse(failed(error).body)
        yield "data: [DONE]\n\n"

    def _event(
        self, delta: dict[str, str], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        rest = {"usage": None} if self._with_usage else {}
        return sse({"object": "chat.completion.chunk", **self._head, "choices": [choice], **rest})

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **self._token(token.id, token.logprob),
                "top_logprobs": [self._token(*best) for best in token.best],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._codec.decode([token_id]) or self._codec.token(token_id) or ""
        whole = "\ufffd" not in text  # else it is a part of a character, and its bytes are not known here
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(text.encode()) if whole else None,
        }


def sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def usage(result: Generation) -> dict[str, Any]:
    prompt, completion = result.stats.prompt_tokens, len(result.ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": result.stats.cached_tokens},
    }


def finish_reason(result: Generation) -> str:
    """OpenAI has no word for the rest: what was not finished is an error."""
    if result.finish_reason is FinishReason.DEADLINE:
        raise ApiError(504, "the answer took longer than this server allows", "server_error", "timeout")
    if result.finish_reason is FinishReason.CANCELLED:
        raise unavailable()
    return FINISH_REASONS[result.finish_reason]


def failed(error: Exception) -> ApiError:
    """An engine that failed, or a bug; what it says is for the log."""
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed on the server's side", "server_error")
