"""A process that publishes and prunes until its stop file exists: `python log_writer.py LOG STOP_FILE`.

The log remembers ids for few messages, so it stores those that are published again: a few turns later, which may be in
the same slice of a run, and some runs later. One of them is an id that the log itself gave to a message.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import headwater

BATCH = 12
PACE_S = 0.05  # some 300 messages a second: a log that the last run and the audit of a long test still read soon
KINDS = ("orders", "logs", "mails")
DEDUPE_COUNT = 50
SOON, LATER = 5, 150
"""So many turns after its first use an id is published again: beyond what the log remembers, and after other runs."""


def main(path: str, stop: Path) -> None:
    pause = threading.Event()
    with headwater.open(path, maintenance_interval=None, dedupe_count=DEDUPE_COUNT) as log:
        log.retain("logs.>", max_count=500)
        log.retain("orders.>", max_count=1_000, keep_unacked=True)
        log.publish_many([("logs.first", {"n": n}) for n in range(1_000)])
        derived_ids: list[str] = []
        log.run_maintenance()  # half of them are gone before a run sees them
        for turn in itertools.count():
            if stop.exists():
                return
            messages = [(f"{KINDS[n % 3]}.k{n % 5}", {"n": n, "pad": "x" * 100}) for n in range(BATCH)]
            log.publish_many(messages)
            wrong = turn % 5 == 0
            log.publish("orders.new", {"n": "one" if wrong else turn}, type="order", version=1, from_="shop", to="post")
            for number in (turn, turn - SOON, turn - LATER):
                if number >= 0:
                    log.publish("mails.new", {"n": turn}, id=f"mail {number}")
            log.publish("mails.copy", {"n": turn}, id=f"mail {turn}")  # on another topic it is no repeat
            derived_ids.append(publish_without_id(log, turn))
            if turn >= SOON:
                log.publish("mails.derived", {"n": turn}, id=derived_ids[turn - SOON])
            log.publish("replica.eu.users", {"version": turn, "bytes": 10})
            if turn % 50 == 49:
                log.run_maintenance()
            pause.wait(PACE_S)


def publish_without_id(log: headwater.Log, turn: int) -> str:
    """The id that the log gives to the message."""
    with log.transaction() as transaction:
        seq = transaction.publish("mails.derived", {"n": turn})
        ((id,),) = transaction.execute("SELECT id FROM history WHERE seq = ?", (seq,))
    return str(id)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
