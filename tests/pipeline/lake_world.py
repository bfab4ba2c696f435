"""A lake made from a log without Spark, for tests; and what plain Python makes of the same messages."""

from __future__ import annotations

import atexit
import datetime as dt
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from small_logs import put

import headwater
from headwater.errors import ConflictError
from headwater.message import derived_id
from headwater.pipeline.delta import Table
from headwater.pipeline.lake import BRONZE, EXPLICIT_IDS, QUARANTINE, SILVER, Lake
from headwater.pipeline.logs import log_identity, open_reader, read_range
from headwater.pipeline.run import Run, RunResult, Task, TaskResult, run_task
from headwater.pipeline.types import Types, load_types

ORDER = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
STRICT = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "maximum": 3}}}
NO_TYPES = Types()
LONG_AGO_MS = int(dt.datetime(2001, 2, 3, 4, 5, tzinfo=dt.UTC).timestamp() * 1000)


SEQ = pa.schema([("seq", pa.int64())])


class Killed(BaseException):
    pass


# A process that has a log open must not read it through the other copy of SQLite, which ADBC has.
_elsewhere = ProcessPoolExecutor(1, get_context("spawn"))
atexit.register(_elsewhere.shutdown)


def spark_of(session: Any) -> Any:
    """What runs and tasks use of a Spark, on a session that is there."""
    is_connect = "connect" in type(session).__module__
    context = None if is_connect else session.sparkContext
    return SimpleNamespace(session=session, context=context, is_connect=is_connect)


class RunHere(Run):
    """A run without Spark."""

    between: Callable[[], object] = staticmethod(lambda: None)
    tasks_run = 0

    def __init__(self, lake: Lake, log: str, types: Types = NO_TYPES) -> None:
        super().__init__(lake, log, types, lambda short: pytest.fail("Spark is started"))

    def _run(self, tasks: list[Task], done: int | None) -> list[TaskResult]:
        RunHere.tasks_run += len(tasks)
        written = list(_elsewhere.map(run_task, tasks))
        self.between()
        return written

    def _spark_for(self, seqs: int) -> Any:
        return None

    def vanish(self) -> None:
        """As a kill leaves it: the lease is neither released nor renewed."""
        if self._position is not None:
            self._position._released.set()
            self._position._store.close()


def make_lake(log: Path, folder: Path) -> Lake:
    """Bring the lake up to the log."""
    lake = Lake.open(folder, create=True)
    with RunHere(lake, str(log)) as run:
        run.once()
    return lake


class World:
    def __init__(self, folder: Path, lake: str | Path | None = None) -> None:
        self.folder = folder
        self.log = str(folder / "events.db")
        self.lake_path = lake or folder / "lake"
        self.types = NO_TYPES
        with self.open():
            pass

    @property
    def lake(self) -> Lake:
        return Lake.open(self.lake_path, create=True)

    def open(self) -> headwater.Log:
        return headwater.open(self.log, maintenance_interval=None)

    def insert(self, topic: str, data: str, **columns: Any) -> None:
        """Past all checks, as with an SQL shell."""
        put(self.log, [{"topic": topic, "data": data, "checked": 2, **columns}])

    def publish_all_kinds(self) -> None:
        """Of each kind that some table treats in its own way."""
        with self.open() as log:
            log.publish_many([(f"orders.{n % 3}", {"n": n}) for n in range(10)])
            for n in range(4):
                log.publish("orders.new", {"n": n}, type="order", version=1, from_="shop", to="post")
            log.publish("orders.new", {"n": "one"}, type="order", version=1, from_="shop")
            log.publish("replica.eu.users", {"version": 3, "bytes": 100})
            log.publish("mails.new", {"n": 1}, id="given")
        self.insert("orders.bad", "{not json")
        self.insert("orders.late", "1", published_at=LONG_AGO_MS)
        for _ in range(2):
            self.insert("mails.new", '{"n": 2}', id="given")
            self.insert("mails.new", '{"n": 2}', id="another")

    def register(self, schemas: dict[str, Any]) -> None:
        directory = self.folder / "types"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, schema in schemas.items():
            (directory / f"{name}.json").write_text(json.dumps(schema))
        self.types = load_types(directory)

    def run(self, *, derive: bool = True) -> RunResult:
        with self.new_run() as run:
            with open_reader(self.log) as reader:
                run.ingest(reader.last_seq(), derive=derive)
            return run.result

    def new_run(self) -> RunHere:
        return RunHere(self.lake, self.log, self.types)

    def killed_run(self, kill_at: int, act: Callable[[Run], object] | None = None) -> bool:
        """Whether there were so many commits. The commit is done; its answer is not heard."""
        run = self.new_run()
        with commits_counted(kill_at):
            try:
                run.ingest(run._last_seq) if act is None else act(run)
            except Killed:
                run.vanish()
                return True
        run.__exit__(None, None, None)
        return False

    def assert_refused(self, why: str, between: Callable[[], object]) -> None:
        """Of a run that something came between, between its tasks and its commits."""
        late = self.new_run()
        late.between = between
        with pytest.raises(ConflictError, match=why):
            late.ingest(late._last_seq)
        late.vanish()

    def seqs(self, name: str = BRONZE) -> list[int]:
        return seqs(self.lake, name)

    def assert_exact(self, maximum: int | None = None) -> None:
        """Every table has what the log has; `maximum` is what the type `order` allows."""
        messages = _elsewhere.submit(all_messages, self.log).result()
        lake = self.lake
        assert_derived(lake, messages, log_identity(self.log)[0], bool(self.types.schemas), maximum)
        bronze = lake.table(BRONZE)
        with open_reader(self.log) as reader:
            assert bronze.transaction() == reader.last_seq()
            record = reader.subscription(lake.subscription)
            assert record is not None
            assert (record.window.floor, record.window.delivered) == (bronze.transaction(), bronze.transaction())


def assert_derived(
    lake: Lake, messages: list[dict[str, Any]], salt: int, typed: bool, maximum: int | None = None
) -> None:
    expected = oracle(messages, salt, typed, maximum)
    found: dict[str, Any] = {name: seqs(lake, name) for name in expected if not name.startswith("gold/")}
    for name in KEYS:
        rows = lake.table(name).read().to_pylist() if lake.table(name).exists else []
        found[name] = {tuple(v for k, v in row.items() if k in KEYS[name]): _sums(row) for row in rows}
        assert len(found[name]) == len(rows), name
    assert found == expected
    bronze, silver = lake.table(BRONZE), lake.table(SILVER)
    assert bronze.transaction() == silver.transaction()
    assert bronze.transaction("rows") == bronze.rows == len(messages)
    assert len(messages) == silver.rows + len(expected[QUARANTINE]) + silver.transaction("repeated")


def seqs(lake: Lake, name: str = BRONZE) -> list[int]:
    return sorted(lake.table(name).read(SEQ)["seq"].to_pylist())


def all_messages(log: str) -> list[dict[str, Any]]:
    return list(pa.Table.from_batches(read_range(log, 0, 1 << 62)).to_pylist())


KEYS = {
    "gold/volume": ("day", "hour", "topic", "type"),
    "gold/traffic": ("day", "from", "to"),
    "gold/replication": ("replica", "day"),
}


def _sums(row: dict[str, Any]) -> tuple[int, int]:
    return (row["pushes"] if "pushes" in row else row["messages"]), row["bytes"]


def oracle(messages: list[dict[str, Any]], salt: int, typed: bool, maximum: int | None) -> dict[str, Any]:
    silver, quarantine, explicit, seen = [], [], [], set()
    sums: dict[str, dict[tuple[Any, ...], Counter[str]]] = {name: {} for name in KEYS}

    def add(name: str, key: tuple[Any, ...], bytes: int) -> None:
        sums[name].setdefault(key, Counter()).update({"n": 1, "bytes": bytes})

    for row in messages:
        at = row["published_at"]
        hour = at.replace(minute=0, second=0, microsecond=0)
        add("gold/volume", (at.date(), hour, row["topic"], row["type"]), row["size"])
        try:
            content = json.loads(row["data"])
        except json.JSONDecodeError:
            quarantine.append(row["seq"])
            continue
        if typed and row["type"] == "order" and not isinstance(content["n"], int):
            quarantine.append(row["seq"])
            continue
        if typed and row["type"] == "order" and maximum is not None and content["n"] > maximum:
            quarantine.append(row["seq"])
            continue
        if row["id"] != derived_id(int(at.timestamp() * 1000), salt, row["seq"]):
            if (row["id"], row["topic"]) in seen:
                continue
            explicit.append(row["seq"])
        seen.add((row["id"], row["topic"]))
        silver.append(row)
        if row["from"] or row["to"]:
            add("gold/traffic", (at.date(), row["from"], row["to"]), row["size"])
        if row["topic"].startswith("replica."):
            _, namespace, name = row["topic"].split(".", 2)
            add("gold/replication", (f"{namespace}/{name}", at.date()), content["bytes"])
    found: dict[str, Any] = {
        BRONZE: [row["seq"] for row in messages],
        SILVER: [row["seq"] for row in silver],
        QUARANTINE: quarantine,
        EXPLICIT_IDS: explicit,
        **{name: {key: (sum["n"], sum["bytes"]) for key, sum in by.items()} for name, by in sums.items()},
    }
    if typed:
        found["typed/order"] = [row["seq"] for row in silver if row["type"] == "order"]
    return found


@contextmanager
def commits_counted(kill_at: int) -> Iterator[None]:
    """Ends the run after that commit of any table."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def commit(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            answer = real(*arguments, **options)
            count += 1
            if count == kill_at:
                raise Killed
            return answer

        return commit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "commit", counted(Table.commit))
        patch.setattr(Table, "reset", counted(Table.reset))
        yield
