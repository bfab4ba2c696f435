"""What a dedupe queue in a file has on disk when a call returns."""

from contextlib import AbstractContextManager
from pathlib import Path

import apsw
import pytest

from headwater.stores import dedupe
from headwater.stores.sqlite.connection import immediate

NORMAL, FULL = 1, 2


def test_what_is_done_is_synced_and_a_claim_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim need not survive a power cut, which its owner does not either."""
    levels: list[int] = []

    def begin(connection: apsw.Connection) -> AbstractContextManager[None]:
        levels.append(connection.pragma("synchronous"))
        return immediate(connection)

    with dedupe.SqliteDedupe(tmp_path / "dedupe.db") as queue:
        monkeypatch.setattr(dedupe, "immediate", begin)
        queue.begin("handler", "claimed", 0, 1_000)
        assert levels == [NORMAL]
        queue.finish("handler", "claimed")
        assert levels[1] == FULL
        levels.clear()
        assert queue.add("handler", "done")
        assert levels[0] == FULL
