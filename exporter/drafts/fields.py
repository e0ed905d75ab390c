"""`Fields`: reads a config key by key, with types, and knows afterwards what was used and what defaulted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...bundle.errors import CheckpointError, DflashError, UnsupportedError, field_error

_NEEDED: Any = object()


@dataclass(frozen=True)
class Default:
    """A value that the checkpoint leaves open and the original's own code fills in."""

    key: str
    value: object
    source: str


class Fields:
    """One config dict, or several where a key may stand in any of them.

    A key that stands in two of the dicts must have the same value in both. `where` names the config file for
    messages, `source` the code whose defaults apply.
    """

    def __init__(self, where: str, source: str, *dicts: tuple[str, Mapping[str, Any]]) -> None:
        """Take `dicts` as (prefix of its keys in messages, e.g. ``dflash_config.``; the dict)."""
        self.where = where
        self.source = source
        self.defaults: dict[str, Default] = {}
        self._dicts = dicts
        self._used: set[str] = set()

    def error(
        self, key: str, got: object, expected: str, kind: type[DflashError] = CheckpointError
    ) -> DflashError:
        """Build the error about `key` that says where to mend it."""
        return field_error(kind, self.path(key), got, expected, f"correct it in {self.where}")

    def path(self, key: str) -> str:
        """The key as it stands in the file, e.g. ``dflash_config.block_size``."""
        places = [prefix for prefix, values in self._dicts if key in values]
        return f"{places[0] if places else self._dicts[0][0]}{key}"

    @property
    def place(self) -> str:
        """The file, and the first dict in it where that has a prefix, for messages of others."""
        prefix = self._dicts[0][0].rstrip(".")
        return f"{self.where}: {prefix}" if prefix else self.where

    def __contains__(self, key: str) -> bool:
        return any(key in values for _, values in self._dicts)

    def value(self, key: str, default: Any = _NEEDED) -> Any:
        """Read `key` raw.

        Raises:
            CheckpointError: it stands nowhere and has no default, or two places disagree.
        """
        self._used.add(key)
        found = [(f"{prefix}{key}", values[key]) for prefix, values in self._dicts if key in values]
        for path, value in found[1:]:
            if value != found[0][1]:
                raise field_error(
                    CheckpointError,
                    found[0][0],
                    found[0][1],
                    f"the same as {path}, which is {value!r}",
                    f"remove the wrong one from {self.where}",
                )
        if found:
            return found[0][1]
        if default is _NEEDED:
            raise CheckpointError(f"{self.path(key)}: missing, expected it in {self.where}; add it there")
        if default is not None:
            self.defaults[key] = Default(key, default, self.source)
        return default

    def whole(self, key: str, default: Any = _NEEDED, minimum: int = 1) -> int:
        """Read a whole number >= `minimum`."""
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, value, f"a whole number >= {minimum}")
        return value

    def optional_whole(self, key: str, minimum: int = 0) -> int | None:
        """Read a whole number >= `minimum`, or None where it is null or absent."""
        return None if self.value(key, None) is None else self.whole(key, minimum=minimum)

    def number(self, key: str, default: Any = _NEEDED) -> float:
        """Read a finite number."""
        value = self.value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: Any = _NEEDED) -> bool:
        """Read true or false."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _NEEDED, one_of: Sequence[str] = ()) -> str:
        """Read a string.

        Raises:
            UnsupportedError: it is none of `one_of`.
        """
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        if one_of and value not in one_of:
            raise self.error(key, value, "one of " + ", ".join(one_of), UnsupportedError)
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        """Read a list of whole numbers, not empty."""
        value = self.value(key)
        good = isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        if not good or not value:
            raise self.error(key, value, "a list of whole numbers")
        return tuple(value)

    def same(self, key: str, expected: object, why: str) -> None:
        """Accept `key` only with the value that changes nothing, or absent or null.

        Raises:
            UnsupportedError: it has another value.
        """
        value = self.value(key, None)
        if value is not None and value != expected:
            raise self.error(key, value, f"{expected!r} ({why})", UnsupportedError)

    def fill(self, key: str, value: object) -> None:
        """Say what the original makes of `key`, which the file leaves open."""
        self.defaults[key] = Default(key, value, self.source)

    def use(self, *keys: str) -> None:
        """Say that `keys` are read elsewhere."""
        self._used.update(keys)

    @property
    def used(self) -> frozenset[str]:
        """The keys that were asked for."""
        return frozenset(self._used)


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], prefix: str, where: str) -> None:
    """Refuse the first key of `values` that is not `known`.

    Raises:
        UnsupportedError: names the key and its value.
    """
    for key in sorted(set(values) - set(known)):
        raise field_error(
            UnsupportedError,
            f"{prefix}{key}",
            values[key],
            "no such key (it could change what the draft computes)",
            f"remove it from {where} if it does nothing",
        )
