"""Options and the line of figures that the hardest tests (crash, powerloss) share; tests that are coroutine functions,
which run in a loop of their own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest
from postgres_server import PostgresServer
from redis_server import RedisServer
from s3_server import CREDENTIALS, S3Server
from xdist.scheduler import LoadScopeScheduling

# How long one example takes says nothing on a machine that has other things to do.
hypothesis.settings.register_profile(
    "headwater", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("headwater")

ROOT = Path(__file__).parents[1]
TEST_S_MAX = 90.0
SETTLING_TURNS = 200
_EMPTY_LOG = """
DO $$ DECLARE each text; BEGIN
    FOR each IN SELECT tablename FROM pg_tables WHERE schemaname = 'headwater' AND tablename <> 'headwater' LOOP
        EXECUTE format('DELETE FROM headwater.%I', each);
    END LOOP;
    FOR each IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('DROP TABLE %I CASCADE', each);
    END LOOP;
    UPDATE headwater.headwater SET value = 0 WHERE name IN ('counted_to', 'last_seq');
    DELETE FROM headwater.headwater WHERE name LIKE 'unordered%';
    FOR each IN SELECT sequencename FROM pg_sequences WHERE schemaname = 'headwater' LOOP
        PERFORM setval(format('headwater.%I', each), 1, false);
    END LOOP;
END $$
"""
# So that no worker is left with one of them at the end.
_LONGEST_FIRST = ("spark", "test_demo.py", "abuse", "test_crash_loop.py", "crash", "worker", "faulty_network")
_figures: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headwater")
    group.addoption("--kills", type=int, default=10, help="how often the crash loops kill")
    group.addoption("--every-cut", action="store_true", help="cut the power at every sync, not only at some")
    group.addoption("--bench-examples", type=int, default=8, help="how many plays the bench of consumers plays a case")
    group.addoption("--dice", type=int, default=1, help="seed of the crash, power-loss and fault tests")
    group.addoption(
        "--spark",
        choices=("classic", "connect", "standalone"),
        default="classic",
        help="where the pipeline's tests that use Spark run; elsewhere than classic, no others of the pipeline do",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "long" in item.keywords and "long" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="takes long: run it with -m long"))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    path = item.nodeid.partition("::")[0]
    places = {_group(path), *path.split("/")}
    return next((turn for turn, name in enumerate(_LONGEST_FIRST) if name in places), len(_LONGEST_FIRST))


@cache
def _group(path: str) -> str:
    """With several workers: a file's tests share what they set up, those that use the Spark session share one, and a
    victim's latency is measured under one attack at a time."""
    if path.startswith("tests/pipeline/") and "spark: SparkSession" in (ROOT / path).read_text():
        return "spark"
    return "abuse" if path.startswith("tests/abuse/") else path


class _Groups(LoadScopeScheduling):
    """Groups by the file of a test. The marker `xdist_group` is of no use: xdist writes it into an attribute that
    pytest no longer reads, and each test then goes to either worker."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups | None:
    return _Groups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def no_lines_left_out() -> None:
    """What servers of earlier tests have logged in the same second does not count."""
    logging.getLogger("headwater.server").filters.clear()


@pytest.fixture
def figures(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Say a line at the end of the run, whatever is captured."""
    return pytestconfig.stash.setdefault(_figures, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its figures to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = session.config.stash.get(_figures, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(_figures, []).extend(getattr(node, "workeroutput", {}).get("figures", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_figures, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all; without fsync, for what is proved on it is not what a disk does."""
    with PostgresServer(fsync="off") as server:
        yield server


@pytest.fixture(scope="session")
def _shared_database(postgres: PostgresServer) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    """With a connection that stays: a new one costs more than all that it does here."""
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        yield url, connection


@pytest.fixture
def postgres_schema_url(_shared_database: tuple[str, psycopg.Connection[Any]]) -> str:
    """An empty log in a database that many share. It is emptied rather than made: that takes a tenth of the time."""
    url, connection = _shared_database
    there = connection.execute("SELECT to_regclass('headwater.headwater')").fetchone()
    if there != (None,):
        connection.execute(_EMPTY_LOG)
    return url


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A database of the test's own."""
    url = postgres.new_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """For `printed_without_rights`: pytest's own directories are for root's eyes only."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One server for all; tests that stop or kill one start their own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    """An empty database of the test's own."""
    with redis.client() as client:
        client.flushall()
    return redis.url


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One endpoint for all; tests that stop one start their own."""
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket_url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a bucket of the test's own, and credentials for it."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return s3.new_bucket()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    timeout = pyfuncitem.get_closest_marker("timeout")
    seconds_max = TEST_S_MAX if timeout is None else timeout.args[0] or None
    asyncio.run(_without_a_trace(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), seconds_max))
    return True


async def _without_a_trace(test: Any, seconds_max: float | None) -> None:
    """Run a test; exceptions that reach the event loop and tasks that are left over fail it."""
    mishaps: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    await asyncio.wait_for(test, seconds_max)
    for _ in range(SETTLING_TURNS):
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.001)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    assert not mishaps, f"raised on the event loop: {mishaps}"
