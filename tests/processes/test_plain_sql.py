"""Anyone may insert with plain SQL: from another process, another language, another SQLite."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Callable

import pytest
from process_child import Child, drain
from process_roles import insert

import headwater

INSERT = "INSERT INTO messages (topic, data) VALUES (?, ?)"
pytestmark = pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 37), reason="STRICT tables need SQLite 3.37")


def test_a_row_is_a_message_and_wakes_a_reader(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> None:
    subscription = log.subscribe("s", "orders.>")
    child = spawn(insert, path)
    assert child.hears_of((INSERT, ("orders.new", '{"order": 17}'))) == "ok"
    (message,) = subscription.fetch(1, timeout=20)
    assert (message.topic, message.data, message.attempt) == ("orders.new", {"order": 17}, 1)
    assert message.id
    message.ack()
    assert log.publish("orders.new", 2) == message.seq + 1
    assert [topic.count for topic in log.topics()] == [2]


def test_a_rollback_delivers_nothing(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> None:
    subscription = log.subscribe("s", ">")
    child = spawn(insert, path)
    child.hears_of(("BEGIN IMMEDIATE",))
    child.hears_of((INSERT, ("a", "1")))
    assert subscription.fetch(1, timeout=0.1) == []
    child.hears_of(("ROLLBACK",))
    assert subscription.fetch(1, timeout=0.3) == []
    assert log.last_seq() == 0
    child.hears_of((INSERT, ("a", "2")))
    assert drain(subscription, 20 if not log.last_seq() else 0.1)[0][2] == 2


def test_a_transaction_is_delivered_whole(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> None:
    subscription = log.subscribe("s", ">")
    child = spawn(insert, path)
    child.hears_of(("BEGIN IMMEDIATE",))
    for number in range(3):
        child.hears_of((INSERT, ("a", str(number))))
        assert subscription.fetch(10) == []
    child.hears_of(("COMMIT",))
    assert [message.data for message in subscription.fetch(10, timeout=20)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("topic", "data", "problem"),
    [("a..b", "1", "topic must be"), ("a.*", "1", "topic must be"), ("", "1", "topic must be"), ("a", "{", "JSON")],
)
def test_what_is_no_message_is_refused(
    log: headwater.Log, path: str, spawn: Callable[..., Child], topic: str, data: str, problem: str
) -> None:
    assert problem in spawn(insert, path).hears_of((INSERT, (topic, data)))
    assert log.last_seq() == 0


def test_the_command_line_tool(log: headwater.Log, path: str) -> None:
    tool = shutil.which("sqlite3")
    if tool is None:
        pytest.skip("no sqlite3 command here")
    subscription = log.subscribe("s", ">")
    statement = "INSERT INTO messages (topic, data) VALUES ('from.shell', json_object('n', 1))"
    subprocess.run([tool, "-cmd", ".timeout 10000", path, statement], check=True)
    assert [message.data for message in subscription.fetch(1, timeout=20)] == [{"n": 1}]


def test_inserts_between_our_own_publishes_keep_one_order(
    log: headwater.Log, path: str, spawn: Callable[..., Child]
) -> None:
    child = spawn(insert, path)
    for number in range(20):
        log.publish("a", ["ours", number])
        child.hears_of((INSERT, ("a", f'["theirs", {number}]')))
    found = drain(log.subscribe("s", ">"))
    assert [seq for seq, _, _ in found] == [*range(1, 41)]
    assert [data for _, _, data in found] == [[writer, number] for number in range(20) for writer in ("ours", "theirs")]
