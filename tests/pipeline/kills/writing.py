"""A process that publishes and prunes until it is told to stop: `python writing.py LOG STOP_FILE`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import headwater

BATCH = 50
KINDS = ("orders", "logs", "mails")


def main(path: str, stop: Path) -> None:
    with headwater.open(path, housekeeping=None) as log:
        log.retain("logs.>", max_count=2_000)
        log.retain("orders.>", max_count=4_000, keep_unacked=True)
        for turn in itertools.count():
            if stop.exists():
                return
            data = [{"turn": turn, "n": n, "pad": "x" * 100} for n in range(BATCH)]
            log.publish_many([(f"{KINDS[each['n'] % 3]}.k{each['n'] % 5}", each) for each in data])
            if turn % 20 == 19:
                log.housekeep()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
