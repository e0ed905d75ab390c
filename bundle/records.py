"""Frozen dataclasses to JSON and back, strictly: unknown, missing or mistyped keys are named errors."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import BundleError, DflashError, field_error

T = TypeVar("T")


def record_to_dict(record: Any) -> Any:
    """Turn a dataclass tree into plain JSON values; enums become their values, tuples become lists."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: record_to_dict(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, enum.Enum):
        return record.value
    if isinstance(record, tuple | list):
        return [record_to_dict(item) for item in record]
    if isinstance(record, Mapping):
        return {str(key): record_to_dict(item) for key, item in record.items()}
    return record


def record_to_json(record: Any) -> str:
    """Write a record as stable JSON: the same record gives the same bytes."""
    return json.dumps(record_to_dict(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def record_from_dict(kind: type[T], data: Any, where: str, error: type[DflashError] = BundleError) -> T:
    """Parse `data` into the dataclass `kind`.

    Args:
        kind: a frozen dataclass whose fields are annotated with plain types, enums, tuples, dicts,
            other dataclasses, or one of these ``| None``.
        data: what `json.loads` gave.
        where: the name of the place for messages, e.g. ``manifest.json``.
        error: the class raised.

    Raises:
        `error`: a key is unknown, missing or of another type; the message names its path.
    """
    return typing.cast(T, _decode(kind, data, where, error))


def _decode(hint: Any, data: Any, where: str, error: type[DflashError]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        fitting = next((option for option in options if option is type(data)), options[0])
        return _decode(fitting, data, where, error)
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, data, where, error)
    if origin is tuple:
        if not isinstance(data, list):
            raise field_error(error, where, data, "a list")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], x, f"{where}[{i}]", error) for i, x in enumerate(data))
        if len(data) != len(args):
            raise field_error(error, where, data, f"a list of {len(args)}")
        return tuple(
            _decode(arg, x, f"{where}[{i}]", error) for i, (arg, x) in enumerate(zip(args, data, strict=True))
        )
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(data, dict):
            raise field_error(error, where, data, "an object")
        value_hint = args[1] if args else Any
        return {key: _decode(value_hint, x, f"{where}.{key}", error) for key, x in data.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            raise field_error(
                error, where, data, "one of " + ", ".join(repr(m.value) for m in hint)
            ) from None
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        raise field_error(error, where, data, f"a value of type {hint.__name__}")
    return data


def _decode_record(kind: Any, data: Any, where: str, error: type[DflashError]) -> Any:
    if not isinstance(data, dict):
        raise field_error(error, where, data, "an object")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise field_error(
            error, f"{where}.{unknown[0]}", data[unknown[0]], f"one of the keys {sorted(known)}"
        )
    values = {}
    for name, field in known.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}", error)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}.{name}: missing, expected a value of type {hints[name]}")
    return kind(**values)
