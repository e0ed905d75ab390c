"""What a loader gives: the spec, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Default
from .spec import DraftFamily, DraftFormat, DraftSpec


@dataclass(frozen=True)
class Recognition:
    """Which format and network a checkpoint is, and the sign it was recognised by."""

    format: DraftFormat
    family: DraftFamily
    reason: str


@dataclass(frozen=True)
class DraftReading:
    """A parsed draft.

    Attributes:
        spec: what it computes.
        recognition: how its format was recognised.
        defaults: values that the checkpoint leaves open and the original's own code fills in.
        verifier: name of the target it was made for, where the checkpoint says it.
        notes: what of the checkpoint is passed over, or taken in a way that a reader might not expect.
    """

    spec: DraftSpec
    recognition: Recognition
    defaults: tuple[Default, ...]
    verifier: str | None
    notes: tuple[str, ...] = ()
