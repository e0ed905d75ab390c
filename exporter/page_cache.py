"""Reading and writing past the page cache: what a file system says that does not offer it."""

from __future__ import annotations

import errno

NOT_OFFERED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Error numbers; the last two are one on Linux."""
