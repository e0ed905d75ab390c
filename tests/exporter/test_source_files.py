"""`SourceFiles`: right hashes in whatever order parts are read; what is read in order is read once."""

from __future__ import annotations

import errno
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from dflash_deploy.bundle.errors import CheckpointError
from dflash_deploy.exporter import source_files
from dflash_deploy.exporter.source_files import SourceFiles

SIZES = {"a": 10_000, "b": 3_000, "c": 0, "d": 500}
PARTS = [
    (name, start, min(700, size - start)) for name, size in SIZES.items() for start in range(0, size, 700)
]


@pytest.fixture
def contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, bytes]:
    """Files and what is in them; skipped parts are read in small pieces."""
    monkeypatch.setattr(source_files, "_CHUNK_BYTES", 256)
    chance = random.Random(0)
    made = {tmp_path / name: chance.randbytes(size) for name, size in SIZES.items()}
    for path, data in made.items():
        path.write_bytes(data)
    return made


def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each later call for bytes reads."""
    real, sizes = source_files._read, []

    def counted(path: Path, offset: int, size: int, **options: Any) -> Any:
        sizes.append(size)
        return real(path, offset, size, **options)

    monkeypatch.setattr(source_files, "_read", counted)
    return sizes


def check(contents: dict[Path, bytes], parts: list[tuple[str, int, int]]) -> None:
    source = SourceFiles(tuple(contents))
    source.start_hashing()
    by_name = {path.name: path for path in contents}
    for name, offset, size in parts:
        got = source.read(by_name[name], offset, size)
        assert got.numpy().tobytes() == contents[by_name[name]][offset : offset + size]
    infos = source.finish_hashing()
    assert {name: info.sha256 for name, info in infos.items()} == {
        path.name: hashlib.sha256(data).hexdigest() for path, data in contents.items()
    }
    assert {name: info.bytes for name, info in infos.items()} == SIZES


def test_in_order_nothing_is_read_twice(contents: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = read_bytes(monkeypatch)
    check(contents, PARTS)
    assert sum(sizes) == sum(SIZES.values())


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_the_same(
    contents: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    sizes = read_bytes(monkeypatch)
    chance = random.Random(seed)
    parts = chance.sample(PARTS, k=len(PARTS) * 2 // 3)
    check(contents, parts)
    assert sum(sizes) <= 2 * sum(SIZES.values())


def test_without_hashing_only_what_is_asked_for_is_read(
    contents: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = read_bytes(monkeypatch)
    first = next(iter(contents))
    assert SourceFiles((first,)).read(first, 9_000, 10).numpy().tobytes() == contents[first][9_000:9_010]
    assert sizes == [10]


def test_a_file_that_became_shorter_is_refused(contents: dict[Path, bytes]) -> None:
    first = next(iter(contents))
    source = SourceFiles((first,))
    with pytest.raises(CheckpointError, match="a: got 100 bytes from byte 9900 on, expected 200"):
        source.read(first, 9_900, 200)
    first.unlink()
    with pytest.raises(CheckpointError, match="a: cannot be read"):
        source.read(first, 0, 1)
    source.start_hashing()
    with pytest.raises(CheckpointError, match="a: cannot be read"):
        source.finish_hashing()


@pytest.mark.parametrize("can_skip_cache", [True, False])
def test_past_the_cache_or_not_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_skip_cache: bool
) -> None:
    """Parts that begin and end anywhere, up to the file's end and beyond it."""
    monkeypatch.setattr(source_files, "_LARGE_BYTES", 1)
    if not can_skip_cache:
        monkeypatch.delattr(source_files.os, "O_DIRECT", raising=False)
    path, data = tmp_path / "file", random.Random(0).randbytes(50_001)
    path.write_bytes(data)
    for offset in (0, 1, 8, 4095, 4096, 12_289, 50_000):
        for size in (1, 7, 4096, 20_000):
            end = offset + size
            if end > len(data):
                with pytest.raises(CheckpointError, match=rf"got {len(data) - offset} bytes from byte"):
                    source_files._read(path, offset, size, last=True)
            else:
                read = source_files._read(path, offset, size, last=True)
                assert read.numpy().tobytes() == data[offset:end]
                assert read.data_ptr() % 8 == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_a_file_system_that_always_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(source_files, "_LARGE_BYTES", 1)
    monkeypatch.setattr(source_files.os, "preadv", refused)
    (tmp_path / "file").write_bytes(b"abc")
    assert source_files._read(tmp_path / "file", 1, 2, last=True).numpy().tobytes() == b"bc"
