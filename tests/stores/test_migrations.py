"""Files of older versions: opened, they become files of this version, and nothing in them is lost."""

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.broker.publish import PublisherBatch, make_drafts, submit_drafts
from headwater.errors import StoreError
from headwater.ports.records import Gap
from headwater.stores.sqlite import SqliteStore, migrations
from headwater.stores.sqlite.migrations import SCHEMA_VERSION

OLD_VERSIONS = (1, 2, 3, 4, 5)
FIRST_SCHEMA = Path(__file__).with_name("schema_version_1.sql").read_text()
# The steps that were released, as they were: older versions are made by them.
RELEASED = ("c59b38bcf2456703", "a73ec7f88f077791", "dede2c79911ca0bd", "7283da78ea34e615", "973ad56551065f61")
# What stands in the way if the user has it already.
NEW_IN = {
    2: {"receipts"},
    3: {"pruned", "sinks", "timings", "timings_by_hour"},
    4: {"ids_by_log"},
    5: {"samples"},
    6: {"dead_letters_by_seq"},
}
TIME_LIMIT_S = 30
CLOCK = ManualClock()


def open_log(path: Path) -> Log:
    return headwater.open(path, clock=CLOCK, maintenance_interval=None, heartbeats=False)


@contextmanager
def as_of(version: int) -> Iterator[None]:
    """Inside, files are made as this version made them."""
    with pytest.MonkeyPatch.context() as patch:
        steps = migrations.MIGRATIONS[: version - 1]
        patch.setattr(migrations, "SCHEMA", "".join([FIRST_SCHEMA, *steps]))
        patch.setattr(migrations, "SCHEMA_VERSION", version)
        patch.setattr(migrations, "MIGRATIONS", steps)
        yield


@pytest.fixture(params=OLD_VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def path(tmp_path: Path, version: int) -> Path:
    """A file of an old version with something of everything in it."""
    path = tmp_path / "old.db"
    with as_of(version), open_log(path) as log:
        log.publish_many([("a", n, {"headers": {"n": n}, "priority": n}) for n in range(1, 7)])
        log.publish("b.c", "named")
        remember(path, 7, "given")
        log.retain("b.>", max_count=5)
        exclusive = log.subscribe("exclusive", "a", jitter=0, backoff=60)
        first, second, third, fourth, _ = exclusive.fetch(5)
        for message in (first, third):
            message.ack()
        second.nack()
        fourth.reject("broken")
        log.subscribe("shared", ">", mode="shared").fetch(2)[1].ack()
        with log._core.engine.store.write() as writer:  # type: ignore[attr-defined]
            writer.add_gap(Gap("shared", 1, 1, 1, "retention", CLOCK.now_ms()))
    assert version_of(path) == version
    assert not set().union(*(new for since, new in NEW_IN.items() if since > version)) & tables_of(path)
    return path


def query(path: Path, sql: str) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


def remember(path: Path, seq: int, id: str, at_ms: int | None = None) -> None:
    """A message published with an id, as the version of the file remembers it."""
    query(path, f"UPDATE messages SET id = '{id}', checked = 2 WHERE seq = {seq}")
    topic = f"(SELECT topic || '#' FROM messages WHERE seq = {seq}) || " if version_of(path) >= 4 else ""
    at_ms = CLOCK.now_ms() if at_ms is None else at_ms
    query(path, f"INSERT INTO remembered_ids VALUES ({seq}, {topic}'{id}', {at_ms})")


def version_of(path: Path) -> int:
    [(version,)] = query(path, "SELECT value FROM headwater WHERE name = 'schema_version'")
    return int(version)


def tables_of(path: Path) -> set[str]:
    return {name for (name,) in query(path, "SELECT name FROM sqlite_schema WHERE type = 'table'")}


def shape_of(path: Path) -> set[tuple[str, ...]]:
    """Every table, index and view with its text, however that is broken into lines."""
    found = query(path, "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema")
    return {(*names, " ".join(sql.split())) for *names, sql in found}


def contents(log: Log) -> dict[str, Any]:
    with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
        seqs = range(1, 20)
        return {
            "messages": [message.to_json() for message in reader.messages(seqs).values()],
            "subscriptions": reader.subscriptions(),
            "deliveries": [reader.deliveries(id, seqs) for id in ("exclusive", "shared")],
            "dead letters": [(letter.id, letter.error, letter.message.to_json()) for letter in log.dead_letters.list()],
            "gaps": reader.gaps("shared"),
            "retention": reader.retention(),
            "topics": reader.topic_counts(),
            "last seq": reader.last_seq(),
        }


def send(log: Log, publisher: str, first: int, *data: Any) -> tuple[list[int], set[int]]:
    drafts = make_drafts([("numbered", each) for each in data], 0)
    completion = submit_drafts(log._core.engine, drafts, PublisherBatch(publisher, first))  # type: ignore[attr-defined]
    assert completion.wait(TIME_LIMIT_S)
    return completion.result().seqs, set(completion.result().duplicates)


def test_a_released_step_never_changes() -> None:
    steps = [hashlib.sha256(" ".join(step.split()).encode()).hexdigest()[:16] for step in migrations.MIGRATIONS]
    assert tuple(steps) == RELEASED


def test_everything_is_still_there(path: Path, version: int) -> None:
    with as_of(version), open_log(path) as log:
        before = contents(log)
    with open_log(path) as log:
        assert contents(log) == before
        assert len(before["messages"]) == 7
        assert all(before.values()), "there was something of everything"
        assert log.health()["integrity"] == "ok"
    assert version_of(path) == SCHEMA_VERSION > max(OLD_VERSIONS)


def test_it_goes_on_where_it_was(path: Path) -> None:
    with open_log(path) as log:
        assert log.publish("b.c", "named", id="given") == 7, "ids are remembered"
        assert log.publish("a", "new") == 8
        received = []
        subscription = log.subscribe("exclusive", "a")
        while found := subscription.fetch():
            received += [(message.seq, message.attempt) for message in found]
            subscription.ack_many(found)
        assert received == [(5, 2), (6, 1), (8, 1)], "1 and 3 were acked, 2 waits, 4 is dead"
        assert log.subscription("exclusive").waiting == 1


def test_ids_are_remembered_on_the_topics_they_were_published_on(path: Path) -> None:
    with open_log(path) as log:
        assert log.publish("a", "another's", id="given") == 8
        assert log.publish("b.c", "again", id="given") == 7
        assert log.publish("a", "again", id="given") == 8


def test_an_id_whose_message_is_gone_is_forgotten(path: Path) -> None:
    """Its topic is not known any more. Known on all of them, it could swallow a message of another publisher."""
    is_scoped = version_of(path) >= 4
    query(path, "DELETE FROM messages WHERE seq = 7")
    with open_log(path) as log:
        assert log.publish("orders.new", "ours", id="given") == 8
        assert log.publish("b.c", "sent again", id="given") == (7 if is_scoped else 9)


def test_ids_out_of_the_window_are_forgotten_as_before(path: Path) -> None:
    for seq, id, age_ms in ((5, "old", 24 * 3600_000 + 1), (6, "young", 24 * 3600_000)):
        remember(path, seq, id, CLOCK.now_ms() - age_ms)
    with open_log(path) as log:
        assert log.publish("a", "again", id="old") == 8
        assert log.publish("a", "again", id="young") == 6
        log.run_maintenance()
        assert log.publish("a", "again", id="young") == 6


def test_numbered_publishing_works_in_it(path: Path) -> None:
    with open_log(path) as log:
        assert send(log, "p", 1, "one", "two") == ([8, 9], set())
    with open_log(path) as log:
        assert send(log, "p", 1, "one", "two", "three") == ([8, 9, 10], {0, 1})
        log.run_maintenance()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("deleted", "runs"),
    [
        ([], []),
        ([1], [(1, 1)]),
        ([9], [(9, 9)]),
        ([4, 5], [(4, 5)]),
        ([1, 2, 4, 6, 7, 9], [(1, 2), (4, 4), (6, 7), (9, 9)]),
        (list(range(1, 10)), [(1, 9)]),
    ],
    ids=["nothing", "the first", "the last", "in the middle", "here and there", "everything"],
)
def test_what_is_missing_by_then_counts_as_pruned(
    tmp_path: Path, version: int, deleted: list[int], runs: list[tuple[int, int]]
) -> None:
    path = tmp_path / "holes.db"
    with as_of(version), open_log(path) as log:
        log.publish_many([("a", n) for n in range(9)])
    query(path, f"DELETE FROM messages WHERE seq IN ({', '.join(map(str, deleted))})")
    with open_log(path) as log:
        assert log.publish("a", "new") == 10
        with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
            assert reader.pruned(1, 100) == runs
        log.retain("a", max_count=0)
        log.run_maintenance()
        with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
            assert reader.pruned(1, 100) == [(1, 10)]


def test_an_empty_log_has_nothing_pruned(tmp_path: Path, version: int) -> None:
    with as_of(version):
        open_log(tmp_path / "empty.db").close()
    with open_log(tmp_path / "empty.db") as log, log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
        assert reader.pruned(0, 100) == []


def test_it_looks_like_a_new_one(path: Path, tmp_path: Path) -> None:
    open_log(path).close()
    open_log(tmp_path / "new.db").close()
    assert shape_of(path) == shape_of(tmp_path / "new.db")


def test_opening_it_again_changes_nothing(path: Path) -> None:
    open_log(path).close()
    facts, shape = query(path, "SELECT * FROM headwater"), shape_of(path)
    open_log(path).close()
    assert (query(path, "SELECT * FROM headwater"), shape_of(path)) == (facts, shape)


def test_one_that_has_it_open_already_is_not_disturbed(path: Path, version: int) -> None:
    with as_of(version):
        old = open_log(path)
    with open_log(path) as new:
        assert old.publish("a", "from the old one") == 8
        assert send(new, "p", 1, "from the new one") == ([9], set())
        assert [message.seq for message in old.subscribe("look", ">", mode="ephemeral", start=8).fetch()] == [8, 9]
    old.close()
    assert version_of(path) == SCHEMA_VERSION


# --- several at once ----------------------------------------------------------------------------------------


def test_many_threads_that_all_found_the_old_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openers = 6
    looked = threading.Semaphore(0)
    look = migrations._version

    def look_and_tell(*arguments: Any) -> int | None:
        try:
            return look(*arguments)
        finally:
            looked.release()

    monkeypatch.setattr(migrations, "_version", look_and_tell)
    in_the_way = apsw.Connection(str(path))
    in_the_way.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(openers) as pool:
        opening = [pool.submit(SqliteStore, path) for _ in range(openers)]
        for _ in range(openers):
            assert looked.acquire(timeout=TIME_LIMIT_S)
        in_the_way.execute("COMMIT")
        in_the_way.close()
        for each in opening:
            each.result(TIME_LIMIT_S).close()
    assert version_of(path) == SCHEMA_VERSION


PROCESS = """
import sys, headwater
from headwater.broker.publish import PublisherBatch, make_drafts, submit_drafts
path, publisher = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
with headwater.open(path, maintenance_interval=None) as log:
    for _ in range(2):
        completion = submit_drafts(log._core.engine, make_drafts([("a", publisher)], 0), PublisherBatch(publisher, 1))
        assert completion.wait(30)
        print(*completion.result().seqs, len(completion.result().duplicates), flush=True)
"""


def test_many_processes_at_once(path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), f"p{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=TIME_LIMIT_S)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert sorted(int(first) for first, *_ in answers) == [8, 9, 10, 11]
    assert all(answer == [answer[0], "0", answer[0], "1"] for answer in answers)
    assert version_of(path) == SCHEMA_VERSION


# --- what is in the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["CREATE TABLE {} (mine)", "CREATE VIEW {} AS SELECT 1 AS mine"], ids=["table", "view"])
@pytest.mark.parametrize(
    ("version", "name"),
    [
        (version, name)
        for since, names in NEW_IN.items()
        for name in sorted(names - {"dead_letters_by_seq"})  # an index
        for version in sorted({1, since - 1})
    ],
)
def test_a_name_of_the_users_in_the_way_leaves_the_file_as_it_was(
    path: Path, version: int, own: str, name: str
) -> None:
    """In a database that was adopted, the user may have a table of that name: all steps are done, or none."""
    query(path, own.format(name))
    shape = shape_of(path)
    with pytest.raises(StoreError, match=name):
        open_log(path)
    assert version_of(path) == version
    assert shape_of(path) == shape
