"""What parity found: one record a stage, in the order data flows, and the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...bundle.records import record_to_dict
from .tolerances import Tolerance

MOST_DIVERGENCES = 20
"""Divergences kept in a stage's record; all of them are counted."""


@dataclass(frozen=True)
class Divergence:
    """One choice that the bundle made differently.

    Attributes:
        where: prompt and position.
        original: the original's choice, a token id or a name.
        bundle: the bundle's.
        gap: how far the original scores the bundle's choice below its own, in logits.
        margin: how far the original's second best is below its best, in logits.
        excused: the gap is within the stage's limit.
    """

    where: str
    original: str
    bundle: str
    gap: float | None
    margin: float | None
    excused: bool


@dataclass(frozen=True)
class StageReport:
    """One stage. Numbers are None where they mean nothing for its kind, or nothing finite was there.

    Attributes:
        samples: numbers or choices compared.
        max_abs: largest absolute difference.
        relative: see `Tolerance.relative`.
        cosine: largest 1 - cosine of a row.
        kl: largest divergence of a row, in nats.
        agreement: share of choices that are the same.
        finite_original: every number of the original is finite.
        finite_bundle: every number of the bundle is finite.
        reasons: why it failed; empty if it passed.
        divergences: the first few choices that differ; `divergence_count` of them in all.
        note: what else is worth knowing.
    """

    name: str
    samples: int
    tolerance: Tolerance
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None
    kl: float | None = None
    agreement: float | None = None
    finite_original: bool = True
    finite_bundle: bool = True
    reasons: tuple[str, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    divergence_count: int = 0
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        record: dict[str, Any] = record_to_dict(self)
        return {"name": record.pop("name"), "passed": self.passed, **record}


@dataclass(frozen=True)
class ParityReport:
    """The whole comparison.

    Attributes:
        stages: in the order data flows, so that the first bad one is where to look.
        originals: packages that computed the reference, with versions.
        provider: the execution provider that computed the bundle.
        prompts: prompts compared.
        new_tokens: tokens generated for each.
        remarks: what the whole generations showed.
    """

    bundle: str
    dtype: str
    engine: str
    provider: str
    originals: dict[str, str]
    prompts: int
    new_tokens: int
    stages: tuple[StageReport, ...]
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are stages and every one passed."""
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    @property
    def first_bad_stage(self) -> StageReport | None:
        """The failed stage that data reaches first."""
        return next((stage for stage in self.stages if not stage.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        record: dict[str, Any] = record_to_dict(self)
        bad = self.first_bad_stage
        return {
            "passed": self.passed,
            "first_bad_stage": None if bad is None else bad.name,
            **record,
            "stages": [stage.to_dict() for stage in self.stages],
        }

    def lines(self) -> list[str]:
        """The report for a terminal."""
        originals = ", ".join(f"{name} {version}" for name, version in self.originals.items())
        lines = [
            f"{self.bundle} ({self.dtype}) on {self.engine} {self.provider}",
            f"against {originals} in float32; {self.prompts} prompts, {self.new_tokens} new tokens each",
            "",
            _row(*(title for title, _ in _COLUMNS)),
        ]
        for stage in self.stages:
            lines.append(_row(*(write(stage) for _, write in _COLUMNS)))
            lines += [f"    {reason}" for reason in stage.reasons]
            if stage.note and not stage.passed:
                lines.append(f"    {stage.note}")
            lines += [f"    {_divergence(d)}" for d in stage.divergences[:3]]
            if stage.divergence_count > 3:
                lines.append(f"    and {stage.divergence_count - 3} more; see the JSON report")
        return [*lines, "", *self.remarks, self._verdict()]

    def _verdict(self) -> str:
        bad = self.first_bad_stage
        if bad is not None:
            failed = sum(not stage.passed for stage in self.stages)
            return (
                f"FAIL: {failed} of {len(self.stages)} stages; the first that data reaches is {bad.name}: "
                f"{bad.reasons[0]}"
            )
        if not self.stages:
            return "FAIL: nothing was compared"
        return f"PASS: {len(self.stages)} stages"


def _divergence(divergence: Divergence) -> str:
    gap = "unknown" if divergence.gap is None else f"{divergence.gap:.2e}"
    verdict = "near-tie" if divergence.excused else "not a near-tie"
    return (
        f"{divergence.where}: original {divergence.original}, bundle {divergence.bundle}; "
        f"{verdict}, gap {gap}" + ("" if divergence.margin is None else f", margin {divergence.margin:.2e}")
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _agreement(stage: StageReport) -> str:
    return "-" if stage.agreement is None else f"{100 * stage.agreement:.2f}%"


def _limit(stage: StageReport) -> str:
    tolerance = stage.tolerance
    return _number(tolerance.relative if tolerance.relative is not None else tolerance.margin)


_COLUMNS: tuple[tuple[str, Callable[[StageReport], str]], ...] = (
    ("stage", lambda s: s.name),
    ("samples", lambda s: str(s.samples)),
    ("max abs", lambda s: _number(s.max_abs)),
    ("relative", lambda s: _number(s.relative)),
    ("limit", _limit),
    ("1 - cos", lambda s: _number(s.cosine)),
    ("KL", lambda s: _number(s.kl)),
    ("agree", _agreement),
    ("", lambda s: "PASS" if s.passed else "FAIL"),
)
_WIDTHS = (24, 11, 9, 9, 9, 9, 9, 9, 5)


def _row(*cells: str) -> str:
    first, *rest = zip(cells, _WIDTHS, strict=True)
    return (f"{first[0]:<{first[1]}}" + "".join(f" {cell:>{width}}" for cell, width in rest)).rstrip()
