"""What a caller gave, refused by name if it is of another kind or out of range."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np

from ..bundle.errors import RequestError, field_error


def check_integer(
    what: str, value: object, expected: str, low: int, high: int | None = None, todo: str = ""
) -> int:
    """Give it as an int. What counts as an integer will do, NumPy's too; True and False do not.

    Raises:
        RequestError: it is none, or not `low` <= value <= `high`.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or found < low or (high is not None and found > high):
        raise field_error(RequestError, what, value, expected, todo)
    return found


def check_number(what: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    """Let a finite number pass that fits.

    Raises:
        RequestError: it is none, or does not fit.
    """
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        fine = number and math.isfinite(value) and fits(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no float can hold
        fine = False
    if not fine:
        raise field_error(RequestError, what, value, expected)


def check_flag(what: str, value: object) -> None:
    """Let True and False pass: a text "no" would count as True.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, bool):
        raise field_error(RequestError, what, value, "True or False")
