"""Where things are kept that can be made again, and how they get there whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/headwater`, else `~/.cache/headwater`. It may not be there yet."""
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_CACHE_HOME", "")
    # The rule of XDG: a path that is not absolute counts as none.
    base = Path(given) if os.path.isabs(given) else Path(environ.get("HOME") or os.path.expanduser("~")) / ".cache"
    return base / "headwater"


def private_folder(folder: Path) -> Path:
    """Make it, with what is above it; ours alone, because programs are started from it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_whole(file: Path, text: str, mode: int) -> None:
    """Whoever looks sees the old file or the new one, never half of one."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.chmod(mode)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
