"""A work queue: several workers share one subscription, and each message goes to one of them.

python examples/work_queue.py [directory]
"""

import sys
import threading
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
JOBS = 200

done: list[int] = []
all_done = threading.Event()

with headwater.open(directory / "work_queue.db") as log:
    log.publish_many([("images.resize", {"image": number}) for number in range(JOBS)])

    # Four threads here; other processes on this machine join with the same id and mode.
    @log.on("images.resize", id="resizers", mode="shared", concurrency=4)
    def resize(message: headwater.ReceivedMessage) -> None:
        done.append(message.data["image"])
        if len(done) == JOBS:
            all_done.set()

    log.start()
    all_done.wait(10)
    log.stop()
    print("jobs done:", len(done), "and none of them twice:", len(set(done)) == JOBS)

    # The same without handlers: two consumers of a shared subscription never have the same message at the same time.
    log.publish_many([("images.resize", {"image": number}) for number in range(4)])
    with (
        log.subscribe("resizers", "images.resize", mode="shared") as one,
        log.subscribe("resizers", "images.resize", mode="shared") as other,
    ):
        mine, others = one.fetch(2), other.fetch(2)
        print("one has", [message.seq for message in mine], "and the other", [message.seq for message in others])
        one.ack_many(mine)
        others[0].ack()
        others[1].nack(0)  # redeliver at once, to the first consumer that fetches
        [again] = one.fetch(1)
        print("one got", again.seq, "after the other gave it back; attempt", again.attempt)
        again.ack()

    info = log.subscription("resizers")
    print("acked:", info.acked, "open:", info.lag)
