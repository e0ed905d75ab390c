"""What the builder process is told, and what it tells: a job on its standard input, then lines of JSON."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from ...bundle.errors import EngineBuildError
from ...bundle.manifest import EngineFlag
from ...bundle.records import record_from_dict, record_to_dict
from ...bundle.tensors import DType
from .options import Verbosity

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Job:
    """One engine to build. Paths are absolute.

    Attributes:
        backend: name of the backend.
        graph_file: the graph, ready for the parser.
        beside: the path that the graph's weight files are relative to: a file in their directory.
        output: where the engine goes.
        profiles: least, typical and largest shape of each input that is not fixed, by profile.
        compute_capabilities: GPU generations; empty for the one at hand.
        precision: element type of weights and caches.
        flags: what is special about the engine.
        workspace_bytes: most scratch memory of a layer.
        timing_cache: file with what earlier builds measured.
        verbosity: what goes to standard error.
        plugin: name and version of the plugin that the graph uses.
    """

    backend: str
    graph_file: str
    beside: str
    output: str
    profiles: dict[str, Shapes]
    compute_capabilities: tuple[str, ...]
    precision: DType
    flags: tuple[EngineFlag, ...]
    workspace_bytes: int | None
    timing_cache: str | None
    verbosity: Verbosity
    plugin: str | None = None


class Fault(enum.Enum):
    """Whose fault a failure is: the machine lacks something, or the graph does not build."""

    MACHINE = "machine"
    GRAPH = "graph"


@dataclass(frozen=True)
class Step:
    """What the builder is doing."""

    text: str


@dataclass(frozen=True)
class Note:
    """Something that the user should know, and that does not stop the build."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The build failed; no file was written."""

    fault: Fault
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The engine is written.

    Attributes:
        version: of the library, to the last part.
        flags: what is special about it.
    """

    version: str
    flags: tuple[EngineFlag, ...]


Message = Step | Note | Failed | Done
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Step, Note, Failed, Done)}


def message_to_line(message: Message) -> str:
    """Write a message as one line."""
    return json.dumps({"kind": type(message).__name__, "message": record_to_dict(message)}) + "\n"


def message_from_line(line: str) -> Message:
    """Read a message.

    Raises:
        EngineBuildError: the line is none.
    """
    try:
        data = json.loads(line)
        kind, message = _KINDS[data["kind"]], data["message"]
    except (ValueError, KeyError, TypeError) as cause:
        raise EngineBuildError(f"builder process: got {line!r}, expected a message") from cause
    return record_from_dict(kind, message, "builder process", EngineBuildError)
