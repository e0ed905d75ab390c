"""Files that a user asked for: refused before the work that should end in them, and written whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import OutputError
from .files import atomic_file


def check_place(file: Path | None) -> None:
    """Refuse a file that cannot be made; None is none.

    Raises:
        OutputError: its folder is not there or cannot be written to, or a folder has its name.
    """
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"output: {str(file.parent)!r} is no directory; make it, or choose another file")
    if file.is_dir():
        raise OutputError(f"output: {str(file)!r} is a directory, expected a file; give it a name in there")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"output: {str(folder)!r} cannot be written to; choose another file")


def write_json(file: Path, data: Any) -> None:
    """Write JSON, readable to people.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with atomic_file(file) as path:
            path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as cause:
        raise OutputError(f"output: cannot write {str(file)!r} ({cause.strerror})") from cause
