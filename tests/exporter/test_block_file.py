"""`BlockFile`: the bytes that were put in, whatever the disk offers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_deploy.exporter import block_file
from dflash_deploy.exporter.block_file import BlockFile

BLOCK = 8192
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "_BLOCK_BYTES", BLOCK)


def check_written(path: Path, size: int, step: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    file = BlockFile(path)
    left = data
    while left.numel():
        room = file.room()
        count = min(step, room.numel(), left.numel())
        room[:count].copy_(left[:count])
        file.advance(count)
        left = left[count:]
    digest = file.finish()
    file.close()
    expected = data.numpy().tobytes()
    assert path.read_bytes() == expected
    assert digest == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 4097])
@pytest.mark.parametrize("step", [1000, BLOCK])
def test_it_holds_what_was_put_in(size: int, step: int, tmp_path: Path) -> None:
    check_written(tmp_path / "file", size, step)


@pytest.mark.parametrize("number", REFUSALS)
def test_a_file_system_that_cannot_skip_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = fcntl.fcntl

    def refusing(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(number, "refused")
        return real(file, command, flags)

    monkeypatch.setattr(block_file.fcntl, "fcntl", refusing)
    check_written(tmp_path / "file", 3 * BLOCK + 5, BLOCK)


@pytest.mark.parametrize("number", REFUSALS)
def test_a_disk_with_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It says so when the first block is written; what it took until then is not written twice."""
    real, refused = os.write, []

    def choosy(file: int, data: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            if not refused:
                refused.append(1)
                return real(file, data[:4096])
            raise OSError(number, "refused")
        return real(file, data)

    direct = BlockFile(tmp_path / "probe")
    can_be_direct = direct._direct
    direct.close()
    monkeypatch.setattr(block_file.os, "write", choosy)
    check_written(tmp_path / "file", 3 * BLOCK + 5, BLOCK)
    assert bool(refused) == can_be_direct


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_file.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        check_written(tmp_path / "file", BLOCK, BLOCK)
