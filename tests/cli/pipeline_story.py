"""Several commands of `headwater pipeline` on one JVM, with JSON lines of what each said: `pipeline_story.py DIR`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from headwater.cli import main

VOLUME = "select topic, count(*) as messages from messages group by topic order by topic"
LIVE = "select count(*) n, max(published_at) as last, timestamp'2026-01-02 03:04:05' as then, map('a', 1) m from live"
ON_SPARK = ("run", "audit", "sql", "replay")
# Compiled simply and at once, or not at all: four messages end before anything better has paid for itself.
QUICK = (
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
    *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN", "--conf", "spark.sql.codegen.wholeStage=false"),
)


def tell(name: str, *arguments: object) -> None:
    out, err = io.StringIO(), io.StringIO()
    settings = QUICK if arguments[0] in ON_SPARK else ()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["pipeline", *map(str, arguments), *settings])
    print(json.dumps({"name": name, "code": code, "out": out.getvalue(), "err": err.getvalue()}), flush=True)


def run_story(folder: Path) -> None:
    log, lake, other = folder / "events.db", folder / "lake", folder / "other.db"
    both = ("--log", log, "--lake", lake)
    only_lake = ("--lake", lake)  # a log is read by helper processes, whose starts make up most of a query's time
    replay = ("replay", "--lake", lake, "--to", other, "--where", "topic = 'orders.new'")
    tell("run", "run", *both, "--json")
    tell("audit", "audit", *both, "--page", folder / "audit.html")
    tell("sql", "sql", VOLUME, *only_lake)
    tell("sql in JSON", "sql", LIVE, "--log", log, "--json")
    tell("sql in CSV", "sql", VOLUME, *only_lake, "--csv", "--limit", 1)
    tell("views", "sql", "show views", *only_lake, "--json")
    tell("a bad query", "sql", "select nothing from nowhere", *only_lake)
    tell("a bad condition", *replay[:-1], "topic ~ 1")
    tell("replay tried", *replay, "--dry-run")
    tell("replay", *replay, "--json")
    tell("replay again", *replay)
    tell("report", "report", *only_lake)
    next(iter(lake.rglob("bronze/**/*.parquet"))).unlink()
    tell("audit of a broken lake", "audit", *both, "--json")


if __name__ == "__main__":
    run_story(Path(sys.argv[1]))
