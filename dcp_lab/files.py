"""Whether a file can be written, known before the work whose result goes there."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def why_unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, None if it can; make and change nothing.

    Args:
        path: The file. Folders that are missing above it can be made later.
    """
    if path.is_dir():
        return os.strerror(errno.EISDIR)
    there = path if path.exists() else next(up for up in path.absolute().parents if up.exists())
    if there != path and not there.is_dir():
        return f"{there} is no folder"
    needed = os.W_OK if there == path else os.W_OK | os.X_OK
    return None if os.access(there, needed) else os.strerror(errno.EACCES)
