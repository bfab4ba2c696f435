"""A log as Arrow, ranges of messages and the other tables, is what the log itself says, in a file and in PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_logs import new_log, put

import headwater
from headwater import ManualClock
from headwater.errors import InvalidOptionError, NotALogError, StoreError
from headwater.formats import TIME_MS_MAX, datetime_of
from headwater.message import Message, derived_id
from headwater.pipeline import logs, logs_postgres
from headwater.pipeline.columns import COLUMNS, MESSAGE_SCHEMA, TABLE_SCHEMAS
from headwater.pipeline.logs import (
    Range,
    backend_of,
    derived_ids,
    header_maps,
    log_path,
    open_reader,
    read_range,
    read_table,
    seq_of_nth,
    split,
    timestamps,
    topics_condition,
    utf8,
)
from headwater.ports.records import Selection
from headwater.stores.sqlite import SqliteStore
from headwater.topics import parse_pattern

# --- naming a log, cutting ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/logs/a b.db", "/logs/a b.db"),
        ("sqlite:/logs/a.db", "/logs/a.db"),
        ("sqlite:////logs/a.db", "/logs/a.db"),
        ("sqlite:///a.db", os.path.abspath("a.db")),
        ("file:///logs/a.db", "/logs/a.db"),
        ("file:/logs/a.db", "/logs/a.db"),
        ("a?b#c%20.db", os.path.abspath("a?b#c%20.db")),
        ("postgres://me@host/db?schema=log", "postgres://me@host/db?schema=log"),
    ],
)
def test_a_log_is_named_as_open_names_it(url: str, path: str) -> None:
    assert log_path(url) == path


@pytest.mark.parametrize("url", ["mysql://me:secret@host/db", "ws://:secret@host:1", "memory:", ":memory:", "", " "])
def test_a_log_that_spark_cannot_reach_is_refused_with_what_works(url: str) -> None:
    with pytest.raises(InvalidOptionError) as refusal:
        log_path(url)
    assert refusal.value.where.startswith("path")
    assert refusal.value.next
    assert "secret" not in str(refusal.value)


SEQ = st.integers(0, 2**62)


@given(SEQ, st.integers(0, 10**9), st.integers(1, 300), st.integers(1, 10_000))
def test_partitions_are_neighbours_that_cover_the_whole(after: int, seqs: int, wanted: int, least: int) -> None:
    parts = split(Range(after, after + seqs), wanted, least)
    assert (parts == []) == (seqs == 0)
    edges = [after] + [part.upto for part in parts]
    assert [part.after for part in parts] == edges[:-1]
    assert edges[-1] == after + seqs
    assert len(parts) <= wanted
    if len(parts) > 1:
        assert min(part.upto - part.after for part in parts) >= least
        assert max(part.upto - part.after for part in parts) - min(part.upto - part.after for part in parts) <= 1
    if seqs >= wanted * least:
        assert len(parts) == wanted


@given(SEQ, SEQ, SEQ, SEQ, SEQ)
def test_a_seq_is_in_the_overlap_if_it_is_in_both(a: int, b: int, c: int, d: int, seq: int) -> None:
    found = Range(a, b).overlap(Range(c, d))
    assert found.after <= found.upto
    assert (found.after < seq <= found.upto) == (a < seq <= b and c < seq <= d)


# --- columns, a batch at a time ---------------------------------------------------------------------------------------

WHOLE = st.integers(0, 2**63 - 1)
FITTING = st.integers(0, 2**48 - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(FITTING, FITTING)) | st.lists(st.tuples(WHOLE, WHOLE)), st.integers(0, 2**26 - 1))
def test_ids_follow_from_the_rows_as_they_do_one_by_one(rows: list[tuple[int, int]], salt: int) -> None:
    at, seqs = pa.array([at for at, _ in rows], pa.int64()), pa.array([seq for _, seq in rows], pa.int64())
    assert derived_ids(at, seqs, salt).to_pylist() == [derived_id(at, salt, seq) for at, seq in rows]


def test_ids_of_a_piece_of_a_batch_are_its_own() -> None:
    seqs = pa.array(range(10), pa.int64())
    assert derived_ids(seqs.slice(3, 2), seqs.slice(5, 2), 7).to_pylist() == [derived_id(3, 7, 5), derived_id(4, 7, 6)]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(0, TIME_MS_MAX)))
def test_times_are_those_of_the_log_whatever_was_put_in(ms: list[int | None]) -> None:
    found = timestamps(pa.array(ms, pa.int64()))
    assert found.type == pa.timestamp("us", tz="UTC")
    assert found.to_pylist() == [None if at is None else datetime_of(at) for at in ms]


@settings(max_examples=30)
@given(st.lists(st.none() | st.dictionaries(st.text(), JSON, max_size=4), max_size=8))
def test_headers_keep_text_and_say_the_rest_as_json(rows: list[dict[str, Any] | None]) -> None:
    found = header_maps(pa.array([None if row is None else json.dumps(row) for row in rows], pa.string())).to_pylist()
    for row, pairs in zip(rows, found, strict=True):
        if row is None:
            assert pairs is None
        else:
            got = dict(pairs)
            assert got.keys() == row.keys()
            for name, value in row.items():
                assert got[name] == value if isinstance(value, str) else json.loads(got[name]) == value


def test_headers_that_are_no_object_are_still_seen() -> None:
    assert header_maps(pa.array(["[1]", None, "{", '{"a":"b"}'])).to_pylist() == [
        [("", "[1]")],
        None,
        [("", "{")],
        [("a", "b")],
    ]


@given(st.lists(st.none() | st.binary() | st.text().map(str.encode)))
def test_text_that_is_not_utf8_is_replaced_and_nothing_else_is_touched(rows: list[bytes | None]) -> None:
    raw = pa.array(rows, pa.binary())
    texts = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    assert utf8(texts).to_pylist() == [None if row is None else row.decode(errors="replace") for row in rows]


# --- messages ---------------------------------------------------------------------------------------------------------

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
    with open_reader(path) as reader:
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


@settings(max_examples=30, deadline=None)
@given(st.lists(PLAIN | FULL, max_size=25), st.integers(1, 7), st.integers(1, 9), st.integers(0, 20))
def test_rows_are_those_of_the_log_whatever_they_hold_and_however_they_are_cut(
    rows: list[dict[str, Any]], batch: int, chunk: int, middle: int
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = new_log(Path(directory) / "log.db")
        put(path, rows)
        says = [expected(message) for message in as_the_log_says(path)]
        assert len(says) == len(rows)
        patch.setattr(logs, "CHUNK_SEQS", chunk)
        patch.setattr(logs, "STATEMENT_ROWS", max(1, chunk // 2))
        found = rows_of(path, 0, middle, batch_rows=batch) + rows_of(path, middle, batch_rows=batch)
    assert [comparable(row, output) for row, output in zip(found, says, strict=True)] == says


def test_batches_have_the_fixed_schema_also_where_everything_is_null(log_path: str) -> None:
    put(log_path, [{"topic": "a", "data": "1"}])
    (batch,) = read_range(log_path, 0, 10)
    assert batch.schema == MESSAGE_SCHEMA
    (batch,) = read_range(log_path, 0, 10, columns=["topic", "size", "deliver_at", "id"])
    assert batch.schema == pa.schema([MESSAGE_SCHEMA.field(name) for name in ["topic", "size", "deliver_at", "id"]])


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_alone_is_what_it_is_among_all(log_path: str, column: str) -> None:
    full = {"id": "i", "headers": '{"a":1}', "priority": 3, "from": "f", "deliver_at": 5, "version": 1}
    put(log_path, [{"topic": "a.b", "data": '"x"'}, {"topic": "c", "data": "2", **full}])
    alone = [row[column] for row in rows_of(log_path, columns=[column])]
    assert alone == [row[column] for row in rows_of(log_path)]


def test_text_that_is_not_utf8_comes_through_with_marks_and_its_true_size(log_path: str) -> None:
    forced: dict[str, Any] = {"checked": 2, "type": b"t\xff", "headers": b'{"a\xff":1}', "id": b"\xc3"}
    put(log_path, [{"topic": b"a.\xff\xfe", "data": b'"\xf0\x28"', **forced}, {"topic": "b", "data": "2"}])
    first, second = rows_of(log_path)
    assert (first["topic"], first["data"], first["size"]) == ("a.\ufffd\ufffd", '"\ufffd("', 4)
    assert (first["type"], first["id"], first["headers"]) == ("t\ufffd", "\ufffd", [("a\ufffd", "1")])
    assert (second["topic"], second["data"]) == ("b", "2")


def test_times_put_in_by_force_do_not_stop_the_reading(log_path: str) -> None:
    put(log_path, [{"topic": "a", "data": "1", "checked": 2, "published_at": 2**62, "deliver_at": -(2**62)}])
    (row,) = rows_of(log_path)
    assert (row["published_at"], row["deliver_at"]) == (datetime_of(2**62), datetime_of(0))


def test_payloads_of_a_megabyte_are_cut_into_small_chunks(log_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 3 * 1024 * 1024)
    monkeypatch.setattr(logs, "STATEMENT_ROWS", 1)
    monkeypatch.setattr(logs, "STATEMENT_ROWS_BIG", 1)
    payloads = [json.dumps(chr(97 + n) * 1024 * 1024) for n in range(10)]
    put(log_path, [{"topic": "a", "data": payload} for payload in payloads])
    batches = list(read_range(log_path, 0, 100))
    assert [batch.num_rows for batch in batches] == [3, 3, 3, 1]
    assert [data for batch in batches for data in batch["data"].to_pylist()] == payloads


@pytest.mark.parametrize(
    "patterns", [["a.*"], ["a.*", "c"], ["a.>"], ["*"], [">"], [], ["a.b", "c.*.d"], ["nothing.>"]]
)
def test_topics_are_those_the_patterns_match(any_log: str, patterns: list[str]) -> None:
    topics = ["a", "a.b", "a.b.c", "c", "c.x.d", "c.x.e", "ab.c", "a.'; --"] * 3
    put(any_log, [{"topic": topic, "data": "1", "checked": 2} for topic in topics])
    parsed = [parse_pattern(text) for text in patterns]
    found = rows_of(any_log, condition=topics_condition(parsed), columns=["seq"])
    fits = [not parsed or any(pattern.matches(topic) for pattern in parsed) for topic in topics]
    assert [row["seq"] for row in found] == [seq for seq, fit in enumerate(fits, 1) if fit]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The statements of ADBC that select messages, with their parameters."""
    found: list[tuple[str, Any]] = []
    query = logs.ArrowReader.query

    def recorded(self: logs.ArrowReader, sql: str, params: Any = (), **options: str) -> Any:
        if "FROM messages" in sql and "ORDER BY" in sql:
            found.append((sql, params))
        return query(self, sql, params, **options)

    monkeypatch.setattr(logs.ArrowReader, "query", recorded)
    return found


def test_a_range_that_retention_emptied_is_skipped_in_few_steps(
    log_path: str, statements: list[tuple[str, Any]]
) -> None:
    put(log_path, [{"seq": seq, "topic": "a", "data": "1"} for seq in (1, 10**9, 10**9 + 1)])
    assert [row["seq"] for row in rows_of(log_path)] == [1, 10**9, 10**9 + 1]
    assert 0 < len(statements) < 8


def test_the_log_is_walked_along_its_key_and_never_sorted(log_path: str, statements: list[tuple[str, Any]]) -> None:
    put(log_path, [{"topic": "a.b", "data": "1", "type": "t"}])
    rows_of(log_path, condition=topics_condition([parse_pattern("a.*")]))
    assert statements
    with backend_of(log_path).arrow() as reader:
        for sql, params in list(statements):
            steps = reader.table(f"EXPLAIN QUERY PLAN {sql}", params)["detail"].to_pylist()
            assert "SEARCH messages USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in steps
            assert not [step for step in steps if "B-TREE" in step]


@pytest.mark.parametrize("name", ["with space.db", "what?.db", "number#1.db", "50%20.db", "ünï.db", "a&mode=rw.db"])
def test_the_name_of_the_file_is_taken_literally(tmp_path: Path, name: str) -> None:
    path = new_log(tmp_path / name)
    put(path, [{"topic": "a", "data": "1"}])
    assert len(rows_of(path)) == 1
    assert {each.name for each in tmp_path.iterdir()} <= {name, f"{name}-wal", f"{name}-shm"}


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotALogError, match="no such file"):
        rows_of(str(tmp_path / "misspelt.db"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_log_is_reported_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("hello, this is no database\n" * 200)
    with pytest.raises(NotALogError):
        rows_of(str(tmp_path / "text.db"))


def test_every_connection_waits_for_locks_and_cannot_write(log_path: str) -> None:
    with backend_of(log_path).arrow() as reader:
        assert reader.table("PRAGMA busy_timeout").column(0).to_pylist() == [logs.BUSY_TIMEOUT_MS]
        with pytest.raises(StoreError, match="readonly"):
            reader.table("DELETE FROM messages")


def test_a_log_that_this_process_has_open_is_not_opened_a_second_way(log_path: str) -> None:
    store = SqliteStore(log_path)
    try:
        with pytest.raises(StoreError, match="another copy of SQLite"):
            rows_of(log_path)
    finally:
        store.close()
    assert rows_of(log_path) == []


READER = """
import sys
from headwater.pipeline.logs import log_identity, read_range, read_table
assert log_identity(sys.argv[1]) and list(read_range(sys.argv[1], 0, 9)) and list(read_table(sys.argv[1], "topics"))
print(sorted({"pyspark", "polars", "deltalake", "psycopg"} & sys.modules.keys()))
"""


def test_a_worker_and_a_run_without_spark_import_little(log_path: str) -> None:
    put(log_path, [{"topic": "a", "data": "1"}])
    child = subprocess.run([sys.executable, "-c", READER, log_path], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"


WRITER = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])  # no busy timeout: it never waits
for line in sys.stdin:
    with connection:
        connection.executemany("INSERT INTO messages (topic, data) VALUES (?, ?)", [("new", "1")] * 2000)
    print(*connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE), flush=True)
"""


def test_a_slow_reader_holds_up_neither_writers_nor_the_checkpoint(
    log_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CHUNK_SEQS", 1_000)
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
    postgres_log: str, rows: list[dict[str, Any]], chunk: int, middle: int
) -> None:
    with psycopg.connect(postgres_log) as connection:
        connection.execute("DELETE FROM headwater.messages")
    # As if Headwater had checked them, for PostgreSQL checks the others itself.
    put(postgres_log, [{"seq": seq, "checked": 2, **row} for seq, row in enumerate(rows, 1)])
    says = [expected(message) for message in as_the_log_says(postgres_log)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "CHUNK_SEQS", chunk)
        found = rows_of(postgres_log, 0, middle) + rows_of(postgres_log, middle)
    assert [comparable(row, output) for row, output in zip(found, says, strict=True)] == says
    assert [row["data"] for row in found] == [row["data"] for row in rows], "the text as it was published"


def test_in_postgres_a_statement_ends_where_a_chunk_is_full(postgres_log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 3 * 1024 * 1024)
    monkeypatch.setattr(logs_postgres, "BATCH_BYTES", 1024 * 1024)
    payloads = ["x"] * 100 + [chr(97 + n) * 1_000_000 for n in range(10)] + ["y"] * 100
    with headwater.open(postgres_log, maintenance_interval=None, durability="relaxed") as log:
        for payload in payloads:
            log.publish("a", payload)
    batches = list(read_range(postgres_log, 0, 1_000))
    assert [data for batch in batches for data in batch["data"].to_pylist()] == [json.dumps(each) for each in payloads]
    assert max(batch.nbytes for batch in batches) < 6_000_000
    assert rows_of(postgres_log, columns=["seq", "size"])[-1] == {"seq": 210, "size": 3}


def test_in_postgres_a_missing_log_is_reported(postgres_log: str) -> None:
    for url in (f"{postgres_log}?schema=other", postgres_log.replace("/log_", "/none_")):
        named = url.replace("postgres@", "postgres:secret@")
        assert "secret" not in backend_of(named).name
        for look in (rows_of, as_the_log_says):
            with pytest.raises(StoreError) as refusal:
                look(named)
            assert "secret" not in f"{refusal.value}{refusal.value.__cause__}"


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(["a.x", "a.y.z", "b", "a"]), min_size=1, max_size=60),
    st.sampled_from(["a.*", "a.>", ">", "b", "none"]),
    st.integers(1, 30),
    st.integers(0, 20),
)
def test_the_nth_message_that_matches_is_found(
    tmp_path_factory: pytest.TempPathFactory, topics: list[str], pattern: str, n: int, after: int
) -> None:
    path = str(tmp_path_factory.mktemp("nth") / "log.db")
    with headwater.open(path, maintenance_interval=None, durability="relaxed") as log:
        log.publish_many([(topic, 1) for topic in topics])
    parsed = parse_pattern(pattern)
    seqs = [seq for seq, topic in enumerate(topics, 1) if seq > after and parsed.matches(topic)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.pipeline.logs.COUNTED_SEQS", 7)
        found = seq_of_nth(path, Range(after, len(topics)), topics_condition([parsed]), n)
    assert found == (seqs[n - 1] if len(seqs) >= n else None)


# --- the other tables -------------------------------------------------------------------------------------------------

NOW = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
BESIDE = [table for table in TABLE_SCHEMAS if table != "messages"]


@pytest.fixture
def path(any_log: str) -> str:
    """A log in which something has happened in every table."""
    path = any_log
    clock = ManualClock(1_700_000_000_000)
    with headwater.open(path, maintenance_interval=None, durability="relaxed", clock=clock) as log:
        worker = log.subscribe("worker", "orders.>", mode="shared")
        log.subscribe("idle", "orders.>").close()
        log.publish_many([("orders.new", n) for n in range(10)])
        first, second, third, *_ = worker.fetch(4)
        worker.reject(first, "broken")
        worker.nack(second, delay=3600)
        worker.ack(third)
        log.retain("orders.>", max_count=6)
        log.run_maintenance()
    return path


def rows(path: str, table: str) -> list[dict[str, Any]]:
    return [row for batch in read_table(path, table) for row in batch.to_pylist()]


@pytest.mark.parametrize("table", BESIDE)
def test_every_table_has_its_schema(path: str, table: str) -> None:
    batches = list(read_table(path, table))
    assert all(batch.schema == TABLE_SCHEMAS[table] for batch in batches)
    if table != "timings":
        assert sum(batch.num_rows for batch in batches) > 0


def test_dead_letters(path: str) -> None:
    (letter,) = rows(path, "dead_letters")
    assert (letter["subscription"], letter["seq"], letter["topic"]) == ("worker", 1, "orders.new")
    assert letter["error"] == "broken"
    assert (letter["died_at"], letter["redriving"], letter["attempts"]) == (NOW, False, 1)
    assert '"orders.new"' in letter["message"]


def test_subscriptions_with_lag(path: str) -> None:
    found = {row["id"]: row for row in rows(path, "subscriptions")}
    assert set(found) == {"idle", "worker"}
    assert (found["idle"]["lag"], found["idle"]["gaps"], found["idle"]["mode"]) == (7, 3, "exclusive"), (
        "one is in flight and was spared"
    )
    assert found["worker"]["created_at"] == NOW
    assert found["worker"]["observed_at"] > NOW


def test_what_is_in_flight_or_waiting(path: str) -> None:
    found = rows(path, "deliveries")
    assert {row["subscription"] for row in found} == {"worker"}
    assert all(row["due_at"] > datetime(1971, 1, 1, tzinfo=UTC) for row in found)


def test_gaps_retention_and_topics(path: str) -> None:
    assert [(gap["subscription"], gap["told"], gap["at"]) for gap in rows(path, "gaps")][:1] == [("idle", False, NOW)]
    (policy,) = rows(path, "retention")
    assert (policy["pattern"], policy["max_count"], policy["max_age_ms"], policy["keep_unacked"]) == (
        "orders.>",
        6,
        None,
        False,
    )
    (topic,) = rows(path, "topics")
    assert (topic["topic"], topic["count"], topic["last_seq"], topic["last_published_at"]) == ("orders.new", 7, 10, NOW)


def test_a_table_is_read_while_this_process_has_the_log_open(any_log: str) -> None:
    """As a run does, which holds its position while it reads the figures of the log."""
    with headwater.open(any_log, maintenance_interval=None, durability="relaxed") as log:
        log.publish("a", 1)
        worker = log.subscribe("worker", "a", start="first")
        worker.reject(worker.fetch(1)[0], "broken")
        assert [row["seq"] for row in rows(any_log, "dead_letters")] == [1]
        assert [row["count"] for row in rows(any_log, "topics")] == [1]


def test_text_that_is_not_utf8_stops_no_table_and_no_count(log_path: str) -> None:
    topics = {b"bad.\xff": "12", b"bad.x": "1", b"worse.\xff.x": "1"}
    put(log_path, [{"topic": topic, "data": data, "checked": 2} for topic, data in topics.items()])
    with contextlib.closing(apsw.Connection(log_path)) as connection:
        connection.execute(
            "INSERT INTO dead_letters "
            "(subscription, seq, topic, reason, attempts, died_at, redrives, redriving, error, message) "
            "VALUES ('worker', 1, CAST(x'6261642eff' AS TEXT), 'rejected', 1, 5, 0, 0, CAST(x'ff' AS TEXT), '{}')"
        )
    (letter,) = rows(log_path, "dead_letters")
    assert (letter["topic"], letter["error"], letter["seq"]) == ("bad.\ufffd", "\ufffd", 1)
    assert seq_of_nth(log_path, Range(0, 3), topics_condition([parse_pattern("*.x")]), 1) == 2
    assert [(row["topic"], row["count"], row["bytes"]) for row in rows(log_path, "topics")] == [
        ("bad.x", 1, 1),
        ("bad.\ufffd", 1, 2),
        ("worse.\ufffd.x", 1, 1),
    ]


@pytest.mark.parametrize("page", [1, 2, 3, 100])
def test_a_long_table_comes_page_by_page(any_log: str, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    with headwater.open(any_log, maintenance_interval=None, durability="relaxed") as log:
        log.publish_many([("a", n) for n in range(5)])
        for name in ("one", "two"):
            subscription = log.subscribe(name, "a", mode="shared", start="first")
            subscription.fetch(5)
    monkeypatch.setitem(logs._STORED, "deliveries", (("subscription", "seq"), page))
    assert [(row["subscription"], row["seq"]) for row in rows(any_log, "deliveries")] == [
        (name, seq) for name in ("one", "two") for seq in range(1, 6)
    ]
