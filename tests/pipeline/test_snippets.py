"""The snippets of docs/howto/lake.md for other tools, on a real lake, and the calls for those who come from Kafka. What
needs Delta's jar is not here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lake_world import make_lake
from pyspark.sql import SparkSession

import headwater

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
DOCS = HOWTO / "lake.md"
TOOLS = re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("snippets")
    with headwater.open(made / "events.db", maintenance_interval=None) as log:
        log.publish_many([("orders.new", {"order": n}) for n in range(3)])
        log.publish("notes.made", "hello", headers={"k": "v"})
        with log.subscribe("billing", "orders.>") as billing:
            for message in billing.fetch(10):
                message.ack()
    make_lake(made / "events.db", made / "lake")
    return made


KAFKA = re.findall(
    r"^\| .* \| `([^`]+)` \|$",
    (HOWTO / "elsewhere.md").read_text().split("## Kafka's Spark connector")[1].split("\n## ")[0],
    re.MULTILINE,
)


def test_there_are_snippets_for_three_tools() -> None:
    assert [tool for tool, _ in TOOLS] == ["Polars", "DuckDB", "pandas"]


@pytest.mark.parametrize(("tool", "snippet"), TOOLS, ids=[tool for tool, _ in TOOLS])
def test_a_snippet_runs_and_finds_what_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tool: str, snippet: str
) -> None:
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(compile(snippet, f"{DOCS.name}, {tool}", "exec"), found)
    match tool:
        case "Polars":
            assert dict(found["volume"].rows()) == {"orders.new": 3, "notes.made": 1}
            assert found["orders"].get_column("data").to_list() == ["0", "1", "2"]
        case "DuckDB":
            assert sorted(found["by_topic"]) == [("notes.made", 1), ("orders.new", 3)]
        case "pandas":
            assert set(found["latency"]["subscription"]) == {"billing"}
            assert list(found["before"].columns) == ["seq", "topic"]
            assert len(found["before"]) == 4


def test_the_calls_for_those_who_come_from_kafka_run(folder: Path, spark: SparkSession) -> None:
    calls = [call.replace('"events.db"', repr(str(folder / "events.db"))) for call in KAFKA]
    assert len(calls) == 10
    orders = eval(calls[0], {"spark": spark})
    assert orders.count() == 3
    for call in calls:
        made = eval(call, {"spark": spark, "orders": orders})
        if made is not None and not made.isStreaming:
            made.collect()
    with headwater.open(folder / "events.db") as log:
        assert log.topic_max_seq("copies") > 0
