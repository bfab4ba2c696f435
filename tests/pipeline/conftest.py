"""One Spark session for all tests of the pipeline, in this process, through Spark Connect, or on a cluster; empty logs,
and lakes on S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lake_world import World
from pyspark.sql import SparkSession
from s3_server import S3Server
from small_logs import new_log

import headwater
from headwater.pipeline.session import end_jvm, session

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


# --- logs and lakes ---------------------------------------------------------------------------------------------------


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


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A log, and a lake that runs here make of it."""
    return World(tmp_path)


@pytest.fixture
def lake_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], str]:
    """The url of a new lake on a server; this process and its children have the credentials."""

    def new_lake(server: S3Server) -> str:
        for name, value in server.lake_environment.items():
            monkeypatch.setenv(name, value)
        return server.new_lake()

    return new_lake


@pytest.fixture
def s3_lake(s3: S3Server, lake_on: Callable[[S3Server], str]) -> str:
    return lake_on(s3)
