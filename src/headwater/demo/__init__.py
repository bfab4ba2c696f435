"""The demos: what Headwater promises, shown with real processes and checked on the way; and the commands and addresses
that people copy from what is shown."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def this_command() -> str:
    """How to call `headwater` from here."""
    if shutil.which("headwater"):
        return "headwater"
    script = Path(sys.argv[0])
    if script.name != "headwater":
        return "python -m headwater"
    return min(os.path.relpath(script), os.path.abspath(script), key=len)


def reachable(url: str) -> str:
    """An address to connect to, where the server's own stands for all that the machine has."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{EVERYWHERE.get(host.strip('[]'), host)}:{port}"


def page_of(url: str, path: str) -> str:
    """The same server for a browser: ws:// is http://, wss:// is https://."""
    return url.replace("ws", "http", 1) + path
