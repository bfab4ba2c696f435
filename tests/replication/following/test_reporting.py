"""Reports on their way."""

import json
import threading
from typing import Any

import pytest

from headwater.errors import ReplicationFailedError, UnreachableError, VersionConflictError
from headwater.replication import subscription
from headwater.replication.connection import as_partial
from headwater.replication.names import Remote, ReplicaName
from headwater.replication.subscription import Reporter

REMOTE = Remote("ws://127.0.0.1:1", ReplicaName("shop", "app.db"))


@pytest.mark.parametrize("is_there", [True, False])
async def test_the_last_one_goes_out_at_the_end_also_behind_another(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    asked: list[str] = []
    may_go_on = threading.Event()

    def ask(_url: str, *, body: bytes, **_: Any) -> bytes:
        asked.append(json.loads(body)["kind"])
        may_go_on.wait(10)
        if not is_there:
            raise UnreachableError("connection refused")
        return b""

    monkeypatch.setattr(subscription, "http_request", ask)
    reporter = Reporter(REMOTE, None, None)
    reporter.note_failure(0, as_partial(ReplicationFailedError("cut off")))
    reporter.note_failure(1, VersionConflictError("stale", newest=2))
    may_go_on.set()
    await reporter.flush()
    assert asked == ["partial", "conflict"]
