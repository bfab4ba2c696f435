"""A process that publishes and prunes until its stop file exists: `python log_writer.py LOG STOP_FILE`."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import headwater

BATCH = 12
PACE_S = 0.05  # some 300 messages a second: a log that the last run and the audit of a long test still read soon
KINDS = ("orders", "logs", "mails")


def main(path: str, stop: Path) -> None:
    pause = threading.Event()
    with headwater.open(path, maintenance_interval=None) as log:
        log.retain("logs.>", max_count=500)
        log.retain("orders.>", max_count=1_000, keep_unacked=True)
        log.publish_many([("logs.first", {"n": n}) for n in range(1_000)])
        log.run_maintenance()  # half of them are gone before a run sees them
        for turn in itertools.count():
            if stop.exists():
                return
            messages = [(f"{KINDS[n % 3]}.k{n % 5}", {"n": n, "pad": "x" * 100}) for n in range(BATCH)]
            log.publish_many(messages)
            wrong = turn % 5 == 0
            log.publish("orders.new", {"n": "one" if wrong else turn}, type="order", version=1, from_="shop", to="post")
            log.publish("mails.new", {"n": turn}, id=f"mail {turn}")
            log.publish("replica.eu.users", {"version": turn, "bytes": 10})
            if turn % 50 == 49:
                log.run_maintenance()
            pause.wait(PACE_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
