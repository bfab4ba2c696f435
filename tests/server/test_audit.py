"""The audit trail: what it tells, and that it never stands in the way."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from foreign_client import Client, Make, Serve, bearer, connect, turn
from raw_http import get
from websockets.exceptions import InvalidStatus

from headwater import ManualClock
from headwater.errors import InvalidConfigurationError, InvalidOptionError, StoreError
from headwater.protocol.jsonrpc import Fault
from headwater.server import audit
from headwater.server import server as server_module
from headwater.server.audit import Audit
from headwater.server.auth import EVERYTHING, TokenFile, id_of

WHO = {"address": "10.0.0.1", "token": "abc", "label": "shop"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


# --- what it tells ----------------------------------------------------------------------------------------------------


SCHEDULE = {"schedule": {"id": "s", "topic": "a", "every_ms": 60_000}, "publisher": "p"}


async def dead_letter(client: Client) -> str:
    await client.subscribe("s", "a")
    seq = await client.publish("a", "secret")
    await client.delivery()
    await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": seq})
    await client.release("s")
    return str((await client.call("rpc.dead_letters.export"))["lines"][0])


async def test_every_change_is_reported_with_token_and_address(serve_tokens: Serve, make: Make, path: Path) -> None:
    token = make("operator", EVERYTHING)
    async with serve_tokens(audit=str(path)) as server, connect(server, **bearer(token)) as client:
        line = await dead_letter(client)
        done: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("rpc.retain", {"topic": "a", "max_count": 9}, {"topic": "a", "max_count": 9}),
            ("rpc.retention.remove", {"topic": "a"}, {"topic": "a"}),
            ("rpc.schedule.declare", SCHEDULE, {"publisher": "p"}),
            ("rpc.schedule.remove", {"schedule_id": "s"}, {"schedule_id": "s"}),
            ("rpc.seek", {"subscription_id": "s", "start": "new"}, {"subscription_id": "s", "start": "new"}),
            ("rpc.subscription.pause", {"subscription_id": "s"}, {"subscription_id": "s"}),
            ("rpc.subscription.resume", {"subscription_id": "s"}, {"subscription_id": "s"}),
            ("rpc.dead_letters.redrive", {"to_topic": "b"}, {"to_topic": "b"}),
            ("rpc.dead_letters.import", {"lines": [line]}, {"lines": 1}),
            ("rpc.dead_letters.purge", {"topic": "a"}, {"topic": "a"}),
            ("rpc.subscription.remove", {"subscription_id": "s"}, {"subscription_id": "s"}),
        ]
        for method, params, _ in done:
            await client.call(method, params)
        await client.subscribe("t", "a", takeover=True)
        assert await client.code("rpc.seek", {"subscription_id": "none", "start": 0}) == -32002  # nothing was changed
    reported = lines(path)
    expected = [
        *((method, output) for method, _, output in done),
        ("subscription.taken_over", {"subscription_id": "t"}),
    ]
    assert [each["event"] for each in reported] == [event for event, _ in expected]
    for each, (_, output) in zip(reported, expected, strict=True):
        assert (each["address"], each["token"], each["label"]) == ("127.0.0.1", id_of(token), "operator")
        assert each["time"].endswith("Z")
        assert each["outcome"] == "done"
        assert {name: each[name] for name in output} == output
    assert "secret" not in path.read_text()
    assert token not in path.read_text()


@pytest.mark.usefixtures("short_close")
async def test_a_change_is_reported_though_its_client_has_hung_up(serve: Serve, path: Path) -> None:
    async with serve(audit=str(path)) as server, connect(server) as looker:
        for number in range(10):
            await looker.subscribe(f"s{number}", "a")
            await looker.release(f"s{number}")
        for number in range(10):
            async with connect(server) as client:
                await client.ask("rpc.subscription.remove", {"subscription_id": f"s{number}"})
                client.vanish()
        while await looker.call("rpc.subscriptions"):
            await turn()
        await looker.subscribe("held", "a")
        async with connect(server) as client:
            wanted = {"subscription_id": "held", "topic": "a", "takeover": True}
            await client.ask("rpc.subscribe.persistent", wanted)
            client.vanish()
        await looker.note("rpc.lost")
    reported = lines(path)
    removed = [f"s{number}" for number in range(10)]
    assert sorted(each["subscription_id"] for each in reported if each["event"] == "rpc.subscription.remove") == removed
    assert [each["subscription_id"] for each in reported if each["event"] == "subscription.taken_over"] == ["held"]
    assert {each["outcome"] for each in reported} <= {"done", "unknown"}


async def test_every_refusal_is_reported(serve_tokens: Serve, make: Make, path: Path) -> None:
    token = make("reader", read=["a"])
    owners, thiefs = (make(label, read=["a"], consume=["*"]) for label in ("owner", "thief"))
    async with serve_tokens(audit=str(path)) as server:
        with pytest.raises(InvalidStatus):
            async with connect(server, **bearer("hw_wrong")):
                pass
        assert (await get(server, "/metrics")).status == 401
        async with connect(server) as client:
            assert await client.code("rpc.topics") == -32000
            assert await client.code("rpc.authenticate", {"token": "hw_wrong"}) == -32000
            await client.call("rpc.authenticate", {"token": token})
            assert await client.code("rpc.publish", {"topic": "b", "data": 1}) == -32000
            assert await client.code("rpc.publish.batch", {"messages": [{"topic": "b", "data": 1}]}) == -32000
            assert await client.code("rpc.subscribe", {"topic": "b"}) == -32000
            assert await client.code("rpc.retain", {"topic": "b", "max_count": 1}) == -32000
            assert await client.code("orders.count") == -32000
        async with connect(server, **bearer(owners)) as owner, connect(server, **bearer(thiefs)) as thief:
            await owner.subscribe("s", "a")
            assert await thief.code("rpc.subscription", {"subscription_id": "s"}) == -32002
    reported = [(each["event"], each.get("method", each.get("path")), each.get("label")) for each in lines(path)]
    assert reported == [
        ("authentication.refused", "/rpc", None),
        ("authentication.refused", "/metrics", None),
        ("authentication.refused", "rpc.topics", None),
        ("authentication.refused", "rpc.authenticate", None),
        ("right.refused", "rpc.publish", "reader"),
        ("right.refused", "rpc.publish.batch", "reader"),
        ("right.refused", "rpc.subscribe", "reader"),
        ("right.refused", "rpc.retain", "reader"),
        ("right.refused", "orders.count", "reader"),
        ("right.refused", "rpc.subscription", "thief"),
    ]
    assert "hw_wrong" not in path.read_text()


async def test_tokens_that_appear_and_disappear_are_reported(
    serve_tokens: Serve, make: Make, tokens: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.01)
    before = make("before", EVERYTHING)
    async with serve_tokens(audit=str(path)):
        made = make("new", read=["a"])
        while not lines(path):
            await turn()
        tokens.revoke(str(id_of(before)))
        while len(lines(path)) < 2:
            await turn()
    reported = [(each["event"], each["token"], each["label"], each["scopes"]) for each in lines(path)]
    assert reported[0] == ("token.made", id_of(made), "new", {"read": ["a"]})
    assert reported[1][:3] == ("token.revoked", id_of(before), "before")
    assert len(reported) == 2


async def test_without_a_file_the_log_has_it(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as server, connect(server) as client:
        with caplog.at_level("INFO", "headwater"):
            await client.call("rpc.retain", {"topic": "a", "max_count": 1})
    [record] = [each for each in caplog.records if each.getMessage().startswith("audit")]
    assert record.getMessage() == "audit: rpc.retain"
    assert (record.__dict__["address"], record.__dict__["topic"]) == ("127.0.0.1", "a")


# --- how it is written ------------------------------------------------------------------------------------------------


def test_refusals_are_limited_and_counted(path: Path) -> None:
    trail = Audit(str(path), ManualClock(), lambda: 0.0)
    for number in range(1_000):
        trail.refused("right.refused", WHO, number=number)
    trail.refused("right.refused", {"address": "10.0.0.2"}, number=-1)  # another one is not drowned
    trail.record("rpc.seek", WHO)  # nor what was done
    trail.close()
    reported = lines(path)
    assert len(reported) == audit.REFUSED_BURST + 2
    assert reported[-2] | {"time": ""} == {
        "time": "",
        "event": "right.refused",
        "address": "10.0.0.2",
        "number": -1,
        "left_out": 1_000 - audit.REFUSED_BURST,
    }


def test_refusals_of_one_token_do_not_drown_those_of_another_at_its_address(path: Path) -> None:
    trail = Audit(str(path), ManualClock(), lambda: 0.0)
    for token in ("abc", "def"):
        for _ in range(audit.REFUSED_BURST):
            trail.refused("right.refused", {**WHO, "token": token})
    trail.close()
    assert len(lines(path)) == 2 * audit.REFUSED_BURST


def test_what_was_refused_is_not_reported_as_a_change_and_what_is_not_known_is(path: Path) -> None:
    trail = Audit(str(path), ManualClock())
    for error in (InvalidOptionError("no"), Fault(-32602, "no"), StoreError("it may have been done"), RuntimeError()):
        with pytest.raises(type(error)), trail.change("rpc.seek", WHO, why=type(error).__name__):
            raise error
    trail.close()
    reported = [(each["why"], each["outcome"]) for each in lines(path)]
    assert reported == [("StoreError", "unknown"), ("RuntimeError", "unknown")]


def test_refusals_of_very_many_addresses_are_limited_too(path: Path) -> None:
    trail = Audit(str(path), ManualClock(), lambda: 0.0)
    for number in range(5_000):
        trail.refused("authentication.refused", {"address": f"10.{number}"})
    trail.close()
    assert len(lines(path)) == audit.REFUSED_BURST_OF_ALL
    assert len(trail._by_client) <= audit.CLIENTS_MAX


def test_values_are_cut(path: Path) -> None:
    trail = Audit(str(path), ManualClock())
    trail.record("rpc.seek", WHO, where="x" * 100_000, ids=[*range(1_000)])
    trail.close()
    [reported] = lines(path)
    assert len(reported["where"]) == audit.TEXT_CHARS_MAX + 1
    assert len(reported["ids"]) == audit.LISTED_MAX


def test_the_file_is_for_its_owner_and_appended_to(path: Path) -> None:
    for number in range(2):
        trail = Audit(str(path), ManualClock())
        trail.record("rpc.seek", WHO, number=number)
        trail.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each["number"] for each in lines(path)] == [0, 1]


def test_a_file_that_was_renamed_is_left_alone(path: Path, tmp_path: Path) -> None:
    trail = Audit(str(path), ManualClock())
    trail.record("rpc.seek", WHO, number=0)
    eventually(lambda: len(lines(path)), 1)
    old = path.rename(tmp_path / "audit.jsonl.1")
    trail.record("rpc.seek", WHO, number=1)
    eventually(lambda: len(lines(path)), 1)
    path.unlink()
    trail.record("rpc.seek", WHO, number=2)
    trail.close()
    assert [each["number"] for each in (*lines(old), *lines(path))] == [0, 2]


def test_a_full_disk_loses_lines_and_says_how_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for so many bytes, as a quota gives them out."""
    room = [200]
    write = os.write

    def bounded(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    trail = Audit(str(path), ManualClock())
    monkeypatch.setattr(audit.os, "write", bounded)
    for number in range(100):
        trail.record("rpc.seek", WHO, number=number)
    eventually(lambda: (trail._file is not None and trail._file._waiting.empty(), room[0]), (True, 0))
    monkeypatch.setattr(audit.os, "write", write)
    trail.record("rpc.seek", WHO, number=100)
    trail.close()
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            assert line.startswith('{"time"')  # the one that was cut off
    whole = [each["number"] for each in found if "number" in each]
    [lost] = [each["lines"] for each in found if each["event"] == "audit.lost"]
    assert whole[-1] == 100
    assert len(whole) + lost == 101


def test_a_disk_that_hangs_delays_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # and nothing is read
    monkeypatch.setattr(audit, "CLOSE_S", 0.05)
    trail = Audit(str(pipe), ManualClock())
    try:
        for number in range(audit.LINES_WAITING_MAX + 5_000):
            trail.record("rpc.seek", WHO, number=number, where="x" * 200)
        trail.close()
        assert trail._file is not None
        assert trail._file._lost > 0
    finally:
        os.close(reader)


def test_a_file_that_cannot_be_written_is_refused_at_the_start(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigurationError) as refused:
        Audit(str(tmp_path / "none" / "audit"), ManualClock())
    assert refused.value.next == "Set server.audit to a file that this user may write"


async def test_a_refused_token_is_a_line_at_info_and_a_refused_right_a_warning(
    serve_tokens: Serve, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make("reader", read=["a"])
    with caplog.at_level("INFO", "headwater"):
        async with serve_tokens() as server:
            async with connect(server) as stranger:
                await stranger.code("rpc.authenticate", {"token": "hw_wrong"})
            async with connect(server, **bearer(reader)) as client:
                await client.code("rpc.retain", {"topic": "b", "max_count": 1})
    logged = [(each.getMessage(), each.levelname) for each in caplog.records if each.getMessage().startswith("audit")]
    assert logged == [("audit: authentication.refused", "INFO"), ("audit: right.refused", "WARNING")]


async def test_a_dry_run_is_no_change(serve_tokens: Serve, make: Make, path: Path) -> None:
    token = make("operator", EVERYTHING)
    async with serve_tokens(audit=str(path)) as server, connect(server, **bearer(token)) as client:
        await dead_letter(client)
        before = lines(path)
        await client.call("rpc.seek", {"subscription_id": "s", "start": "first", "dry_run": True})
        await client.call("rpc.dead_letters.redrive", {"dry_run": True})
        await client.call("rpc.dead_letters.purge", {"dry_run": True})
        await client.call("rpc.dead_letters.purge")
        eventually(lambda: len(lines(path)) > len(before), True)
        assert [each["event"] for each in lines(path)[len(before) :]] == ["rpc.dead_letters.purge"]
