"""Reports of a push subscription: which, when, and on their way."""

import asyncio
import json
import threading
from typing import Any

import pytest

from headwater.errors import (
    HeadwaterError,
    NotADatabaseError,
    ReplicationFailedError,
    UnreachableError,
    VersionConflictError,
)
from headwater.replication import subscription
from headwater.replication.connection import as_partial
from headwater.replication.names import Remote, ReplicaName
from headwater.replication.subscription import REPORT_AFTER_MS, Reporter, kind_of

AWAY = UnreachableError("connection refused")


class Server:
    """The reports that it was sent; the first one is answered after `may_go_on` only."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.is_there = True
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def ask(self, _url: str, *, body: bytes, **_: Any) -> bytes:
        self.reports.append(json.loads(body))
        self.may_go_on.wait(10)
        if not self.is_there:
            raise AWAY
        return b""

    @property
    def kinds(self) -> list[str]:
        return [report["kind"] for report in self.reports]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(subscription, "http_request", server.ask)
    return server


@pytest.fixture
def reporter() -> Reporter:
    return Reporter(Remote("ws://127.0.0.1:1", ReplicaName("shop", "app.db")), None, None)


def cut_off(why: str = "cut off") -> HeadwaterError:
    return as_partial(ReplicationFailedError(why))


async def test_a_network_failure_is_reported_once_when_it_has_lasted_five_minutes(
    server: Server, reporter: Reporter
) -> None:
    for now_ms in range(0, REPORT_AFTER_MS, 30_000):
        reporter.note_failure(now_ms, AWAY)
        await reporter.flush()
    assert server.reports == []
    reporter.note_failure(REPORT_AFTER_MS, AWAY)
    await reporter.flush()
    assert [(report["kind"], report["since"]) for report in server.reports] == [("network", 300.0)]
    reporter.note_failure(2 * REPORT_AFTER_MS, AWAY)
    await reporter.flush()
    assert len(server.reports) == 1


async def test_success_begins_anew(server: Server, reporter: Reporter) -> None:
    reporter.note_failure(0, AWAY)
    reporter.note_success()
    reporter.note_failure(REPORT_AFTER_MS, AWAY)
    await reporter.flush()
    assert server.reports == []


async def test_a_partial_sync_is_reported_at_once_and_each_time(server: Server, reporter: Reporter) -> None:
    for number in (1, 2):
        reporter.note_failure(number * 1_000, cut_off())
        await reporter.flush()
        assert server.kinds == ["partial"] * number


async def test_what_could_not_be_sent_waits_and_the_newest_stays(server: Server, reporter: Reporter) -> None:
    server.is_there = False
    for why in ("first", "second"):
        reporter.note_failure(0, cut_off(why))
        await reporter.flush()
    server.is_there = True
    server.reports.clear()
    reporter.note_success()
    await reporter.flush()
    assert ["second" in report["error"] for report in server.reports] == [True]


@pytest.mark.parametrize("is_there", [True, False])
async def test_the_last_one_goes_out_at_the_end_also_behind_another(
    server: Server, reporter: Reporter, is_there: bool
) -> None:
    server.is_there = is_there
    server.may_go_on.clear()
    reporter.note_failure(0, cut_off())
    while not server.reports:
        await asyncio.sleep(0)
    reporter.note_failure(1, VersionConflictError("stale", newest=2))
    server.may_go_on.set()
    await reporter.flush()
    assert server.kinds == ["partial", "conflict"]


def test_kinds() -> None:
    assert kind_of(VersionConflictError("newer", newest=4)) == "conflict"
    assert kind_of(as_partial(UnreachableError("broke"))) == "partial"
    assert kind_of(cut_off()) == "partial"
    assert kind_of(AWAY) == "network"
    assert kind_of(NotADatabaseError("gone")) == "local"
