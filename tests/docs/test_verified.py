"""docs/verified.md is what the records say, and a record that is not one is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from verified_page import (
    COMMAND,
    NOT_YET,
    PAGE,
    PARTS,
    ROOT,
    RUNS,
    Run,
    all_runs,
    run_from_text,
    verified_page,
)

RUN = Run("engines-tensorrt", "2027-01-02", "a GPU", "make test-gpu", {"tensorrt": "11"}, True, {}, {})


def row(page: str, part: str) -> str:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {PARTS[part].title} |"))
    return line


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == verified_page(all_runs()), (
        f"docs/verified.md is not up to date; run: {COMMAND}"
    )


def test_its_tests_exist():
    for part in PARTS.values():
        for path in part.tests:
            assert (ROOT / path).exists(), path


def test_a_part_without_a_run_says_so_and_with_one_names_it():
    assert row(verified_page([]), "engines-tensorrt").endswith(f"| {NOT_YET} |")
    assert row(verified_page([]), "conv-kernel").endswith(f"| {NOT_YET} |")
    assert row(verified_page([RUN]), "engines-tensorrt").endswith("| a GPU, 2027-01-02: `make test-gpu` |")
    failed = row(verified_page([replace(RUN, passed=False)]), "engines-tensorrt")
    assert failed.endswith("`make test-gpu` **failed** |")


def test_a_kernel_that_changed_since_is_said(monkeypatch):
    import verified_page as page

    (run,) = (run for run in all_runs() if run.device == "NVIDIA H200" and run.date == "2026-11-29")
    assert "has changed since this run" in verified_page([run])
    monkeypatch.setattr(page, "SOURCES", {})
    assert "has changed since this run" not in verified_page([run])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": "other"}, "part: got 'other', expected one of"),
        ({"date": "2027"}, "date: got '2027', expected yyyy-mm-dd"),
        ({"passed": "yes"}, "passed: got 'yes', expected a bool"),
        ({"more": 1}, "expected the fields"),
    ],
)
def test_a_record_that_is_none_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run_from_text(json.dumps({**vars(RUN), **changes}), "a.json")


def test_records_are_named_by_their_date():
    for path in RUNS.glob("*.json"):
        assert path.name.startswith(json.loads(path.read_text())["date"])
