"""The writers as Spark calls them, without Spark: staged by tasks, promoted once, cleaned up."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InputOutput, InvalidData, InvalidOption
from headwater.message import Draft, Message
from headwater.pipeline.sink.staging import LEFTOVER_MS, Staged
from headwater.pipeline.sink.writers import BatchWriter, StreamWriter
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite.writer import SqliteWriter

Published = Callable[[Path], list[object]]
Ids = Callable[[Path], list[str]]

PLAIN = StructType([StructField("topic", StringType()), StructField("data", StringType())])


def rows(*data: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([["t"] * len(data), [str(each) for each in data]], names=["topic", "data"])


@pytest.fixture
def published(messages_in: Callable[[Path], list[Message]]) -> Callable[[Path], list[object]]:
    return lambda path: [message.data for message in messages_in(path)]


@pytest.fixture
def ids(messages_in: Callable[[Path], list[Message]]) -> Callable[[Path], list[str]]:
    return lambda path: [message.id for message in messages_in(path)]


def staging_files(path: Path) -> list[str]:
    folder = f"{path}-staging"
    return os.listdir(folder) if os.path.isdir(folder) else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


def stream_writer(path: Path, sink: str = "s", **options: str) -> StreamWriter:
    return StreamWriter({"path": str(path), "sinkId": sink, **options}, PLAIN)


def run_batch(path: Path, batch: int, partitions: Sequence[Sequence[object]], sink: str = "s") -> list[Staged]:
    """As Spark does it: one pickled writer for the tasks, another one for the commit."""
    task = pickle.loads(pickle.dumps(stream_writer(path, sink)))
    staged = [task.write(rows(*data)) for data in partitions]
    stream_writer(path, sink).commit(staged, batch)
    return staged


def test_rows_stand_in_the_log_in_the_order_of_partitions_and_rows(path: Path, published: Published) -> None:
    run_batch(path, 0, [[1, 2], [3], [], [4, 5]])
    assert published(path) == [1, 2, 3, 4, 5]
    assert not os.path.exists(f"{path}-staging")


def test_a_partition_of_many_pieces_is_whole(path: Path, published: Published) -> None:
    run_batch(path, 0, [range(2_500), range(2_500, 2_600)])
    assert published(path) == list(range(2_600))


def test_a_batch_that_comes_again_is_published_once(path: Path, published: Published) -> None:
    run_batch(path, 0, [[1, 2]])
    run_batch(path, 1, [[3]])
    run_batch(path, 1, [[3]])
    assert published(path) == [1, 2, 3]
    assert staging_files(path) == []


def test_a_repeat_is_known_by_its_batch_even_when_its_ids_are_long_forgotten(path: Path, published: Published) -> None:
    run_batch(path, 0, [[1, 2]])
    store = SqliteStore(path)
    with store.write() as writer:
        writer.forget_ids(DedupeWindow(span_ms=0, count=0), 2**50, 1_000)
    store.close()
    run_batch(path, 0, [[1, 2]])
    assert published(path) == [1, 2]


def test_a_repeat_is_known_by_its_ids_even_when_the_sinks_are_forgotten(
    path: Path, published: Published, ids: Ids
) -> None:
    """Two locks on one door: the ids follow from sink, batch, partition and row."""
    run_batch(path, 7, [[1, 2], [3]])
    before = ids(path)
    store = SqliteStore(path)
    with store.write() as writer:
        writer._connection.execute("DELETE FROM sinks")
    store.close()
    run_batch(path, 7, [[1, 2], [3]])
    assert published(path) == [1, 2, 3]
    assert ids(path) == before
    run_batch(path, 8, [[1, 2], [3]])  # the same rows of another batch are other messages
    assert published(path) == [1, 2, 3, 1, 2, 3]


def test_a_lower_batch_is_refused_and_nothing_changes(path: Path, published: Published) -> None:
    run_batch(path, 4, [[1]])
    with pytest.raises(InvalidOption, match=r"batch 4 was published already.*another sinkId"):
        run_batch(path, 3, [[2]])
    assert published(path) == [1]
    run_batch(path, 3, [[2]], sink="another")
    assert published(path) == [1, 2]


def test_two_queries_under_one_name_are_told_apart(path: Path, tmp_path: Path, published: Published) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata").write_text(f'{{"id": "query-{name}"}}')
    first = stream_writer(path, checkpointLocation=str(tmp_path / "a"))
    second = stream_writer(path, checkpointLocation=str(tmp_path / "b"))
    first.commit([first.write(rows(1))], 0)
    with pytest.raises(InvalidOption, match="another query"):
        second.commit([second.write(rows(2))], 0)  # the same batch number, which would be taken for a repeat
    first.commit([first.write(rows(1))], 0)
    first.commit([first.write(rows(3))], 1)
    assert published(path) == [1, 3]


def test_one_bad_row_and_nothing_of_the_batch_is_published(path: Path) -> None:
    writer = stream_writer(path)
    good = writer.write(rows(1, 2))
    with pytest.raises(InvalidData, match="'oops'"):
        writer.write(rows(3, "oops"))
    assert staging_files(path) == [good.name]  # the bad partition left nothing behind
    writer.abort([good, None], 0)
    assert staging_files(path) == []
    assert not path.exists()


def test_a_partition_that_turns_bad_late_leaves_no_file_behind(path: Path) -> None:
    def late() -> Iterator[pa.RecordBatch]:
        yield from rows(*range(5_000))
        yield from rows("oops")

    with pytest.raises(InvalidData, match="row 5000 of"):
        stream_writer(path).write(late())
    assert staging_files(path) == []


def test_messages_and_the_mark_that_they_are_published_stand_or_fall_together(
    path: Path, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise InputOutput("no more")

    monkeypatch.setattr(SqliteWriter, "save_sink_batch", fail)
    with pytest.raises(InputOutput, match="no more"):
        run_batch(path, 0, [[1, 2]])
    assert published(path) == []
    monkeypatch.undo()
    run_batch(path, 0, [[1, 2]])
    assert published(path) == [1, 2]


def test_a_commit_that_fails_in_the_middle_leaves_nothing_in_the_log(path: Path, published: Published) -> None:
    run_batch(path, 0, [[1]])
    writer = stream_writer(path)
    first, second = writer.write(rows(*range(3_000))), writer.write(rows(2))
    os.truncate(os.path.join(f"{path}-staging", second.name or ""), 100)
    with pytest.raises(InputOutput, match="Run the batch again"):
        writer.commit([first, second], 1)
    assert published(path) == [1]
    run_batch(path, 1, [[2]])  # the batch was not marked as done
    assert published(path) == [1, 2]


def test_fewer_rows_than_were_staged_are_noticed(path: Path, published: Published) -> None:
    writer = stream_writer(path)
    staged = writer.write(rows(1, 2, 3))
    with pytest.raises(InputOutput, match="4 rows were staged, 3 are here"):
        writer.commit([Staged(staged.name, 4)], 0)
    assert published(path) == []


def test_only_files_with_our_names_are_read_or_removed(path: Path) -> None:
    writer = stream_writer(path)
    with pytest.raises(InputOutput, match="no staging file"):
        writer.commit([Staged("../events.db", 1)], 0)


def test_leftovers_of_killed_runs_go_after_a_day(path: Path, published: Published) -> None:
    writer = stream_writer(path)
    old, young = writer.write(rows(8)), writer.write(rows(9))
    foreign = Path(f"{path}-staging") / "notes.txt"
    foreign.write_text("not ours")
    long_ago = time.time() - LEFTOVER_MS / 1000 - 60
    for name in (old.name or "", foreign.name):
        os.utime(os.path.join(f"{path}-staging", name), (long_ago, long_ago))
    run_batch(path, 0, [[1]])
    assert sorted(staging_files(path)) == sorted([young.name, "notes.txt"])
    assert published(path) == [1]


def test_a_batch_write_with_a_batch_id_knows_its_repeat(path: Path, published: Published) -> None:
    """What foreachBatch needs: it may call the same write twice."""
    options = {"path": str(path), "sinkId": "s", "batchId": "3"}
    for _ in range(2):
        writer = BatchWriter(options, PLAIN)
        writer.commit([writer.write(rows(1, 2))])
    assert published(path) == [1, 2]


def test_two_batch_jobs_are_two_jobs_but_one_commit_repeated_is_one(path: Path, published: Published) -> None:
    writer = BatchWriter({"path": str(path)}, PLAIN)
    staged = writer.write(rows(1))
    kept = Path(f"{path}-staging", staged.name or "").read_bytes()
    writer.commit([staged])
    Path(f"{path}-staging").mkdir()
    Path(f"{path}-staging", staged.name or "").write_bytes(kept)
    pickle.loads(pickle.dumps(writer)).commit([staged])
    assert published(path) == [1]
    again = BatchWriter({"path": str(path)}, PLAIN)
    again.commit([again.write(rows(1))])
    assert published(path) == [1, 1]


def test_given_ids_are_known_to_the_log_as_those_of_any_publisher(path: Path, published: Published, ids: Ids) -> None:
    store = SqliteStore(path)
    with store.write() as writer:
        writer.append([Draft("t", "0", 1, "known")], int(time.time() * 1000), DedupeWindow())
    store.close()
    schema = StructType([*PLAIN.fields, StructField("id", StringType()), StructField("seq", LongType())])
    names = ["topic", "data", "id", "seq"]
    batch = pa.record_batch([["t"] * 3, ["1", "2", "3"], ["known", "new", None], [7, 8, 9]], names=names)
    job = BatchWriter({"path": str(path)}, schema)
    job.commit([job.write(iter([batch]))])
    assert published(path) == [0, 2, 3]
    assert ids(path)[:2] == ["known", "new"]
