"""Every error a user can meet, drawn as one tree.

    DflashError                     shown by the command line without a traceback
    ├── UserError                   the input, the request or the installation is at fault; exit code 2
    │   ├── CheckpointError         a checkpoint is missing, damaged or contradicts itself
    │   ├── UnsupportedError        a checkpoint asks for something that is not implemented, by name
    │   ├── PairError               target and draft do not belong together
    │   ├── BundleError             a bundle is missing, damaged, or was edited into nonsense
    │   ├── RequestError            a generation request cannot be served as asked
    │   │   └── BusyError               a service has no room for it now
    │   ├── ProviderError           an engine or execution provider asked for is not there
    │   ├── OutputError             the place to write to cannot be used
    │   └── OpError                 the arguments of the custom op do not fit (also a ValueError)
    ├── EngineError                 the inference engine failed while running; exit code 1
    ├── EngineBuildError            an engine could not be built from a graph; exit code 1
    └── ParityError                 a bundle does not compute what its originals compute; exit code 1

A message says what, got, expected, and what to do, in this order:
``block_size: got 0, expected >= 2; set dflash_config.block_size in draft/config.json``.
`field_error` writes it. Anything that is not in this tree is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import TypeVar


class DflashError(Exception):
    """Base of all errors that carry a message for the user."""

    exit_code = 1


class UserError(DflashError):
    """The user can mend it: input, request or installation."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or contradicts itself."""


class UnsupportedError(UserError):
    """A checkpoint asks for something that is not implemented; the message names it."""


class PairError(UserError):
    """The target and the draft do not belong together."""


class BundleError(UserError):
    """A bundle is missing, damaged, or its manifest does not hold."""


class RequestError(UserError):
    """A generation request cannot be served as asked."""


class BusyError(RequestError):
    """A service has no room for the request now; the same request may be served later."""


class ProviderError(UserError):
    """An engine or execution provider that was asked for is not there."""


class OutputError(UserError):
    """The place to write to cannot be used."""


class OpError(UserError, ValueError):
    """The arguments of the custom op do not fit together."""


class EngineError(DflashError):
    """The inference engine failed while running."""


class EngineBuildError(DflashError):
    """An engine could not be built from a graph."""


class ParityError(DflashError):
    """A bundle does not compute what its originals compute."""


E = TypeVar("E", bound=DflashError)


def field_error(kind: type[E], what: str, got: object, expected: str, todo: str = "") -> E:
    """Build an error of `kind` whose message says what, got, expected and what to do."""
    message = f"{what}: got {got!r}, expected {expected}"
    return kind(f"{message}; {todo}" if todo else message)
