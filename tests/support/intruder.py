"""Somebody else, who would like to write a database too."""

import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60.0
GOT_IN, LOCKED = "got in", "database is locked"

_INTRUDER = f"""
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
    print("{GOT_IN}")
except sqlite3.OperationalError as exc:
    print(exc)
"""


def try_to_write(path: str | Path) -> str:
    """What another process is told that begins a transaction; it takes it back."""
    command = [sys.executable, "-c", _INTRUDER, str(path)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return tried.stdout.strip()
