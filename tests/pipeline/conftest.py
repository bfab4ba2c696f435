"""One Spark session for all tests of the pipeline: in this process, through Spark Connect, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater.pipeline.starting.session import end_jvm, session

HERE = Path(__file__).parent
FIRST_QUERIES_S_MAX = 300  # the first test pays for the start of Spark, on a machine that has other things to do
LONG_S_MAX = 1_500
QUICK_START = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""The JVM compiles simply and at once: what tests run ends before the better compiler has paid for itself. It saves a
third of their processor time, and changes nothing of what they prove."""


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
def spark(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    scratch = tmp_path_factory.mktemp("spark")
    place: dict[str, Any] = {"master": "local[2]", "conf": QUICK_START}
    with ExitStack() as stack:
        match pytestconfig.getoption("--spark"):
            case "connect":
                place = {"remote": "local[2]", "conf": QUICK_START}
            case "standalone":
                stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(HERE)
                from standalone import EXECUTORS, standalone_cluster

                place = {"master": stack.enter_context(standalone_cluster(scratch)), "conf": EXECUTORS}
        stack.callback(end_jvm)
        yield session("headwater tests", scratch=scratch, **place)
