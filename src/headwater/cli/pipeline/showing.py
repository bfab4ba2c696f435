"""`headwater pipeline demo`: a log with some traffic, its lake, the audit and the report."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

import headwater
from headwater.cli.output import note, say
from headwater.cli.pipeline.looking import audit, report, sql
from headwater.cli.pipeline.options import needs_spark
from headwater.cli.pipeline.running import run
from headwater.errors import InvalidOption

ORDERS = 20_000
QUERY = "select topic, count(*) as messages, sum(size) as bytes from messages group by topic order by messages desc"


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to put the log and the lake; it must not be there yet.")
    ] = Path("headwater-lake-demo"),
) -> None:
    """Show it: publish some traffic, make a lake of it, audit it, ask it, report on it."""
    needs_spark()
    if folder.exists():
        raise InvalidOption("this folder is there already", where=str(folder), next="Name another one, or remove it")
    folder.mkdir(parents=True)
    log, lake = str(folder / "events.db"), folder / "lake"
    note(f"publishing {ORDERS:,} messages into {log}")
    _publish_traffic(log)
    say(f"$ headwater pipeline run --log {log} --lake {lake}")
    run(log=log, lake=lake)
    say(f"\n$ headwater pipeline audit --log {log} --lake {lake}")
    audit(log=log, lake=lake)
    say(f"\n$ headwater pipeline sql {QUERY!r} --lake {lake}")
    sql(query=QUERY, lake=lake)
    say(f"\n$ headwater pipeline report --lake {lake}")
    report(lake=lake)


def _publish_traffic(path: str) -> None:
    dice = random.Random(17)
    shops = ["shop.north", "shop.south", "web"]
    kinds = [("orders.new", "order_placed"), ("orders.paid", "order_paid"), ("stock.low", "stock_low")]
    with headwater.open(path) as log:
        log.retain("stock.>", max_count=1_000)
        for first in range(0, ORDERS, 1_000):
            batch = []
            for number in range(first, first + 1_000):
                topic, kind = dice.choices(kinds, weights=(6, 5, 1))[0]
                options = {"type": kind, "version": 1, "from_": dice.choice(shops), "to": "billing"}
                batch.append((topic, {"order": number, "amount": round(dice.uniform(5, 500), 2)}, options))
            log.publish_many(batch)
        with log.subscribe("billing", "orders.>", max_attempts=1) as billing:
            for message in billing.fetch(1_000):
                if message.data["order"] % 97:
                    message.ack()
                else:
                    message.reject(f"card {message.data['order']} was declined")
        log.housekeep()
