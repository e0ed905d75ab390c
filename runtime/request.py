"""What a caller asks for, and what becomes of it before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypedDict

from ..bundle.errors import RequestError, field_error
from ..bundle.manifest import Manifest
from .checks import check_flag, check_integer
from .choice import Choice, GreedyChoice, SampledChoice
from .choose import Chooser
from .loop import Job
from .options import check_options
from .sampling import Sampling
from .stats import Mode, Recorder
from .stops import TextWatch
from .text import Message, TextCodec

MAX_NEW_TOKENS = 256
GREEDY = Sampling()

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids that are taken as they are, or a conversation: objects with ``role`` and ``content``."""


class RequestOptions(TypedDict, total=False):
    """`Request`, but for the prompt and the length."""

    min_new_tokens: int
    mode: Mode
    chat: bool
    system: str | None
    stop_token_ids: Sequence[int] | None
    stop: str | Sequence[str]
    sampling: Sampling


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt: see `Prompt`.
        max_new_tokens: most tokens produced; the context's length may allow fewer.
        min_new_tokens: tokens produced before one that ends the generation may be chosen.
        mode: with the draft, or with the target alone.
        chat: put a text prompt into the model's chat template.
        system: the template's system message; None takes the template's own.
        stop_token_ids: ids that end the generation instead of the bundle's; an empty list ends it at
            `max_new_tokens` only.
        stop: strings that end the generation; they are not part of the text.
        sampling: how tokens are chosen; greedily if nothing is said.
    """

    prompt: Prompt
    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int = 0
    mode: Mode = Mode.SPECULATIVE
    chat: bool = True
    system: str | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    sampling: Sampling = GREEDY


def request_from_call(
    function: Callable[..., Any], prompt: Prompt, max_new_tokens: int, options: RequestOptions
) -> Request:
    """A request from the arguments of a function that a user called.

    Raises:
        TypeError: an option has no such name; it says so in the function's name.
    """
    check_options(function, options, RequestOptions.__annotations__, _sampling_setting)
    return Request(prompt, max_new_tokens, **options)


def _sampling_setting(name: str) -> str:
    known = name in Sampling.__dataclass_fields__
    return f"give sampling=Sampling({name}=...)" if known else ""


def job_from_request(request: Request, manifest: Manifest, codec: TextCodec | None, max_length: int) -> Job:
    """Check a request and make it ready to run.

    Args:
        request: the request.
        manifest: the bundle's.
        codec: the bundle's tokenizer, if it has one.
        max_length: longest sequence in tokens, prompt and output.

    Raises:
        RequestError: the prompt is empty, too long or no token sequence, or an option is out of range.
    """
    if not isinstance(request.mode, Mode):
        raise field_error(RequestError, "mode", request.mode, "Mode.SPECULATIVE or Mode.PLAIN")
    if not isinstance(request.sampling, Sampling):
        raise field_error(RequestError, "sampling", request.sampling, "a Sampling")
    most = check_integer("max_new_tokens", request.max_new_tokens, ">= 1", 1)
    least = check_integer("min_new_tokens", request.min_new_tokens, ">= 0", 0)
    if least > most:
        raise field_error(RequestError, "min_new_tokens", least, f"at most max_new_tokens, {most}")
    check_flag("chat", request.chat)
    if not isinstance(request.system, str | None):
        raise field_error(RequestError, "system", request.system, "a text, or None")
    request.sampling.check(manifest.target.vocab_size)
    ids = prompt_ids(request, manifest, codec, max_length)
    given = manifest.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
    stop_ids = frozenset(_checked(given, "stop_token_ids", manifest))
    watch = TextWatch(None if codec is None else codec.stream(), request.stop, min_tokens=least)
    choice: Choice = GreedyChoice(stop_ids)
    if request.sampling.needs_logits or (least and stop_ids):
        chooser = Chooser(request.sampling, ids, manifest.target.vocab_size, stop_ids, least)
        choice = SampledChoice(chooser, manifest.draft.proposal_law, stop_ids)
    return Job(
        prompt=ids,
        new_tokens=min(most, max_length - len(ids)),
        choice=choice,
        watch=watch,
        speculative=request.mode is Mode.SPECULATIVE,
        rows_are_free=request.sampling.temperature == 0.0,
        recorder=Recorder(request.mode, len(ids)),
    )


def prompt_ids(request: Request, manifest: Manifest, codec: TextCodec | None, max_length: int) -> list[int]:
    """Token ids of a request's prompt.

    Raises:
        RequestError: it is empty, too long, or no prompt.
    """
    prompt: Any = request.prompt
    if not isinstance(prompt, str) and (isinstance(prompt, _BINARY) or not _is_row(prompt)):
        raise field_error(RequestError, "prompt", prompt, "a text, token ids or chat messages")
    messages = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or messages:
        if codec is None:
            raise RequestError("prompt: got text, but this bundle has no tokenizer; give token ids (`--ids`)")
        if messages and not request.chat:
            raise RequestError(
                "chat: got False beside chat messages, expected True; leave it out, or give a text"
            )
        if messages:
            ids = codec.encode_chat(prompt, request.system)
        else:
            ids = codec.encode_prompt(prompt, request.chat, request.system)
    elif request.system is not None:
        raise RequestError("system: got a system message beside token ids; put it into the ids")
    else:
        ids = _checked(prompt, "prompt", manifest)
    if len(ids) == 0:
        raise RequestError("prompt: got no tokens, expected at least one")
    most = max_length - 1
    if len(ids) > most:
        raise field_error(
            RequestError,
            "prompt: length in tokens",
            len(ids),
            f"at most {most} (max_length is {max_length}, one token has to fit behind it)",
            "shorten it, or export with a larger --max-length"
            if max_length >= manifest.max_length
            else f"shorten it, or raise max_length, which the bundle allows up to {manifest.max_length}",
        )
    return ids


_BINARY = bytes | bytearray | memoryview  # rows of numbers, but hardly meant to be token ids


def _is_row(value: Any) -> bool:
    """Whether it is a sequence, or an array of one axis."""
    return isinstance(value, Sequence) or len(getattr(value, "shape", ())) == 1


def _checked(ids: Sequence[int], what: str, manifest: Manifest) -> list[int]:
    rows = manifest.target.embedding_rows
    if not _is_row(ids) and not isinstance(ids, Set):
        raise field_error(RequestError, what, ids, "token ids")
    checked = []
    for index, token in enumerate(ids):
        try:
            value = operator.index(token)
        except TypeError:
            value = -1
        if not 0 <= value < rows:
            raise field_error(RequestError, f"{what}[{index}]", token, f"a token id, 0 <= id < {rows}")
        checked.append(value)
    return checked
