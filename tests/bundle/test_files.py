import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from dflash_deploy.bundle.errors import BundleError, OutputError
from dflash_deploy.bundle.files import (
    atomic_directory,
    atomic_file,
    check_writable,
    safe_path,
    sha256_from_file,
)
from toy_bundle import toy_bundle


def _content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def final(tmp_path: Path) -> Path:
    directory = tmp_path / "out" / "bundle"
    directory.mkdir(parents=True)
    toy_bundle(directory)
    return directory


def test_a_new_directory_appears_whole(tmp_path):
    final = tmp_path / "deep" / "new"
    with atomic_directory(final) as work:
        (work / "manifest.json").write_text("{}")
        assert not final.exists()
        assert work.parent == final.parent
    assert _content(final) == {"manifest.json": b"{}"}
    assert list(final.parent.iterdir()) == [final]


def test_an_earlier_bundle_is_replaced_whole(final):
    with atomic_directory(final) as work:
        (work / "manifest.json").write_text("new")
    assert _content(final) == {"manifest.json": b"new"}
    assert list(final.parent.iterdir()) == [final]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit(1)])
def test_an_earlier_bundle_survives_an_interrupt(final, error):
    before = _content(final)

    def write() -> None:
        with atomic_directory(final) as work:
            (work / "manifest.json").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert _content(final) == before
    assert list(final.parent.iterdir()) == [final]


def test_a_full_disk_is_an_output_error_and_changes_nothing(final):
    before = _content(final)

    def write() -> None:
        with atomic_directory(final):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="No space left on device; nothing was changed"):
        write()
    assert _content(final) == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("moves", [0, 1])
def test_an_earlier_bundle_survives_a_failing_swap(final, monkeypatch, error, moves):
    """The last instant: the old one is on its way out, the new one not yet in."""
    before, rename, done = _content(final), os.rename, []

    def fail(source: Path, destination: Path) -> None:
        if len(done) == moves:
            done.append("failed")
            raise error
        done.append("moved")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)

    def write() -> None:
        with atomic_directory(final) as work:
            (work / "manifest.json").write_text("new")

    with pytest.raises((OutputError, KeyboardInterrupt)):
        write()
    assert _content(final) == before
    assert list(final.parent.iterdir()) == [final]


def test_a_foreign_directory_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(OutputError, match="directory with other content"), atomic_directory(tmp_path):
        pytest.fail("the block must not start")
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "x").write_text("text")
    with (
        pytest.raises(OutputError, match="is a file, expected a directory"),
        atomic_directory(tmp_path / "x"),
    ):
        pytest.fail("the block must not start")


def test_an_empty_directory_is_taken(tmp_path):
    final = tmp_path / "empty"
    final.mkdir()
    with atomic_directory(final) as work:
        (work / "a").write_text("a")
    assert _content(final) == {"a": b"a"}


def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write beside"), atomic_directory(tmp_path / "file" / "out"):
        pytest.fail("the block must not start")


def test_a_place_is_tried_before_the_work_and_nothing_is_left(tmp_path):
    check_writable(tmp_path / "new" / "deep" / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for place in ("file/out", "file/deep/out", f"{'x' * 300}/out"):
        with pytest.raises(OutputError, match=r"cannot write beside .*; choose another --output"):
            check_writable(tmp_path / place)
    with pytest.raises(OutputError, match="is a file"):
        check_writable(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system that refuses a superuser")
def test_a_place_that_no_permission_opens_is_refused():
    with pytest.raises(OutputError, match="cannot write beside /proc/x"):
        check_writable(Path("/proc/x"))


def test_the_umask_decides_who_may_read(tmp_path):
    old = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "d"):
            pass
        with atomic_file(tmp_path / "f") as path:
            path.write_text("x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    final = tmp_path / "report.json"
    final.write_text("old")

    def write() -> None:
        with atomic_file(final) as path:
            path.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert _content(tmp_path) == {"report.json": b"old"}


def test_hashing_tells_its_progress(tmp_path):
    data = os.urandom((4 << 20) + 5)
    (tmp_path / "x").write_bytes(data)
    told: list[int] = []
    assert sha256_from_file(tmp_path / "x", told.append) == hashlib.sha256(data).hexdigest()
    assert told == [1 << 20] * 4 + [5]


def test_safe_path_joins_plain_paths(tmp_path):
    assert safe_path(tmp_path, "a/b.bin") == tmp_path / "a" / "b.bin"
    with pytest.raises(BundleError):
        safe_path(tmp_path, "../b.bin")
