"""Processor time per message and side: publish, deliver and ack in batches of 1 to 1,000, on a file, through a server
and on PostgreSQL.

Time on the clock depends on the disk and on what else the machine does. Processor time shows what Headwater takes:
`client` is the process that calls it, `server` is the Headwater server or all processes of PostgreSQL.

    python bench/run.py costs                    the table, and docs/images/costs.svg
    python bench/costs.py RESULT.json [BEFORE]   the same as data; with an earlier RESULT.json the plot shows both
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import headwater
from common import MESSAGE, TOPIC, fresh_directory, served
from processes import used_ns
from report import Line

BATCHES = {1: 400, 10: 200, 100: 100, 1_000: 30}  # how many of each size
PLACES = ("file", "server", "postgres")
VERBS = ("publish", "deliver", "ack")
REPEATS = 3
PLOT = Path(__file__).parents[1] / "docs" / "images" / "costs.svg"

Costs = dict[str, dict[str, float]]  # by "place verb batch": client and server µs per message


@contextmanager
def postgres_database() -> Iterator[tuple[str, Callable[[], list[int]]]]:
    import postgres_ground

    with postgres_ground.prepared(0) as ground, ground.database() as url:
        with ground.server.administration() as connection:
            [(folder,)] = connection.execute("SHOW data_directory").fetchall()
        postmaster = int((Path(folder) / "postmaster.pid").read_text().split()[0])

        def pids() -> list[int]:
            """The postmaster and its children."""
            found = [postmaster]
            for each in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # it has ended
                    if int(each.read_text().rsplit(")", 1)[1].split()[1]) == postmaster:
                        found.append(int(each.parent.name))
            return found

        yield url, pids


@contextmanager
def place(name: str) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    """The url of an empty log, and the processes that serve it."""
    if name == "file":
        with fresh_directory() as directory:
            yield str(directory / "log.db"), list
    elif name == "server":
        with fresh_directory() as directory, served(directory) as (url, pids):
            yield url, lambda: pids
    else:
        with postgres_database() as (url, pids_of):
            yield url, pids_of


def measure_place(name: str) -> Costs:
    with place(name) as (url, pids_of), headwater.open(url) as log:
        log.publish(TOPIC, MESSAGE)  # connections and statements are prepared
        pids = pids_of()
        return {
            f"{name} {verb} {size}": cost
            for size, count in BATCHES.items()
            for verb, cost in measure_batches(log, pids, size, count).items()
        }


def measure_batches(log: Any, pids: list[int], size: int, count: int) -> dict[str, dict[str, float]]:
    spent = {verb: [0, 0] for verb in VERBS}

    def timed(verb: str, work: Callable[[], Any]) -> Any:
        before = time.process_time_ns(), used_ns(pids)
        outcome = work()
        after = time.process_time_ns(), used_ns(pids)
        for side in (0, 1):
            spent[verb][side] += after[side] - before[side]
        return outcome

    def publish() -> None:
        for _ in range(count):
            if size == 1:
                log.publish(TOPIC, MESSAGE)
            else:
                log.publish_many([(TOPIC, MESSAGE)] * size)

    with log.subscribe(f"costs-{time.monotonic_ns()}", TOPIC, start="new") as subscription:
        timed("publish", publish)
        done = 0
        while done < size * count:
            found = timed("deliver", lambda: subscription.fetch(size, 5))
            timed("ack", lambda found=found: subscription.ack_many(found))  # type: ignore[misc]
            done += len(found)
    return {
        verb: {side: ns / 1_000 / (size * count) for side, ns in zip(("client", "server"), sides, strict=True)}
        for verb, sides in spent.items()
    }


def median_costs() -> Costs:
    found: Costs = {}
    for name in PLACES:
        try:
            rounds = [measure_place(name) for _ in range(REPEATS)]
        except (RuntimeError, OSError, ImportError) as exc:  # the other places are measured all the same
            print(f"{name}: not measured: {exc}", flush=True)
            continue
        for key in rounds[0]:
            found[key] = {side: statistics.median(each[key][side] for each in rounds) for side in ("client", "server")}
    return found


def plot(after: Costs, before: Costs | None) -> None:
    import altair

    rows = [
        {"when": when, "verb": verb, "batch": int(size), "µs": sum(cost.values()), "place": name}
        for when, costs in (("before", before or {}), ("now", after))
        for key, cost in costs.items()
        for name, verb, size in [key.split()]
    ]
    chart = (
        altair.Chart(altair.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=altair.X("batch:O", title="messages per call"),
            y=altair.Y("µs:Q", scale=altair.Scale(type="log"), title="µs of processor time per message, both sides"),
            color=altair.Color("verb:N", sort=list(VERBS)),
            strokeDash=altair.StrokeDash("when:N", sort=["now", "before"]),
        )
        .properties(width=230, height=260)
        .facet(column=altair.Column("place:N", sort=list(PLACES), title=None))
    )
    chart.save(str(PLOT))


def measure() -> list[Line]:
    costs = median_costs()
    plot(costs, None)
    return [
        Line(
            f"{name}: {verb}, {size} at a time",
            f"{cost['client'] + cost['server']:,.1f} µs",
            f"client {cost['client']:,.1f}, server {cost['server']:,.1f}" if name != "file" else "",
        )
        for key, cost in costs.items()
        for name, verb, size in [key.split()]
    ]


if __name__ == "__main__":
    found = median_costs()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    if len(sys.argv) > 2:
        plot(found, json.loads(Path(sys.argv[2]).read_text()))
