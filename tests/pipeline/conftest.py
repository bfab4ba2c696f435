"""One Spark session for all tests of the pipeline: in this process, through Spark Connect, or on a cluster; and logs.

ADBC and APSW must not have the same file open in one process, so the logs are closed when a test gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession
from s3_server import S3Server

import headwater
from headwater.message import Message
from headwater.pipeline.logs import open_reader
from headwater.pipeline.session import end_jvm, session
from headwater.ports.records import Selection
from headwater.stores.sqlite import SqliteStore
from headwater.topics import parse_pattern

HERE = Path(__file__).parent
FIRST_QUERIES_S_MAX = 300  # the first test pays for the start of Spark, on a machine that has other things to do
LONG_S_MAX = 1_500


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = config.getoption("--spark") != "classic"
    not_for_there: list[pytest.Item] = []
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if elsewhere and "spark" not in getattr(item, "fixturenames", ()):
            not_for_there.append(item)  # it would be the same test again
        item.add_marker(pytest.mark.timeout(LONG_S_MAX if "long" in item.keywords else FIRST_QUERIES_S_MAX))
    if not_for_there:
        config.hook.pytest_deselected(items=not_for_there)
        items[:] = [item for item in items if item not in not_for_there]


@pytest.fixture(scope="session")
def spark(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, s3: S3Server
) -> Iterator[SparkSession]:
    """As commands have it for little data: queries over few rows end before compilers and second plans have paid for
    themselves. Its workers can reach lakes on S3: they have the environment that the JVM began with."""
    scratch = tmp_path_factory.mktemp("spark")
    place: dict[str, Any] = {"master": "local[2]", "short": True}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3.lake_environment.items():
                patch.setenv(name, value)
            match pytestconfig.getoption("--spark"):
                case "connect":
                    place = {"remote": "local[2]", "short": True}
                case "standalone":
                    from standalone import EXECUTORS, standalone_cluster

                    place = {"master": stack.enter_context(standalone_cluster(scratch)), "conf": EXECUTORS}
            stack.callback(end_jvm)
            made = session("headwater tests", scratch=scratch, **place)
        yield made


# --- logs -------------------------------------------------------------------------------------------------------------

Insert = Callable[[str, list[dict[str, Any]]], None]


def insert(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows of the table `messages`, put in with plain SQL, all in one transaction."""
    if path.startswith("postgres://"):
        insert_into_postgres(path, rows)
        return
    connection = apsw.Connection(path)
    with connection:
        for row in rows:
            names = ", ".join(f'"{name}"' for name in row)
            values = ", ".join("CAST(? AS TEXT)" if isinstance(value, bytes) else "?" for value in row.values())
            connection.execute(f"INSERT INTO messages ({names}) VALUES ({values})", tuple(row.values()))
    connection.close()


def insert_into_postgres(url: str, rows: list[dict[str, Any]]) -> None:
    with psycopg.connect(url) as connection:
        for row in rows:
            names = sql.SQL(", ").join(map(sql.Identifier, row))
            marks = sql.SQL(", ").join(sql.SQL("%s") for _ in row)
            connection.execute(
                sql.SQL("INSERT INTO headwater.messages ({}) VALUES ({})").format(names, marks), list(row.values())
            )


def new_log(path: Path) -> str:
    SqliteStore(path, durability="relaxed").close()
    return str(path)


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    return new_log(tmp_path / "log.db")


@pytest.fixture
def postgres_log(postgres_schema_url: str) -> str:
    """The same in a database."""
    headwater.open(postgres_schema_url, maintenance_interval=None).close()
    return postgres_schema_url


@pytest.fixture(params=["in a file", "in PostgreSQL"])
def any_log(request: pytest.FixtureRequest) -> str:
    """For what must hold wherever a log is."""
    place: str = request.getfixturevalue("log_path" if request.param == "in a file" else "postgres_log")
    return place


@pytest.fixture(scope="session")
def put() -> Insert:
    return insert


@pytest.fixture(scope="session")
def make_log() -> Callable[[Path], str]:
    return new_log


@pytest.fixture(scope="session")
def messages_in() -> Callable[[Path | str], list[Message]]:
    return all_messages


def all_messages(log: Path | str) -> list[Message]:
    """What a log holds that a sink wrote; nothing if there is no such file."""
    if isinstance(log, Path) and not log.exists():
        return []
    found: list[Message] = []
    with open_reader(str(log)) as reader:
        after, last = 0, reader.last_seq()
        while after < last:
            scan = reader.scan(Selection(parse_pattern(">")), after, 10_000)
            found += scan.messages
            after = scan.scanned_to
    return found
