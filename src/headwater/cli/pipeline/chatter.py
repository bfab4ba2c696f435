"""What Spark's JVM and its helpers say on stderr: their logs, and the complaints of those that are cut off at the end.
Errors come to us as errors, so this is kept from the terminal, unless somebody debugs."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_BYTES_MAX = 20_000
STDERR = 2


def is_debugged() -> bool:
    return os.environ.get("HEADWATER_DEBUG") == "1"


@contextmanager
def warnings_kept() -> Iterator[None]:
    """Those of PySpark and its friends are for programmers."""
    with warnings.catch_warnings():
        if not is_debugged():
            warnings.simplefilter("ignore")
        yield


@contextmanager
def chatter_kept() -> Iterator[None]:
    """Processes that are started in this block have a file for their stderr, which is shown only if the block fails."""
    if is_debugged() or not _is_open(STDERR):
        yield
        return
    with tempfile.TemporaryFile() as file, os.fdopen(os.dup(STDERR), "w", encoding="utf-8", errors="replace") as real:
        before = sys.stderr
        if before is sys.__stderr__:
            sys.stderr = real  # what we say ourselves
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        except Exception:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES_MAX))
            real.write(file.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr = before
            os.dup2(real.fileno(), STDERR)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
