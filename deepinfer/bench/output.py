"""Whether figures can be written, asked before they are measured: a run takes minutes, and most of that on a GPU."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable(file: Path) -> str | None:
    """Why figures could not be written to a file, None if they can."""
    if not file.parent.is_dir():
        return f"there is no directory {file.parent}; make it, or name another file"
    if file.is_dir():
        return f"{file} is a directory; name a file"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"{file} may not be written to; name another file"
    return None
