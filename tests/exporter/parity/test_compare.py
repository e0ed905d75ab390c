"""C08: the comparison itself. It must not pass what it cannot judge."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.parity.compare import Choices, Settings, Values, best_match
from dflash_deploy.exporter.parity.report import ParityReport, StageReport
from dflash_deploy.exporter.parity.tolerances import TOLERANCES, Kind, Tolerance

LIMITS = TOLERANCES[DType.FLOAT32]


def rows(seed: int = 0, count: int = 5, size: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def compared(original: np.ndarray, bundle: np.ndarray, kind: Kind = Kind.LOGITS) -> StageReport:
    stage = Values("stage", LIMITS[kind], logits=kind is Kind.LOGITS)
    stage.add(original, bundle)
    return stage.report()


@pytest.mark.parametrize("kind", [Kind.TAP, Kind.CONTEXT, Kind.LAYER, Kind.LOGITS])
def test_one_ulp_passes(kind: Kind) -> None:
    a = rows() * np.float32(1e4)
    report = compared(a, np.nextafter(a, np.inf, dtype=np.float32), kind)
    assert report.passed, report.reasons
    assert report.max_abs is not None
    assert 0 < report.max_abs < 1e-2


def test_measures() -> None:
    a, b = rows(), rows()
    b[2, 3] += 0.5
    report = compared(a, b)
    assert not report.passed
    assert report.samples == a.size
    assert report.max_abs == pytest.approx(0.5, rel=1e-6)
    assert report.relative == pytest.approx(0.5 / np.sqrt((a[2].astype(float) ** 2).mean()), rel=1e-6)
    assert report.cosine == pytest.approx(
        1 - (a[2] @ b[2]) / np.linalg.norm(a[2]) / np.linalg.norm(b[2]), rel=1e-3
    )
    p, q = (np.exp(x[2]) / np.exp(x[2]).sum() for x in (a.astype(float), b.astype(float)))
    assert report.kl == pytest.approx((p * np.log(p / q)).sum(), rel=1e-6)
    assert report.agreement == 1.0
    assert all("got" in reason and "expected" in reason for reason in report.reasons)


def test_a_small_row_is_not_hidden_by_a_large_one() -> None:
    a = rows()
    a[0] *= 1e6
    b = a.copy()
    b[1, 0] += 0.1
    assert not compared(a, b, Kind.TAP).passed


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_not_finite_fails_on_either_side_and_on_both(value: float, sides: tuple[int, ...]) -> None:
    both = rows(), rows()
    for side in sides:
        both[side][1, 1] = value
    report = compared(*both)
    assert not report.passed
    assert (report.finite_original, report.finite_bundle) == (0 not in sides, 1 not in sides)
    json.dumps(report.to_dict(), allow_nan=False)


def test_all_nan_has_no_numbers() -> None:
    nothing = np.full((2, 3), np.nan)
    report = compared(nothing, nothing)
    assert not report.passed
    assert report.max_abs is report.relative is report.kl is None
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("shape", [(5, 63), (4, 64), (1, 5, 64), (320,), (0, 64)])
def test_shape_mismatch_fails_and_is_not_broadcast(shape: tuple[int, ...]) -> None:
    report = compared(rows(), np.zeros(shape, np.float32))
    assert not report.passed
    assert report.reasons[0] == f"shape: got {shape}, expected (5, 64)"


def test_zero_samples_fail() -> None:
    assert compared(np.zeros((0, 4)), np.zeros((0, 4))).reasons == ("no samples were compared",)
    assert not Values("stage", LIMITS[Kind.TAP]).report().passed
    assert not Choices("stage", LIMITS[Kind.CHOICE]).report().passed
    assert not Settings("stage", LIMITS[Kind.SETTINGS]).report().passed


def test_zeros() -> None:
    zeros = np.zeros((2, 4))
    assert compared(zeros, zeros, Kind.TAP).passed
    assert not compared(zeros, zeros + 1e-30, Kind.TAP).passed, "a row of zeros has no scale"
    assert not compared(rows(), np.zeros((5, 64)), Kind.TAP).passed


def test_scale_may_be_given() -> None:
    stage = Values("stage", Tolerance(relative=1e-3))
    stage.add(np.array([[1e-9, 0.0]]), np.array([[0.0, 1e-9]]), np.array([10.0]))
    assert stage.report().passed


def test_kl_is_measured_on_large_logits() -> None:
    a = np.array([[1000.0, 0.0, -1000.0]])
    assert compared(a, a + 5).kl == 0.0
    assert not compared(a, -a).passed


def test_choices() -> None:
    stage = Choices("stage", Tolerance(margin=0.01))
    scores = np.array([1.0, 3.0, 2.995, -5.0])
    assert stage.add_scored("a", scores, 1)
    assert not stage.add_scored("b", scores, 2)
    report = stage.report()
    assert report.passed, "a near-tie"
    assert report.agreement == 0.5
    (only,) = report.divergences
    assert only.excused
    assert (only.where, only.original, only.bundle) == ("b", "1", "2")
    assert only.gap == pytest.approx(0.005)
    assert only.margin == pytest.approx(0.005)
    stage.add_scored("c", scores, 0)
    report = stage.report()
    assert not report.passed
    assert report.divergence_count == 2
    assert not report.divergences[1].excused


@pytest.mark.parametrize("bundle", [-1, 4, 10**9])
def test_choice_that_is_none_fails(bundle: int) -> None:
    stage = Choices("stage", Tolerance(margin=0.01))
    stage.add_scored("a", np.zeros(4), bundle)
    assert not stage.report().passed


def test_choice_by_scores_that_are_not_finite_fails() -> None:
    stage = Choices("stage", Tolerance(margin=0.01))
    stage.add_scored("a", np.array([1.0, np.nan]), 1)
    assert not stage.report().passed
    assert not stage.report().finite_original
    other = Choices("stage", Tolerance(margin=0.01))
    other.add("a", 1, 2, float("nan"))
    other.add("b", 1, 2, None)
    assert other.report().reasons[-1].startswith("2 choices differ")
    json.dumps(other.report().to_dict(), allow_nan=False)


def test_settings() -> None:
    stage = Settings("stage", LIMITS[Kind.SETTINGS])
    stage.add("draft.taps", (1, 2), (1, 2))
    assert stage.report().passed
    stage.add("draft.block_size", 8, 7)
    assert stage.report().reasons == ("draft.block_size: got 7, expected 8",)


def test_best_match_names_the_nearest() -> None:
    layers = [rows(seed) for seed in range(4)]
    best, distances = best_match(layers[2] + 1e-6, layers)
    assert best == 2
    assert distances[2] < 1e-5 < 0.5 < distances[1]
    assert best_match(np.full((5, 64), np.nan), layers)[1] == [float("inf")] * 4


def test_every_dtype_has_every_limit_and_every_limit_a_reason() -> None:
    for limits in TOLERANCES.values():
        assert set(limits) == set(Kind)
        assert all(tolerance.why for tolerance in limits.values())
        assert limits[Kind.CHOICE].margin
        assert limits[Kind.GENERATION].margin


def test_report_names_the_first_bad_stage_in_order() -> None:
    def stage(name: str, *reasons: str) -> StageReport:
        return StageReport(name, 1, Tolerance(), reasons=reasons)

    def report(*stages: StageReport) -> ParityReport:
        return ParityReport("pair", "float32", "engine", "provider", {"torch": "2"}, 1, 8, stages)

    good = report(stage("a"), stage("b"))
    assert good.passed
    assert good.lines()[-1] == "PASS: 2 stages"
    bad = report(stage("a"), stage("b", "too far"), stage("c", "too"))
    assert not bad.passed
    assert bad.to_dict()["first_bad_stage"] == "b"
    assert bad.lines()[-1] == "FAIL: 2 of 3 stages; the first that data reaches is b: too far"
    assert not report().passed, "nothing compared is not a pass"
    assert max(len(line) for line in bad.lines()) <= 110
