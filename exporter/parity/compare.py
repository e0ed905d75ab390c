"""Comparison of two sides of a stage. Knows arrays and ids, no models.

A stage fails on a number that is not finite on either side, on a shape mismatch, on a limit exceeded, and if
nothing was compared. Shapes: R rows, N numbers a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .report import MOST_DIVERGENCES, Divergence, StageReport
from .tolerances import Tolerance

_MOST_REASONS = 5


class Values:
    """A stage whose sides are numbers. Rows are the last axis; a row's scale is that of the original."""

    def __init__(self, name: str, tolerance: Tolerance, logits: bool = False) -> None:
        """Start empty.

        Args:
            name: the stage's name.
            tolerance: limits.
            logits: rows are logits: their divergence and the agreement of their argmax are measured.
        """
        self.name, self.tolerance, self.logits = name, tolerance, logits
        self.note = ""
        self.cause = ""  # the first reason, if there are any
        self._samples = self._rows = self._same = 0
        self._worst: dict[str, float] = {}
        self._finite = [True, True]
        self._reasons: list[str] = []

    def add(self, original: ArrayLike, bundle: ArrayLike, scale: ArrayLike | None = None) -> None:
        """Compare one piece.

        Args:
            original: [..., N].
            bundle: [..., N].
            scale: [...], the scale of each row if it is not the root mean square of the original's.
        """
        a, b = np.asarray(original), np.asarray(bundle)
        if a.shape != b.shape:
            reason = f"shape: got {b.shape}, expected {a.shape}"
            if reason not in self._reasons:
                self._reasons.append(reason)
            return
        if a.size == 0:
            return
        a, b = a.reshape(-1, a.shape[-1]).astype(np.float64), b.reshape(-1, b.shape[-1]).astype(np.float64)
        finite = np.isfinite(a).all(-1), np.isfinite(b).all(-1)
        self._finite = [self._finite[0] and bool(finite[0].all()), self._finite[1] and bool(finite[1].all())]
        self._samples += a.size
        whole = finite[0] & finite[1]
        scales = None if scale is None else np.asarray(scale, np.float64).reshape(-1)[whole]
        a, b = a[whole], b[whole]
        if len(a):
            self._measure(a, b, scales)

    def _measure(self, a: NDArray[Any], b: NDArray[Any], scale: NDArray[Any] | None) -> None:
        error = np.abs(a - b).max(-1)  # [R]
        self._at_worst("max_abs", error)
        if scale is None:
            scale = np.sqrt(np.square(a).mean(-1))
        # A row of zeros has no scale: there, only zeros are right.
        self._at_worst(
            "relative", np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
        )
        lengths = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        product = lengths[0] * lengths[1]
        both_zero = (lengths[0] == 0) & (lengths[1] == 0)
        cosine = np.divide((a * b).sum(-1), product, out=both_zero.astype(np.float64), where=product > 0)
        self._at_worst("cosine", np.maximum(1.0 - cosine, 0.0))
        if self.logits:
            log_p, log_q = _log_softmax(a), _log_softmax(b)
            self._at_worst("kl", np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0))
            self._rows += len(a)
            self._same += int((a.argmax(-1) == b.argmax(-1)).sum())

    def _at_worst(self, key: str, values: NDArray[Any]) -> None:
        self._worst[key] = max(self._worst.get(key, 0.0), float(values.max()))

    def report(self) -> StageReport:
        """The result so far."""
        reasons = self._reasons[:_MOST_REASONS]
        for side, finite in zip(("original", "bundle"), self._finite, strict=True):
            if not finite:
                reasons.append(f"the {side} holds NaN or infinity")
        if self._samples == 0:
            reasons.append("no samples were compared")
        names = {"relative": "relative error", "cosine": "1 - cosine", "kl": "KL divergence"}
        for key, name in names.items():
            limit, got = getattr(self.tolerance, key), self._worst.get(key)
            if limit is not None and got is not None and not got <= limit:
                reasons.append(f"{name}: got {got:.2e}, expected at most {limit:.2e}")
        if reasons and self.cause:
            reasons.insert(0, self.cause)
        worst = {key: value if np.isfinite(value) else None for key, value in self._worst.items()}
        return StageReport(
            self.name,
            self._samples,
            self.tolerance,
            max_abs=worst.get("max_abs"),
            relative=worst.get("relative"),
            cosine=worst.get("cosine"),
            kl=worst.get("kl"),
            agreement=self._same / self._rows if self._rows else None,
            finite_original=self._finite[0],
            finite_bundle=self._finite[1],
            reasons=tuple(reasons),
            note=self.note,
        )


class Choices:
    """A stage whose sides are choices: token ids, or candidates in a set.

    A different choice is excused if the original scores it within `Tolerance.margin` of its own.
    """

    def __init__(self, name: str, tolerance: Tolerance) -> None:
        """Start empty."""
        assert tolerance.margin is not None, name
        self.name, self.tolerance = name, tolerance
        self.note = ""
        self._limit = tolerance.margin
        self._samples = self._same = self._faults = 0
        self._divergences: list[Divergence] = []
        self._count = 0
        self._finite = True
        self._reasons: list[str] = []

    def add(
        self,
        where: str,
        original: object,
        bundle: object,
        gap: float | None = 0.0,
        margin: float | None = None,
    ) -> None:
        """Compare one choice.

        Args:
            where: prompt and position.
            original: the original's choice.
            bundle: the bundle's.
            gap: the original's score of its own choice minus that of the bundle's; None if it has no score.
            margin: the original's best score minus its second best.
        """
        self._samples += 1
        if original == bundle:
            self._same += 1
            return
        known = gap is not None and bool(np.isfinite(gap))
        self._finite = self._finite and (gap is None or known)
        excused = known and gap is not None and gap <= self._limit
        self._faults += not excused
        self._count += 1
        if len(self._divergences) < MOST_DIVERGENCES:
            finite_margin = None if margin is None or not np.isfinite(margin) else float(margin)
            self._divergences.append(
                Divergence(
                    where, str(original), str(bundle), float(gap) if known and gap is not None else None,
                    finite_margin, excused,
                )
            )  # fmt: skip

    def add_scored(self, where: str, scores: ArrayLike, bundle: int) -> bool:
        """Compare the bundle's choice with the best of the original's scores.

        Args:
            where: prompt and position.
            scores: [N], the original's score of every choice.
            bundle: index of the bundle's choice.

        Returns:
            Whether both chose the same.
        """
        row = np.asarray(scores)
        if not np.isfinite(row).all():
            self._finite = False
            self._samples += 1
            return False
        best = int(row.argmax())
        gap = float(row[best] - row[bundle]) if 0 <= bundle < row.size else None
        margin = float(row[best] - np.partition(row, -2)[-2]) if row.size > 1 else None
        self.add(where, best, bundle, gap, margin)
        return best == bundle

    def fail(self, reason: str) -> None:
        """Fail for a reason of its own."""
        self._reasons.append(reason)

    def report(self) -> StageReport:
        """The result so far."""
        reasons = self._reasons[:_MOST_REASONS]
        if not self._finite:
            reasons.append("the original's scores hold NaN or infinity")
        if self._samples == 0:
            reasons.append("no samples were compared")
        if self._faults:
            reasons.append(
                f"{self._faults} choices differ by more than a near-tie: got more than {self._limit:.1e} "
                "between the two in the original's scores"
            )
        return StageReport(
            self.name,
            self._samples,
            self.tolerance,
            agreement=self._same / self._samples if self._samples else None,
            finite_original=self._finite,
            reasons=tuple(reasons),
            divergences=tuple(self._divergences),
            divergence_count=self._count,
            note=self.note,
        )


class Settings:
    """A stage whose sides are settings."""

    def __init__(self, name: str, tolerance: Tolerance) -> None:
        """Start empty."""
        self.name, self.tolerance = name, tolerance
        self._samples = 0
        self._reasons: list[str] = []

    def add(self, what: str, original: object, bundle: object) -> None:
        """Compare one setting."""
        self._samples += 1
        if original != bundle:
            self._reasons.append(f"{what}: got {bundle!r}, expected {original!r}")

    def report(self) -> StageReport:
        """The result so far."""
        reasons = tuple(self._reasons) if self._samples else ("no settings were compared",)
        same = self._samples - len(self._reasons)
        return StageReport(
            self.name,
            self._samples,
            self.tolerance,
            agreement=same / self._samples if self._samples else None,
            reasons=reasons,
        )


def _log_softmax(x: NDArray[Any]) -> NDArray[Any]:
    shifted = x - x.max(-1, keepdims=True)
    result: NDArray[Any] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def best_match(rows: ArrayLike, candidates: list[NDArray[Any]]) -> tuple[int, list[float]]:
    """Which candidate is nearest to `rows`.

    Args:
        rows: [R, N].
        candidates: arrays [R, N].

    Returns:
        The index of the nearest and every candidate's distance: the median over rows of
        ``|rows - candidate| / |candidate|``; infinity where rows are not finite.
    """
    a = np.asarray(rows, np.float64)
    distances = []
    for candidate in candidates:
        b = np.asarray(candidate, np.float64)
        length = np.maximum(np.linalg.norm(b, axis=-1), np.finfo(np.float64).tiny)
        distance = float(np.median(np.linalg.norm(a - b, axis=-1) / length))
        distances.append(distance if np.isfinite(distance) else float("inf"))
    return int(np.argmin(distances)), distances
