"""A range read through ADBC is what the log itself says, row by row."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwater
from headwater.errors import NotALog, StoreError
from headwater.message import Message, datetime_of
from headwater.pipeline.schema import ARROW_SCHEMA, COLUMNS
from headwater.pipeline.source import adbc, postgres_rows, reading
from headwater.pipeline.source.conditions import topics_condition
from headwater.pipeline.source.log import log_name
from headwater.pipeline.source.log import reading as looking
from headwater.pipeline.source.reading import read_range
from headwater.ports.records import Selection
from headwater.stores.sqlite import SqliteStore
from headwater.topics import parse_pattern

Put = Callable[[str, list[dict[str, Any]]], None]

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
MS = st.integers(0, 253_402_300_799_999)
TOPIC = st.lists(st.sampled_from(["a", "b", "ä", "日本", "x-1"]), min_size=1, max_size=4).map(".".join)
RARE = {
    "id": TEXT,
    "type": TEXT,
    "version": st.integers(-(2**63), 2**63 - 1),
    "from": TEXT,
    "to": TEXT,
    "reply_to": TEXT,
    "correlation_id": TEXT,
    "content_type": TEXT,
    "traceparent": TEXT,
    "priority": st.integers(-(2**63), 2**63 - 1),
    "deliver_at": MS,
    "expires_at": MS,
    "headers": st.dictionaries(TEXT, JSON, max_size=3).map(json.dumps),
}
PLAIN = st.fixed_dictionaries({"topic": TOPIC, "data": JSON.map(json.dumps), "published_at": MS, "checked": st.just(1)})
FULL = st.fixed_dictionaries(
    {"topic": TOPIC, "data": JSON.map(lambda value: json.dumps(value, ensure_ascii=False)), "published_at": MS},
    optional=RARE,
)


def rows_of(path: str, after: int = 0, upto: int = 2**40, **options: Any) -> list[dict[str, Any]]:
    return [row for batch in read_range(path, after, upto, **options) for row in batch.to_pylist()]


def as_the_log_says(path: str) -> list[Message]:
    with looking(path) as reader:
        return reader.scan(Selection(parse_pattern(">")), 0, 100_000).messages


def expected(message: Message) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "id": message.id,
        "topic": message.topic,
        "type": message.type,
        "version": message.version,
        "from": message.from_,
        "to": message.to,
        "reply_to": message.reply_to,
        "correlation_id": message.correlation_id,
        "content_type": message.content_type,
        "traceparent": message.traceparent,
        "priority": message.priority,
        "published_at": message.published_at,
        "deliver_at": message.deliver_at,
        "expires_at": message.expires_at,
        "headers": message.headers if bytes(message.raw_headers) != b"null" else None,
        "data": message.data_json,
        "size": message.size,
    }


def comparable(row: dict[str, Any], says: dict[str, Any]) -> dict[str, Any]:
    """The row with those headers parsed that the log has as other values than text."""
    if row["headers"] is None:
        return row
    wanted = says["headers"]
    found = {name: value if isinstance(wanted[name], str) else json.loads(value) for name, value in row["headers"]}
    return {**row, "headers": found}


@settings(max_examples=60, deadline=None)
@given(st.lists(PLAIN | FULL, max_size=25), st.integers(1, 7), st.integers(1, 9), st.integers(0, 20))
def test_rows_are_those_of_the_log_whatever_they_hold_and_however_they_are_cut(
    put: Put, make_log: Callable[[Path], str], rows: list[dict[str, Any]], batch: int, chunk: int, middle: int
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = make_log(Path(directory) / "log.db")
        put(path, rows)
        says = [expected(message) for message in as_the_log_says(path)]
        assert len(says) == len(rows)
        patch.setattr(reading, "CHUNK_SEQS", chunk)
        patch.setattr(reading, "STATEMENT_ROWS", max(1, chunk // 2))
        found = rows_of(path, 0, middle, batch_rows=batch) + rows_of(path, middle, batch_rows=batch)
    assert [comparable(row, said) for row, said in zip(found, says, strict=True)] == says


def test_batches_have_the_fixed_schema_also_where_everything_is_null(log_path: str, put: Put) -> None:
    put(log_path, [{"topic": "a", "data": "1"}])
    (batch,) = read_range(log_path, 0, 10)
    assert batch.schema == ARROW_SCHEMA
    (batch,) = read_range(log_path, 0, 10, columns=["topic", "size", "deliver_at", "id"])
    assert batch.schema == pa.schema([ARROW_SCHEMA.field(name) for name in ["topic", "size", "deliver_at", "id"]])


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_alone_is_what_it_is_among_all(log_path: str, put: Put, column: str) -> None:
    full = {"id": "i", "headers": '{"a":1}', "priority": 3, "from": "f", "deliver_at": 5, "version": 1}
    put(log_path, [{"topic": "a.b", "data": '"x"'}, {"topic": "c", "data": "2", **full}])
    alone = [row[column] for row in rows_of(log_path, columns=[column])]
    assert alone == [row[column] for row in rows_of(log_path)]


def test_text_that_is_not_utf8_comes_through_with_marks_and_its_true_size(log_path: str, put: Put) -> None:
    forced: dict[str, Any] = {"checked": 2, "type": b"t\xff", "headers": b'{"a\xff":1}', "id": b"\xc3"}
    put(log_path, [{"topic": b"a.\xff\xfe", "data": b'"\xf0\x28"', **forced}, {"topic": "b", "data": "2"}])
    first, second = rows_of(log_path)
    assert (first["topic"], first["data"], first["size"]) == ("a.\ufffd\ufffd", '"\ufffd("', 4)
    assert (first["type"], first["id"], first["headers"]) == ("t\ufffd", "\ufffd", [("a\ufffd", "1")])
    assert (second["topic"], second["data"]) == ("b", "2")


def test_times_put_in_by_force_do_not_stop_the_reading(log_path: str, put: Put) -> None:
    put(log_path, [{"topic": "a", "data": "1", "checked": 2, "published_at": 2**62, "deliver_at": -(2**62)}])
    (row,) = rows_of(log_path)
    assert (row["published_at"], row["deliver_at"]) == (datetime_of(2**62), datetime_of(0))


def test_payloads_of_a_megabyte_are_cut_into_small_chunks(
    log_path: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 3 * 1024 * 1024)
    monkeypatch.setattr(reading, "STATEMENT_ROWS", 1)
    monkeypatch.setattr(reading, "STATEMENT_ROWS_BIG", 1)
    payloads = [json.dumps(chr(97 + n) * 1024 * 1024) for n in range(10)]
    put(log_path, [{"topic": "a", "data": payload} for payload in payloads])
    batches = list(read_range(log_path, 0, 100))
    assert [batch.num_rows for batch in batches] == [3, 3, 3, 1]
    assert [data for batch in batches for data in batch["data"].to_pylist()] == payloads


@pytest.mark.parametrize(
    "patterns", [["a.*"], ["a.*", "c"], ["a.>"], ["*"], [">"], [], ["a.b", "c.*.d"], ["nothing.>"]]
)
def test_topics_are_those_the_patterns_match(log_path: str, put: Put, patterns: list[str]) -> None:
    topics = ["a", "a.b", "a.b.c", "c", "c.x.d", "c.x.e", "ab.c"] * 3
    put(log_path, [{"topic": topic, "data": "1"} for topic in topics])
    parsed = [parse_pattern(text) for text in patterns]
    found = rows_of(log_path, condition=topics_condition(parsed), columns=["seq"])
    fits = [not parsed or any(pattern.matches(topic) for pattern in parsed) for topic in topics]
    assert [row["seq"] for row in found] == [seq for seq, fit in enumerate(fits, 1) if fit]


def test_a_range_that_retention_emptied_is_skipped_in_few_steps(
    log_path: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(log_path, [{"seq": seq, "topic": "a", "data": "1"} for seq in (1, 10**9, 10**9 + 1)])
    statements: list[str] = []
    batches = adbc.batches
    monkeypatch.setattr(adbc, "batches", lambda *args: statements.append(args[2]) or batches(*args))
    assert [row["seq"] for row in rows_of(log_path)] == [1, 10**9, 10**9 + 1]
    assert len(statements) < 8


def test_the_log_is_walked_along_its_key_and_never_sorted(
    log_path: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(log_path, [{"topic": "a.b", "data": "1", "type": "t"}])
    asked: list[tuple[str, Any]] = []
    batches = adbc.batches
    monkeypatch.setattr(adbc, "batches", lambda *args: asked.append(args[2:4]) or batches(*args))
    rows_of(log_path, condition=topics_condition([parse_pattern("a.*")]))
    with adbc.opened(log_path) as connection:
        for sql, params in asked:
            steps = adbc.run(connection, log_path, f"EXPLAIN QUERY PLAN {sql}", params)["detail"].to_pylist()
            assert "SEARCH messages USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in steps
            assert not [step for step in steps if "B-TREE" in step]


@pytest.mark.parametrize("name", ["with space.db", "what?.db", "number#1.db", "50%20.db", "ünï.db", "a&mode=rw.db"])
def test_the_name_of_the_file_is_taken_literally(
    tmp_path: Path, put: Put, make_log: Callable[[Path], str], name: str
) -> None:
    path = make_log(tmp_path / name)
    put(path, [{"topic": "a", "data": "1"}])
    assert len(rows_of(path)) == 1
    assert {each.name for each in tmp_path.iterdir()} <= {name, f"{name}-wal", f"{name}-shm"}


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotALog, match="no such file"):
        rows_of(str(tmp_path / "misspelt.db"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_log_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello, this is no database\n" * 200)
    with pytest.raises(NotALog):
        rows_of(str(tmp_path / "text.db"))


def test_every_connection_waits_for_locks_and_cannot_write(log_path: str) -> None:
    with adbc.opened(log_path) as connection:
        assert adbc.run(connection, log_path, "PRAGMA busy_timeout").column(0).to_pylist() == [adbc.BUSY_TIMEOUT_MS]
        with pytest.raises(StoreError, match="readonly"):
            adbc.run(connection, log_path, "DELETE FROM messages")


def test_a_log_that_this_process_has_open_is_not_opened_a_second_way(log_path: str) -> None:
    store = SqliteStore(log_path)
    try:
        with pytest.raises(StoreError, match="another copy of SQLite"):
            rows_of(log_path)
    finally:
        store.close()
    assert rows_of(log_path) == []


WRITER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])  # no busy timeout: it never waits
for line in sys.stdin:
    with connection:
        connection.executemany("INSERT INTO messages (topic, data) VALUES (?, ?)", [("new", "1")] * 2000)
    print(*connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE), flush=True)
"""


def test_a_slow_reader_holds_up_neither_writers_nor_the_checkpoint(
    log_path: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_SEQS", 1_000)
    put(log_path, [{"topic": "a", "data": "1"} for _ in range(5_000)])
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, log_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    seqs: list[int] = []
    try:
        for batch in read_range(log_path, 0, 5_000, batch_rows=300):
            seqs += batch["seq"].to_pylist()
            writer.stdin.write("write\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "0 0\n", "a checkpoint that moved everything leaves nothing"
    finally:
        writer.stdin.close()
        writer.wait(30)
    assert seqs == list(range(1, 5_001)), "and what it reads is what was asked for, whatever is written meanwhile"


# --- in PostgreSQL --------------------------------------------------------------------------------------------------

NO_NUL = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NARROW = st.integers(-(2**31), 2**31 - 1)
IN_POSTGRES = {"data": JSON.map(json.dumps) | JSON.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1))}
POSTGRES_ROWS = st.fixed_dictionaries({"topic": TOPIC, "published_at": MS, "checked": st.just(1), **IN_POSTGRES}) | (
    st.fixed_dictionaries(
        {"topic": TOPIC, "published_at": MS, **IN_POSTGRES},
        optional={
            **{name: NO_NUL for name in RARE if name not in ("version", "priority", "deliver_at", "expires_at")},
            "version": NARROW,
            "priority": NARROW,
            "deliver_at": MS,
            "expires_at": MS,
            "headers": RARE["headers"],
        },
    )
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(POSTGRES_ROWS, max_size=25), st.integers(1, 9), st.integers(0, 20))
def test_rows_in_postgres_are_those_of_the_log_whatever_they_hold(
    put: Put, postgres_log: str, rows: list[dict[str, Any]], chunk: int, middle: int
) -> None:
    with psycopg.connect(postgres_log) as connection:
        connection.execute("DELETE FROM headwater.messages")
    # As if Headwater had checked them, for PostgreSQL checks the others itself.
    put(postgres_log, [{"seq": seq, "checked": 2, **row} for seq, row in enumerate(rows, 1)])
    says = [expected(message) for message in as_the_log_says(postgres_log)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_SEQS", chunk)
        found = rows_of(postgres_log, 0, middle) + rows_of(postgres_log, middle)
    assert [comparable(row, said) for row, said in zip(found, says, strict=True)] == says
    assert [row["data"] for row in found] == [row["data"] for row in rows], "the text as it was published"


def test_in_postgres_a_statement_ends_where_a_chunk_is_full(postgres_log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 3 * 1024 * 1024)
    monkeypatch.setattr(postgres_rows, "BATCH_BYTES", 1024 * 1024)
    payloads = ["x"] * 100 + [chr(97 + n) * 1_000_000 for n in range(10)] + ["y"] * 100
    with headwater.open(postgres_log, housekeeping=None, durability="relaxed") as log:
        for payload in payloads:
            log.publish("a", payload)
    batches = list(read_range(postgres_log, 0, 1_000))
    assert [data for batch in batches for data in batch["data"].to_pylist()] == [json.dumps(each) for each in payloads]
    assert max(batch.nbytes for batch in batches) < 6_000_000
    assert rows_of(postgres_log, columns=["seq", "size"])[-1] == {"seq": 210, "size": 3}


def test_in_postgres_patterns_choose_and_what_is_not_there_is_told(postgres_log: str, put: Put) -> None:
    topics = ["a", "a.b", "a.b.c", "c.x.d", "ab.c", "a.'; --"]
    put(postgres_log, [{"topic": topic, "data": "1", "checked": 2} for topic in topics])
    for texts in (["a.*"], ["a.b", "c.*.d"], ["a.>"], ["nothing.>"]):
        parsed = [parse_pattern(text) for text in texts]
        found = rows_of(postgres_log, condition=topics_condition(parsed), columns=["topic"])
        assert [row["topic"] for row in found] == [
            topic for topic in topics if any(pattern.matches(topic) for pattern in parsed)
        ]
    for url in (f"{postgres_log}?schema=other", postgres_log.replace("/log_", "/none_")):
        named = url.replace("postgres@", "postgres:secret@")
        assert "secret" not in log_name(named)
        for look in (rows_of, as_the_log_says):
            with pytest.raises(StoreError) as refusal:
                look(named)
            assert "secret" not in f"{refusal.value}{refusal.value.__cause__}"
