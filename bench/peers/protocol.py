"""What a program in another process is asked and answers: JSON objects, one a line.

    -> {"target": PATH, "threads": N, "cache": PATH or null, "variant": TEXT}
    <- {"version": TEXT, "precision": TEXT, "note": TEXT}
    -> {"ids": [N, ...], "new_tokens": N}                    as often as wanted
    <- {"ids": [N, ...], "first_tokens": N, "first_token_ms": X, "total_ms": X}

Instead of an answer: {"error": TEXT}. The end of the input ends the process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

ERROR = "error"


@dataclass(frozen=True)
class Opened:
    """What a program says of itself.

    Attributes:
        version: of the library that computes.
        precision: of the weights and what is computed with them.
        note: what a reader of its figures should know; may be empty.
    """

    version: str
    precision: str
    note: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """What was generated.

    Attributes:
        ids: the new tokens.
        first_tokens: how many of them came at once as the first.
        first_token_ms: from the call until then.
        total_ms: of the whole call.
    """

    ids: tuple[int, ...]
    first_tokens: int
    first_token_ms: float
    total_ms: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """Read one.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        ids = tuple(int(token) for token in data["ids"])
        answer = cls(ids, int(data["first_tokens"]), float(data["first_token_ms"]), float(data["total_ms"]))
        if not ids or not 1 <= answer.first_tokens <= len(ids):
            raise ValueError(f"{len(ids)} tokens, {answer.first_tokens} of them first")
        if not 0.0 <= answer.first_token_ms <= answer.total_ms:
            raise ValueError(f"{answer.first_token_ms} ms to the first token, {answer.total_ms} ms in all")
        return answer


class Peer(Protocol):
    """A program, opened."""

    @property
    def opened(self) -> Opened:
        """What it is."""

    def generate(self, ids: list[int], new_tokens: int) -> Answer:
        """Decode greedily behind token ids, from an empty cache.

        It gives `new_tokens` tokens; a token that would end the answer does not end it.
        """


@dataclass(frozen=True)
class OpenRequest:
    """How a program is opened.

    Attributes:
        target: checkpoint of the model.
        threads: CPU threads it may use.
        cache: folder that it may keep a model of its own in.
        variant: see `PeerKind`.
    """

    target: Path
    threads: int
    cache: Path | None
    variant: str

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "target": str(self.target), "cache": self.cache and str(self.cache)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OpenRequest:
        """Read one."""
        cache = None if data["cache"] is None else Path(data["cache"])
        return cls(Path(data["target"]), data["threads"], cache, data["variant"])
