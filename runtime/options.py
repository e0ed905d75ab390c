"""Keyword arguments that a function passes on, refused in its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any


def check_options(
    function: Callable[..., Any],
    given: Iterable[str],
    known: Collection[str],
    elsewhere: Callable[[str], str] = lambda _: "",
) -> None:
    """Refuse names that nobody knows, before somebody further down does so in words of his own.

    Args:
        function: what was called.
        given: names of the keyword arguments that it does not take itself.
        known: those that it passes on.
        elsewhere: says how to give a name that is known at another place; nothing if it is not.

    Raises:
        TypeError: as Python's own, with the names that are near, or else all.
    """
    for name in given:
        if name in known:
            continue
        own = [each.name for each in inspect.signature(function).parameters.values() if _may_be_named(each)]
        every = list(dict.fromkeys([*own, *known]))
        near = get_close_matches(name, every)
        todo = f"near it: {', '.join(near)}" if near else f"there are: {', '.join(every)}"
        raise TypeError(
            f"{function.__qualname__}() got an unexpected keyword argument {name!r}; "
            + (elsewhere(name) or todo)
        )


def _may_be_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in ("self", "cls")
