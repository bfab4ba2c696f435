"""One run at a time writes a lake. The lock is a SQLite transaction left open: it ends with its process, however that
ends."""

from __future__ import annotations

from pathlib import Path

import apsw

from headwater.errors import Locked

LOCK = "lock.db"


class LakeLock:
    def __init__(self, lake: Path) -> None:
        lake.mkdir(parents=True, exist_ok=True)
        self._connection = apsw.Connection(str(lake / LOCK))
        try:
            self._connection.execute("BEGIN EXCLUSIVE")
        except apsw.BusyError as exc:
            self._connection.close()
            raise Locked(
                "another run is writing this lake",
                where=str(lake),
                next="Wait for it, or stop it; reading needs no lock",
            ) from exc

    def __enter__(self) -> LakeLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()
