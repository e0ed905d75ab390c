"""Prompts of a given length: what a token costs behind so much context."""

from __future__ import annotations

from collections.abc import Sequence

from ..bundle.errors import RequestError, field_error
from .measure import Task

CONTEXT_PROMPTS = 2
"""Prompts behind each length of context: reading a long one takes seconds."""


def context_tasks(prompts: Sequence[Sequence[int]], length: int, new_tokens: int, most: int) -> list[Task]:
    """Put the first prompts behind so much text that they are `length` tokens long.

    The text is all the prompts, one behind the other and over again.

    Args:
        prompts: token ids of each.
        length: tokens of a prompt and what stands before it; a longer prompt is cut at its beginning.
        new_tokens: see `Task`.
        most: longest sequence in tokens, prompt and output.

    Raises:
        RequestError: there is no room for it.
    """
    if length < 1:
        raise field_error(RequestError, "context", length, ">= 1 token")
    if length + new_tokens > most:
        expected = (
            f"at most {most - new_tokens} ({new_tokens} tokens have to fit behind it; max_length is {most})"
        )
        raise field_error(RequestError, "context", length, expected)
    every = [token for ids in prompts for token in ids]
    filler = every * -(-length // len(every))
    return [
        Task((*filler[: max(length - len(ids), 0)], *ids[-length:]), new_tokens)
        for ids in prompts[:CONTEXT_PROMPTS]
    ]
