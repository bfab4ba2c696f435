"""The commands of the docs as a reader has them: `python` and `headwater` on the PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
