"""`headwater forward`."""

import contextlib
import json
import os
import signal
from pathlib import Path

import apsw
import pytest

import headwater
from headwater.api import forwarder
from headwater.broker.subscribe import check_subscription_id
from headwater.cli import forward
from headwater.cli.commands import load_command
from headwater.cli.forward import default_id


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_once_forwards_what_is_there_and_the_next_run_what_came_since(run, log: headwater.Log, path: Path, tmp_path):
    copy = tmp_path / "copy.jsonl"
    result = run("forward", path, copy, "--once", "--id", "copies")
    assert (result.code, result.out) == (0, f"forwarded 4 messages to file:{copy}\n")
    assert result.err == f"forwarding > of {path} to file:{copy} as copies\n"
    log.publish("orders.new", {"order": 4})
    assert run("forward", path, copy, "--once", "--id", "copies").out == f"forwarded 1 message to file:{copy}\n"
    assert [line["data"] for line in lines_of(copy)] == [
        {"order": 1},
        {"order": 2},
        {"order": 3},
        "hello",
        {"order": 4},
    ]
    assert log.subscription("copies").holder is None


def test_another_log_gets_copies_with_the_same_ids_and_those_it_has_only_once(
    run, log: headwater.Log, path: Path, tmp_path
):
    copy = tmp_path / "copy.db"
    for id in ("first", "again"):
        assert run("forward", path, f"headwater:{copy}", "--topics", "orders.>", "--once", "--id", id).code == 0
    with headwater.open(copy) as target:
        copies = [each.message for each in target.subscribe("t", ">", mode="ephemeral", start="first").messages()]
    originals = [each.message for each in log.subscribe("t", "orders.>", mode="ephemeral", start="first").messages()]
    assert [copy.id for copy in copies] == [original.id for original in originals]
    assert [copy.data for copy in copies] == [{"order": 1}, {"order": 2}, {"order": 3}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--start", "3"), [{"order": 3}, "hello"]),
        (("--start", "new"), []),
        (("--where", "data.order >= 2"), [{"order": 2}, {"order": 3}]),
        (("--topics", "notes.#", "--dialect", "amqp"), ["hello"]),
    ],
)
def test_which_messages(run, log: headwater.Log, path: Path, tmp_path, options, expected):
    copy = tmp_path / "copy.jsonl"
    copy.touch()
    assert run("forward", path, copy, "--once", *options).code == 0
    assert [line["data"] for line in lines_of(copy)] == expected


def test_to_stdout_nothing_but_the_copies_goes_there(run, log: headwater.Log, path: Path):
    result = run("forward", path, "stdout:", "--once", "--topics", "notes.made")
    assert result.code == 0
    assert [line["data"] for line in result.json_lines] == ["hello"]
    assert "forwarded 1 message to stdout" in result.err


def test_for_programs(run, log: headwater.Log, path: Path, tmp_path):
    result = run("forward", path, tmp_path / "copy.jsonl", "--once", "--json", "--id", "copies")
    assert {name: result.json[name] for name in ("id", "forwarded", "dead", "lag", "state", "breaker")} == {
        "id": "copies",
        "forwarded": 4,
        "dead": 0,
        "lag": 0,
        "state": "stopped",
        "breaker": "closed",
    }


def test_messages_that_the_target_cannot_hold_are_dead_letters_and_a_finding(run, path: Path, tmp_path):
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish("a", 1)
    with contextlib.closing(apsw.Connection(str(path))) as plain:  # as plain SQL may insert
        plain.execute("INSERT INTO messages (topic, data, \"from\") VALUES ('a', '2', ?)", ("x" * 300,))
    with headwater.open(path, maintenance_interval=None) as log:
        log.publish("a", 3)
    result = run("forward", path, f"headwater:{tmp_path / 'copy.db'}", "--once", "--id", "copies")
    assert result.code == 1
    assert "1 message refused there went to the dead letters" in result.out
    assert "headwater dlq ls" in result.err
    with headwater.open(path) as log:
        assert [letter.message.data for letter in log.dead_letters.list()] == [2]


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("gopher://x", (), "there is no transport for gopher:"),
        ("copy.db", (), "Did you mean headwater:copy.db?"),
        ("file:///tmp/copy.jsonl?batch=on", (), "a forwarder makes batches itself"),
        ("copy.jsonl", ("--wait", "soon"), "--wait must be a duration"),
        ("copy.jsonl", ("--start", "soon"), "--start is not a position"),
        ("copy.jsonl", ("--topics", "a..b"), "a..b"),
        ("copy.jsonl", ("--target-token", "t"), "--target-token is for a server"),
    ],
)
def test_what_cannot_be_is_refused(run, log: headwater.Log, path: Path, target, options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("forward", path, target, "--once", *options)
    assert result.code == 2
    assert why in result.err


@pytest.mark.parametrize("target", ["headwater:{}", "sqlite:{}", "headwater:{}?breaker=on"])
def test_a_log_is_not_forwarded_into_itself(run, log: headwater.Log, path: Path, tmp_path, target, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.db").symlink_to(path)
    for name in (path.name, "link.db"):
        result = run("forward", path, target.format(name), "--once")
        assert (result.code, "this is the log itself" in result.err) == (2, True)
    assert log.last_seq() == 4


def test_a_postgres_is_named_by_its_schema_without_a_password_and_not_forwarded_into_itself(run, postgres_url: str):
    user, rest = postgres_url.split("//")[1].split("@")
    given, shown = f"postgres://{user}:secret@{rest}", f"postgres://{user}@{rest}"
    with headwater.open(f"{given}?schema=one") as log:
        log.publish("a", 1)
    result = run("forward", f"{given}?schema=one", f"{given}?schema=two", "--once", "--id", "copies")
    assert result.err == f"forwarding > of {shown}?schema=one to {shown}?schema=two as copies\n"
    assert result.out == f"forwarded 1 message to {shown}?schema=two\n"
    result = run("forward", f"{given}?schema=one", f"headwater:{shown}?schema=one", "--once")
    assert (result.code, "this is the log itself" in result.err, "secret" in result.err) == (2, True, False)


def test_the_log_must_be_there(run, path: Path, tmp_path):
    result = run("forward", path, tmp_path / "copy.jsonl", "--once")
    assert (result.code, f"there is no log {path}" in result.err) == (2, True)
    assert not path.exists()


def test_once_with_a_target_that_is_away_ends_with_an_error_and_loses_nothing(
    run, log: headwater.Log, path: Path, monkeypatch
):
    monkeypatch.setattr(forward, "ONCE_BACKOFF_S", 0.01)
    result = run("forward", path, "redis://127.0.0.1:1/0", "--once", "--id", "copies")
    assert result.code == 3
    assert result.err.count("publishing 1 message failed: ") == 1
    assert "127.0.0.1:1" in result.err
    assert ".." not in result.err
    assert log.subscription("copies").lag == 4


def test_a_terminate_signal_ends_it_after_the_batch_in_flight(start, log: headwater.Log, path: Path, tmp_path):
    copy = tmp_path / "copy.jsonl"
    process = start("forward", path, copy, "--id", "copies", "--wait", "1h")
    assert process.stderr.readline() == f"forwarding > of {path} to file:{copy} as copies\n"
    while not any(info.in_flight == 4 for info in log.subscriptions()):
        pass
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"forwarded 4 messages to file:{copy}\n")
    assert len(lines_of(copy)) == 4


def test_a_second_one_with_the_same_name_says_that_it_waits(start, log: headwater.Log, path: Path, tmp_path):
    with log.subscribe("copies", ">"):
        process = start("forward", path, tmp_path / "copy.jsonl", "--id", "copies")
        process.stderr.readline()
        assert process.stderr.readline().startswith("waiting: another process forwards as copies")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("target", "id"),
    [
        ("redis://user:secret@host:6379/0?stream=orders", "forward-redis:user@host:6379/0-stream:orders"),
        ("redis://:p%40ss@host/0?breaker=on&maxlen=9", "forward-redis:host/0"),
        ("redis://u:sec/ret@host/0", "forward-redis:u@host/0"),
        ("s3://bucket/prefix?access_key_id=A&secret_access_key=B", "forward-s3:bucket/prefix"),
        ("headwater:postgres://u:secret@host/db?schema=s&password=x", "forward-headwater:postgres:u@host/db-schema:s"),
        ("headwater:other.db", "forward-headwater:/here/other.db"),
        ("headwater:/there/other.db?breaker=on", "forward-headwater:/there/other.db"),
        ("sqlite:///other.db", "forward-sqlite:/here/other.db"),
        ("copies/events.jsonl", "forward-file:/here/copies/events.jsonl"),
        ("file:///here/copies/events.jsonl?max_bytes=9", "forward-file:/here/copies/events.jsonl"),
        ("ws://host:8765", "forward-ws:host:8765"),
        ("stdout:", "forward-stdout"),
        ("memory:?max_messages=9", "forward-memory"),
        ("/there/copy:", "forward-file:/there/copy:"),
    ],
)
def test_the_usual_name_tells_which_target_and_no_secrets(target, id, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert default_id(target) == id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("file:///größe.jsonl", "file:///grüße.jsonl"),
        ("/a b.jsonl", "/a+b.jsonl"),
        ("file:///" + "x" * 300, "file:///" + "x" * 301),
        ("redis://host/0?stream=a", "redis://host/0?stream=b"),
        ("s3://b/p?endpoint=http://u:secret@one", "s3://b/p?endpoint=http://u:secret@two"),
    ],
)
def test_two_targets_never_share_a_name(one, other):
    names = {default_id(one), default_id(other)}
    assert len(names) == 2
    for name in names:
        assert check_subscription_id(name)
        assert "secret" not in name


def test_once_does_not_wait_for_another_that_forwards_as_the_same(run, log: headwater.Log, path: Path, tmp_path):
    with log.subscribe("copies", ">"):
        result = run("forward", path, tmp_path / "copy.jsonl", "--once", "--id", "copies")
    assert (result.code, "copies" in result.err) == (3, True)


def test_it_ends_when_its_reader_has_enough(start, log: headwater.Log, path: Path):
    process = start("forward", path, "stdout:", "--wait", "0s")
    assert json.loads(process.stdout.readline())["data"] == {"order": 1}
    process.stdout.close()
    log.publish_many([("orders.new", "x" * 1_000)] * 100)  # more than fits into the pipe
    assert process.wait(60) == 0


def test_the_defaults_of_the_flags_are_those_of_the_library():
    """They are written twice: completion must not import the forwarder."""
    [batch] = [each for each in load_command("forward").params if each.name == "batch"]
    assert (batch.default, batch.type.max) == (forwarder.BATCH, forwarder.BATCH_MAX)
