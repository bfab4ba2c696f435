"""Another process that writes the same database."""

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
    """The error of another process that begins a transaction; it rolls back."""
    command = [sys.executable, "-c", _INTRUDER, str(path)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return tried.stdout.strip()
