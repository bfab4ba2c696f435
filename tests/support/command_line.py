"""The commands of the docs as a reader has them: `python` and `headwater` on the PATH, and a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADWATER = [sys.executable, "-m", "headwater"]


def shell_environment(tools: Path) -> dict[str, str]:
    """An environment whose PATH begins with `tools`, a new folder with both commands.

    They are scripts: a link to the interpreter of a virtual environment would run the one that it was made from, with
    other packages.
    """
    tools.mkdir()
    for name, words in {"python": "", "headwater": " -m headwater"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (tools / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """`headwater serve events.db` in this directory, and its port."""
    serve = [*HEADWATER, "serve", "events.db", "--port", "0"]
    with subprocess.Popen(serve, cwd=directory, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(found[1] for line in server.stderr if (found := re.search(r"ws://127.0.0.1:(\d+)", line)))
        finally:
            server.terminate()
