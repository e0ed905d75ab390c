"""Files of a bundle: hashes, safe relative paths, and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .errors import BundleError, OutputError

_CHUNK_BYTES = 1 << 20


def sha256_from_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hash a file in chunks; `progress` is told the bytes of each chunk."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))  # one for all: fresh memory takes longer than the hash
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def safe_path(root: Path, relative: str) -> Path:
    """Join a path from a manifest to the bundle's directory.

    Raises:
        BundleError: the path is absolute, leaves the bundle, or goes through a link.
    """
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or not pure.parts:
        raise BundleError(f"path in manifest: got {relative!r}, expected a relative path inside the bundle")
    path = root
    for part in pure.parts:
        path = path / part
        if path.is_symlink():
            raise BundleError(f"{relative}: is a symbolic link, expected a plain file in the bundle")
    return path


def check_replaceable(final: Path) -> None:
    """Check that a bundle may be put at `final`.

    Raises:
        OutputError: something else is there.
    """
    if final.exists() and not final.is_dir():
        raise OutputError(f"output: {final} is a file, expected a directory or a new path")
    if final.is_dir() and any(final.iterdir()) and not (final / "manifest.json").is_file():
        raise OutputError(
            f"output: {final} is a directory with other content, expected a new path, an empty directory "
            "or an earlier bundle; choose another --output"
        )


def check_writable(final: Path) -> None:
    """Check that a bundle can be written to `final`, before the work that should end there. Leaves nothing.

    Raises:
        OutputError: something else is there, or no directory can be made beside it.
    """
    final = Path(os.path.abspath(final))
    folder = final.parent
    try:
        check_replaceable(final)
        # Tried, for permissions say less: a superuser has them all, and a file system may still refuse.
        while not folder.exists():
            folder = folder.parent
        Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=folder)).rmdir()
    except OSError as cause:
        raise _unwritable(final, cause) from cause


def _unwritable(final: Path, cause: OSError) -> OutputError:
    return OutputError(f"output: cannot write beside {final}: {cause.strerror}; choose another --output")


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Give a temporary directory beside `final` that takes its place when the block ends well.

    If the block raises (an interrupt included), the temporary directory is removed and `final` stays as it
    was. An existing `final` is replaced only if it is a bundle (holds a manifest.json) or is empty.

    Raises:
        OutputError: `final` is something else, or its parent cannot be written.
    """
    final = Path(os.path.abspath(final))
    check_replaceable(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as cause:
        raise _unwritable(final, cause) from cause
    try:
        os.chmod(work, 0o777 & ~_umask())
        yield work
        _swap(work, final)
    except OSError as cause:
        raise OutputError(
            f"output: writing {final} failed: {cause.strerror or cause}; nothing was changed"
        ) from cause
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _swap(work: Path, final: Path) -> None:
    if not final.exists():
        os.rename(work, final)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".old", dir=final.parent))
    kept = old / "bundle"
    try:
        os.rename(final, kept)
        os.rename(work, final)
    except BaseException:
        if kept.exists() and not final.exists():
            os.rename(kept, final)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Give a temporary path beside `final`; it replaces `final` when the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent)
    os.close(handle)
    os.chmod(name, 0o666 & ~_umask())
    try:
        yield Path(name)
        os.replace(name, final)
    finally:
        Path(name).unlink(missing_ok=True)
