"""The commit protocol of a table and of a lake, without Spark: on a disk and on an object store."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from s3_server import CREDENTIALS, S3Server

from headwater.errors import (
    ConflictError,
    CorruptError,
    DiskFullError,
    InvalidOptionError,
    LockedError,
    ReadOnlyError,
    StoreError,
)
from headwater.pipeline import delta, lake
from headwater.pipeline.columns import GOLD_SCHEMAS, LAKE_SCHEMA, MESSAGE_SCHEMA
from headwater.pipeline.delta import LOG, Table, rename_torn_entries
from headwater.pipeline.lake import AUDITS, BRONZE, SILVER, Lake
from headwater.pipeline.storage import DataFile, Storage, TableWriter

SCHEMA = pa.schema([("seq", pa.int64()), ("text", pa.string())])
BY_DAY = pa.schema([("day", pa.date32()), ("n", pa.int64())])
IDENTITY = (12345, 1_700_000_000_000)
DAY_MS = 86_400_000
NOBODY = 65534


def rows(first: int, last: int, text: str = "x") -> pa.Table:
    seqs = range(first, last + 1)
    return pa.table({"seq": seqs, "text": [text] * len(seqs)}, schema=SCHEMA)


def messages(first: int, last: int, *, days: int = 1) -> pa.Table:
    """Messages whose days take turns."""
    seqs = range(first, last + 1)
    at = [dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=seq % days) for seq in seqs]
    made = {"seq": seqs, "topic": ["orders.x"] * len(seqs), "published_at": at, "data": [f"{seq}" for seq in seqs]}
    return pa.table(
        [pa.array(made.get(field.name, [None] * len(seqs)), field.type) for field in MESSAGE_SCHEMA],
        schema=MESSAGE_SCHEMA,
    )


def written(where: Storage, name: str, content: pa.Table) -> list[DataFile]:
    writer = TableWriter(where, name, by_day="published_at" in content.column_names)
    writer.write(content)
    return writer.finish()


def seqs(table: Table) -> list[int]:
    return sorted(table.read(columns=["seq"])["seq"].to_pylist())


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(tmp_path / "lake" if request.param == "disk" else request.getfixturevalue("s3_lake"))


@pytest.fixture
def disk(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "lake")


# --- commits ----------------------------------------------------------------------------------------------------------


def test_a_commit_is_read_back(place: Storage) -> None:
    first = Table(place, "t")
    assert (first.exists, first.version, first.transaction(), first.rows) == (False, -1, 0, 0)
    one = first.append(rows(1, 10), transaction=10)
    two = one.commit(written(place, "t", rows(11, 15)), transaction=15, counters={"rows": 15}, metadata={"why": "test"})
    again = Table(place, "t")
    assert (again.version, again.transaction(), again.transaction("rows")) == (two.version, 15, 15)
    assert (again.metadata("why"), again.rows, seqs(again)) == ("test", 15, list(range(1, 16)))
    assert [(file.seq_from, file.seq_to) for file in again.files] == [(1, 10), (11, 15)]
    assert [place.digest(f"t/{file.path}") for file in again.files] == [file.sha256 for file in again.files]
    assert Table(place, "t", at=one.version).rows == 10


def test_every_engine_can_read_it(place: Storage) -> None:
    made = Table(place, BRONZE).ensure(LAKE_SCHEMA)
    made = made.commit(written(place, BRONZE, messages(1, 9, days=3)), transaction=9)
    protocol = made.delta.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    assert not protocol.reader_features
    plain = {"string", "long", "timestamp", "date"}
    kinds = {field.name: field.type for field in made.delta.schema().fields}
    assert {str(kind.type) for name, kind in kinds.items() if name != "headers"} <= plain  # type: ignore[union-attr]
    assert made.delta.metadata().partition_columns == ["day"]
    assert sorted({file.path.partition("/")[0] for file in made.files}) == [f"day=2026-01-0{day}" for day in (1, 2, 3)]
    through_delta = pa.table(made.delta.to_pyarrow_dataset().to_table()) if place.is_local else made.read()
    assert sorted(through_delta["seq"].to_pylist()) == list(range(1, 10))


@pytest.mark.parametrize("app", ["the same", "another"])
def test_a_stale_commit_is_refused(place: Storage, app: str) -> None:
    """delta-rs rebases an append of another app onto what came in between, and says nothing."""
    Table(place, "t").append(rows(1, 10), transaction=10)
    stale = Table(place, "t")
    new = written(place, "t", rows(11, 20))
    if app == "the same":
        Table(place, "t").append(rows(11, 20), transaction=20)
    else:
        other = CommitProperties(app_transactions=[Transaction("another", 1)])
        Table(place, "t").delta.create_write_transaction([], "append", SCHEMA, commit_properties=other)
    before = Table(place, "t").version
    with pytest.raises(ConflictError, match="meanwhile"):
        stale.commit(new, transaction=20)
    assert Table(place, "t").version == before


def test_a_table_that_another_run_made_meanwhile_refuses_the_first_commit(place: Storage) -> None:
    stale = Table(place, "t")
    Table(place, "t").append(rows(1, 10), transaction=10)
    with pytest.raises(ConflictError):
        stale.append(rows(1, 10), transaction=10)
    assert seqs(Table(place, "t")) == list(range(1, 11))


def test_a_lower_transaction_is_refused(place: Storage) -> None:
    table = Table(place, "t").append(rows(1, 10), transaction=10)
    with pytest.raises(ConflictError):
        table.commit(written(place, "t", rows(1, 5)), transaction=5)
    assert table.append(rows(11, 11), transaction=3).transaction() == 10  # a clock that was put back


def test_a_lost_answer_is_recognised(place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(place, "t").append(rows(1, 10), transaction=10)
    real = DeltaTable.create_write_transaction

    def answer_lost(self: DeltaTable, *arguments: object, **options: object) -> None:
        real(self, *arguments, **options)  # type: ignore[arg-type]
        raise OSError("timed out")

    def never_sent(self: DeltaTable, *arguments: object, **options: object) -> None:
        raise OSError("timed out")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", answer_lost)
    table = table.append(rows(11, 20), transaction=20)
    assert (table.transaction(), seqs(table)) == (20, list(range(1, 21)))
    monkeypatch.setattr(DeltaTable, "create_write_transaction", never_sent)
    with pytest.raises(StoreError, match="failed") as failed:
        table.append(rows(21, 30), transaction=30)
    assert not isinstance(failed.value, ConflictError)  # no other run has anything to do with it
    assert Table(place, "t").transaction() == 20


def test_files_that_are_not_as_they_were_written_are_refused(place: Storage) -> None:
    table = Table(place, "t").append(rows(1, 10), transaction=10)
    (file,) = written(place, "t", rows(11, 20))
    for wrong in (
        [file, file],
        [msgspec.structs.replace(file, size=file.size + 1)],
        [msgspec.structs.replace(file, path="gone.parquet")],
        table.files,
    ):
        with pytest.raises(StoreError, match="not as it was written"):
            table.commit(wrong, transaction=20)
    with pytest.raises(StoreError, match="is not in t"):
        table.commit([], remove=[file], transaction=20)
    assert Table(place, "t").version == table.version


def test_schemas_grow_and_never_change(place: Storage) -> None:
    table = Table(place, "t").append(rows(1, 2), transaction=2)
    wider = rows(3, 3).append_column("more", pa.array([7], pa.int64()))
    table = table.append(wider, transaction=3)
    assert table.schema.names == ["seq", "text", "more"]
    assert table.append(rows(4, 4), transaction=4).read(columns=["more"])["more"].to_pylist() == [None, None, 7, None]
    changed = pa.table({"seq": [5], "text": [5]})
    with pytest.raises(StoreError, match="the column text"):
        Table(place, "t").append(changed, transaction=5)


def test_days_are_replaced_in_one_step(place: Storage) -> None:
    def of(day: int, n: int) -> pa.Table:
        return pa.table({"day": [dt.date(2026, 1, day)], "n": [n]}, schema=BY_DAY)

    table = Table(place, "gold/t")
    assert table.replace(pa.concat_tables([of(1, 1), of(2, 2)]), transaction=1)
    assert Table(place, "gold/t").replace(of(2, 20), transaction=2, days=["2026-01-02"])
    found = Table(place, "gold/t")
    assert sorted(found.read(BY_DAY)["n"].to_pylist()) == [1, 20]
    assert not found.replace(of(2, 20), transaction=3, days=["2026-01-02"])
    assert Table(place, "gold/t").version == found.version
    with pytest.raises(ConflictError):
        table.replace(of(1, 5), transaction=4)  # planned when there was no table


def test_a_table_is_reset_in_one_step(place: Storage) -> None:
    table = Table(place, "t").append(rows(1, 10), transaction=10)
    before = table.version
    table.reset(pa.schema([("other", pa.string())]), counters={"rebuild": 1})
    table = Table(place, "t")
    assert (table.version, table.rows, table.transaction(), table.transaction("rebuild")) == (before + 1, 0, 0, 1)
    assert table.schema.names == ["other"]


# --- what a power loss leaves, and maintenance -----------------------------------------------------------------------


@pytest.mark.parametrize("left", [b"", b'{"commitInfo":{"timestamp":17', b'{"add":{}}\n{"txn":'])
def test_a_torn_last_entry_is_moved_away_under_the_lock(disk: Storage, left: bytes) -> None:
    Table(disk, BRONZE).ensure(LAKE_SCHEMA).commit(written(disk, BRONZE, messages(1, 9)), transaction=9)
    table = Table(disk, BRONZE).commit(written(disk, BRONZE, messages(10, 19)), transaction=19)
    entry = Path(disk.root, BRONZE, LOG, f"{table.version:020d}.json")
    entry.write_bytes(left)
    made = Lake.open(disk.root)
    with made.lock():
        assert made.table(BRONZE).transaction() == 9
        made.table(BRONZE).commit(written(disk, BRONZE, messages(10, 19)), transaction=19)
    assert seqs(made.table(BRONZE)) == list(range(1, 20))
    with made.lock():  # and a whole one stays
        assert made.table(BRONZE).transaction() == 19


def test_all_torn_entries_at_the_end_are_moved_away(disk: Storage) -> None:
    """Vacuum writes two that a power loss may cut off."""
    Table(disk, "t").append(rows(1, 3), transaction=3)
    for version, content in ((2, b'{"commitInfo":'), (3, b"")):
        Path(disk.root, "t", LOG, f"{version:020d}.json").write_bytes(content)
    rename_torn_entries(disk, "t")
    assert Table(disk, "t").append(rows(4, 6), transaction=6).version == 2


def test_a_torn_hint_of_a_checkpoint_is_replaced(disk: Storage) -> None:
    Table(disk, "t").append(rows(1, 3), transaction=3)
    Path(disk.root, "t", LOG, "_last_checkpoint").write_bytes(b"")
    assert Table(disk, "t").checkpoint_if_due()
    assert not Table(disk, "t").checkpoint_if_due()
    assert Table(disk, "t").transaction() == 3


def test_vacuum_leaves_nothing_to_the_page_cache(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(disk, "t").append(rows(1, 3), transaction=3)
    Path(disk.root, "t", "left.parquet").write_bytes(b"left")
    synced: list[str] = []
    monkeypatch.setattr(Storage, "sync", lambda self, paths: synced.extend(paths))
    assert table.vacuum(0) == ["left.parquet"]
    assert {f"t/{LOG}/{version:020d}.json" for version in range(2, Table(disk, "t").version + 1)} == set(synced)


def test_a_torn_first_entry_is_no_table(disk: Storage) -> None:
    Table(disk, "t").ensure(SCHEMA)
    Path(disk.root, "t", LOG, f"{0:020d}.json").write_bytes(b'{"protocol":')
    with pytest.raises(CorruptError, match="cannot be read"):
        Table(disk, "t")
    rename_torn_entries(disk, "t")
    assert Table(disk, "t").append(rows(1, 3), transaction=3).transaction() == 3


def test_a_missing_entry_is_named_in_one_sentence(disk: Storage) -> None:
    for number in (1, 2, 3):
        Table(disk, "t").append(rows(number, number), transaction=number)
    Path(disk.root, "t", LOG, f"{2:020d}.json").unlink()
    with pytest.raises(CorruptError, match="contiguous") as refused:
        Table(disk, "t")
    assert "{" not in refused.value.why  # delta-rs shows its structs


def test_checkpoints_and_cleanup_keep_the_transactions(place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHECKPOINT_COMMITS", 3)
    expired = {**delta._PROPERTIES, "delta.logRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(delta, "_PROPERTIES", expired)
    table = Table(place, "t")
    made = []
    for number in range(1, 8):
        table = table.commit(
            written(place, "t", rows(number, number)), transaction=number, counters={"rows": number}, schema=SCHEMA
        )
        made.append(table.checkpoint_if_due())
    assert made == [False, False, True, False, False, True, False]
    assert f"{0:020d}.json" not in place.names(f"t/{LOG}")
    again = Table(place, "t")
    assert (again.transaction(), again.transaction("rows"), seqs(again)) == (7, 7, list(range(1, 8)))


def test_no_commit_writes_a_checkpoint_by_itself(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of delta-rs would write one that is not synced, and remove the entries that it stands for."""
    monkeypatch.setattr(delta, "_PROPERTIES", {**delta._PROPERTIES, "delta.checkpointInterval": "1"})

    def checkpoints() -> list[str]:
        return [name for name in disk.names(f"{BRONZE}/{LOG}") if "checkpoint" in name]

    made = Lake(disk)
    bronze = made.bind(IDENTITY, "events.db")
    bronze = bronze.commit(written(disk, BRONZE, messages(1, 9)), transaction=9)
    bronze = made.bind(IDENTITY, "moved.db")
    bronze = bronze.ensure(LAKE_SCHEMA.append(pa.field("more", pa.string())))
    bronze.vacuum(0)
    made.table(BRONZE).reset()
    assert checkpoints() == []
    other = CommitProperties(app_transactions=[Transaction("another", 1)])
    made.table(BRONZE).delta.create_write_transaction([], "append", LAKE_SCHEMA, ["day"], commit_properties=other)
    assert checkpoints(), "without these settings it does"


def test_merging_bronze_keeps_rows_and_transactions_and_refuses_a_damaged_file(disk: Storage) -> None:
    table = Table(disk, BRONZE).ensure(LAKE_SCHEMA)
    for number in range(4):
        new = written(disk, BRONZE, messages(number * 10 + 1, number * 10 + 10, days=2))
        table = table.commit(new, transaction=number * 10 + 10, counters={"rows": number * 10 + 10})
    before = table.read().sort_by("seq")
    made = Lake.open(disk.root)
    assert made.optimize(BRONZE, everything=True) == (8, 2)
    merged = made.table(BRONZE)
    assert (merged.transaction(), merged.transaction("rows"), len(merged.files)) == (40, 40, 2)
    assert merged.read().sort_by("seq").equals(before)
    assert made.table(BRONZE, at=table.version).read().sort_by("seq").equals(before)  # time travel

    merged.commit(written(disk, BRONZE, messages(41, 50)), transaction=50, counters={"rows": 50})
    (of_that_day,) = [file.path for file in merged.files if file.day == "2026-01-01"]
    damaged = Path(disk.root, BRONZE, of_that_day)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    version = made.table(BRONZE).version
    with pytest.raises(CorruptError, match="not as it was written"):
        made.optimize(BRONZE, everything=True)
    assert made.table(BRONZE).version == version


def test_vacuum_spares_what_is_young_and_removes_what_killed_runs_left(disk: Storage) -> None:
    Table(disk, BRONZE).ensure(LAKE_SCHEMA).commit(written(disk, BRONZE, messages(1, 9)), transaction=9)
    orphans = [Path(disk.root, BRONZE, file.path) for file in written(disk, BRONZE, messages(10, 19))]
    half = orphans[0].with_name("part-abc.parquet.writing")
    half.write_bytes(b"half")
    made = Lake.open(disk.root)
    assert made.vacuum() == (0, 0)
    long_ago = 1_600_000_000
    left = (*orphans, half)
    for path in left:
        os.utime(path, (long_ago, long_ago))
    size = sum(path.stat().st_size for path in left)
    assert made.vacuum() == (len(left), size)
    assert not any(path.exists() for path in left)
    assert seqs(made.table(BRONZE)) == list(range(1, 10))


# --- durability -------------------------------------------------------------------------------------------------------


def test_everything_is_synced_before_a_commit_returns(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's position moves after it: what it stands for must survive a power loss."""
    events: list[str] = []
    real_sync, real_commit = os.fsync, DeltaTable.create_write_transaction

    def fsync(descriptor: int) -> None:
        real_sync(descriptor)
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def commit(self: DeltaTable, *arguments: object, **options: object) -> None:
        events.append("commit")
        real_commit(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
    table = Table(disk, BRONZE).ensure(LAKE_SCHEMA)
    root = Path(disk.root)
    folders = {str(root), str(root / "bronze"), str(root / BRONZE), str(root / BRONZE / LOG)}
    assert {*folders, str(root / BRONZE / LOG / f"{0:020d}.json")} <= set(events)
    events.clear()
    (file,) = written(disk, BRONZE, messages(1, 9))
    table.commit([file], transaction=9)
    before, after = events[: events.index("commit")], events[events.index("commit") :]
    path = root / BRONZE / file.path
    assert any(name.endswith(".parquet.writing") for name in before)  # synced before it has its name
    assert {str(path), str(path.parent), str(root / BRONZE)} <= set(before)
    assert {str(root / BRONZE / LOG / f"{1:020d}.json"), str(root / BRONZE / LOG)} <= set(after)


def test_a_checkpoint_is_synced_before_entries_go(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHECKPOINT_COMMITS", 1)
    events: list[str] = []
    real_sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), real_sync(fd))[1])
    monkeypatch.setattr(DeltaTable, "cleanup_metadata", lambda self: events.append("cleanup"))
    table = Table(disk, "t").append(rows(1, 3), transaction=3)
    events.clear()
    assert table.checkpoint_if_due()
    names = [Path(event).name for event in events[: events.index("cleanup")]]
    assert {f"{1:020d}.checkpoint.parquet", "_last_checkpoint", LOG} <= set(names)


def test_an_abandoned_writer_leaves_nothing(place: Storage) -> None:
    writer = TableWriter(place, "t", by_day=True)
    writer.write(messages(1, 10, days=3))
    writer._finished.append(writer._open.popitem()[1].finish())
    writer.abandon()
    left = [name for day in range(1, 4) for name in place.names(f"t/day=2026-01-0{day}")]
    assert left == []


def test_a_folder_may_be_made_while_it_is_listed(disk: Storage) -> None:
    """As a command sees the lake beside a run that makes its first tables."""
    folders, looked = 300, threading.Semaphore(0)

    def make() -> None:
        for number in range(folders):
            looked.acquire()
            os.makedirs(Path(disk.root, str(number), "day"))

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for number in range(folders):
            looked.release()
            while not disk.entries(str(number)):
                pass
    finally:
        for _ in range(folders):
            looked.release()
        thread.join()


# --- the lake ---------------------------------------------------------------------------------------------------------


def test_a_lake_belongs_to_one_log(place: Storage) -> None:
    made = Lake.open(place.root, create=True)
    bronze = made.bind(IDENTITY, "events.db")
    version = bronze.version
    assert made.bind(IDENTITY, "events.db").version == version
    assert made.log_name == "events.db"
    assert made.bind(IDENTITY, "moved.db").properties[lake.LOG_NAME_PROPERTY] == "moved.db"
    with pytest.raises(InvalidOptionError, match="another log"):
        made.bind((1, 2), "events.db")
    bronze = made.table(BRONZE).commit(written(place, BRONZE, messages(1, 9)), transaction=9, counters={"rows": 9})
    assert bronze.properties[lake.LOG_PROPERTY] == f"{IDENTITY[0]}-{IDENTITY[1]}"
    assert Lake.open(place.root).subscription == made.subscription


def test_a_lake_that_is_not_there_is_not_made_by_looking(place: Storage) -> None:
    with pytest.raises(InvalidOptionError, match="no lake here"):
        Lake.open(place.root)
    assert not place.names(f"{BRONZE}/{LOG}")


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.db").touch()
    with pytest.raises(InvalidOptionError, match="before Delta tables"):
        Lake.open(tmp_path / "old", create=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(InvalidOptionError, match=r"other things, like cat\.jpg"):
        Lake.open(tmp_path / "photos", create=True)
    with pytest.raises(InvalidOptionError, match="is a file"):
        Lake.open(tmp_path / "photos" / "cat.jpg", create=True)
    with pytest.raises(InvalidOptionError, match="wildcard"):
        Lake.open(tmp_path / "a[b]", create=True)
    (tmp_path / "new" / "types").mkdir(parents=True)
    Lake.open(tmp_path / "new", create=True)


def test_a_second_run_on_this_machine_waits_its_turn(disk: Storage) -> None:
    first, second = Lake.open(disk.root, create=True), Lake.open(disk.root, create=True)
    with first.lock(), pytest.raises(LockedError, match="another run"), second.lock():
        raise AssertionError
    with Lake.open(disk.root, create=True).lock():
        pass


def test_a_store_that_ignores_conditional_puts_is_refused(lake_on: Callable[[S3Server], str]) -> None:
    with S3Server(honours_conditions=False) as forgetful:
        made = Lake.open(lake_on(forgetful), create=True)
        for _ in range(2):
            with pytest.raises(InvalidOptionError, match="ignores conditional puts"):
                made.bind(IDENTITY, "events.db")


def test_credentials_stay_at_home(s3_lake: str) -> None:
    where = Storage(s3_lake)
    Lake(where).bind(IDENTITY, "events.db")  # its clients are made
    packed = pickle.dumps(where)
    assert not any(value.encode() in packed for value in CREDENTIALS.values())
    assert pickle.loads(packed).root == s3_lake
    with pytest.raises(InvalidOptionError) as refused:
        Storage("s3://key:not-a-secret@bucket/lake")
    assert "not-a-secret" not in str(refused.value)


def test_audits_are_kept_up_to_a_hundred(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake, "AUDITS_KEPT", 3)
    made = Lake(disk)
    assert made.last_audit() is None
    for number in range(5):
        made.add_audit({"number": number}, dt.datetime(2026, 1, 1, 0, number, tzinfo=dt.UTC))
    assert made.last_audit() == {"number": 4}
    assert made.table(AUDITS).rows == 3


def test_a_moment_is_one_for_all_tables(place: Storage) -> None:
    made = Lake(place)
    bronze = made.bind(IDENTITY, "events.db")
    ends = []
    for number in range(1, 4):
        bronze = bronze.commit(written(place, BRONZE, messages(number, number)), transaction=number)
        made.table(SILVER).append(rows(number, number), transaction=number)
        ends.append(bronze.version)
    for number, version in enumerate(ends, 1):
        at = made.moment(version)
        assert (made.table(BRONZE, at).transaction(), made.table(SILVER, at).rows) == (number, number)
    assert not made.table(SILVER, made.moment(0)).exists
    with pytest.raises(InvalidOptionError, match="no version 99"):
        made.moment(99)
    with pytest.raises(InvalidOptionError, match="has no state of"):
        made.moment(dt.datetime(2020, 1, 1, tzinfo=dt.UTC))


def test_files_from_before_a_column_was_added_are_merged_too(disk: Storage) -> None:
    Table(disk, "typed/x").append(pa.table({"seq": [1]}), transaction=1)
    Table(disk, "typed/x").append(pa.table({"seq": [2], "more": ["a"]}), transaction=2)
    assert Lake(disk).optimize("typed/x", everything=True) == (2, 1)
    merged = Table(disk, "typed/x")
    assert merged.read().sort_by("seq").to_pylist() == [{"seq": 1, "more": None}, {"seq": 2, "more": "a"}]


def test_small_files_of_a_report_become_one(disk: Storage) -> None:
    """Its rows have a day and no time of publishing."""
    rows = pa.Table.from_pylist(
        [{"day": dt.date(2026, 5, day), "from": "a", "to": "b", "messages": day, "bytes": 1} for day in (1, 2)],
        GOLD_SCHEMAS["traffic"],
    )
    for transaction in (1, 2, 3):
        Table(disk, "gold/traffic").append(rows, transaction=transaction)
    before = Table(disk, "gold/traffic")
    assert Lake(disk).optimize("gold/traffic", everything=True) == (6, 2)
    after = Table(disk, "gold/traffic")
    assert (len(after.files), after.transaction()) == (2, 3)
    order = [("day", "ascending"), ("messages", "ascending")]
    assert after.read().sort_by(order).equals(before.read().sort_by(order))


# --- a disk that takes no more, and a lake that may not be written ----------------------------------------------------


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """The system cuts a write off where the file reaches this size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_called_one(disk: Storage) -> None:
    table = Table(disk, "t").append(rows(1, 10), transaction=10)
    with no_file_over(50), pytest.raises(DiskFullError, match="cannot be written"):
        table.append(rows(11, 20), transaction=20)
    assert not list(Path(disk.root).rglob("*.writing"))
    new = written(disk, "t", rows(11, 20))
    with no_file_over(50), pytest.raises(DiskFullError):  # of the entry: no other run has anything to do with it
        table.commit(new, transaction=20)
    assert Table(disk, "t").commit(new, transaction=20).transaction() == 20


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere, so this process becomes nobody for a while."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_lake_that_may_not_be_written_is_called_one() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are for root's eyes only
        Path(name).chmod(0o755)
        made = Lake(Storage(name))
        made.bind(IDENTITY, "events.db")
        new = written(made.storage, BRONZE, messages(1, 9))
        with as_nobody():
            assert made.table(BRONZE).transaction() == 0
            with pytest.raises(ReadOnlyError, match="cannot be written"):
                made.table(BRONZE).commit(new, transaction=9)
            with pytest.raises(ReadOnlyError):
                made.add_audit({}, dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
            with pytest.raises(ReadOnlyError), made.lock():
                raise AssertionError
        with made.lock():
            pass
        with as_nobody(), pytest.raises(ReadOnlyError), made.lock():
            made.bind(IDENTITY, "moved.db")
