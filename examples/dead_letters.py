"""A handler that fails: retries with backoff, then dead letters; a fixed handler gets them by a redrive.

python examples/dead_letters.py [directory]
"""

import logging
import sys
import threading
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
logging.getLogger("headwater").setLevel(logging.ERROR)  # failures are logged as warnings; they are expected here

given_up = threading.Event()
mended = threading.Event()

with headwater.open(directory / "dead_letters.db") as log:
    log.publish_many(
        [
            ("invoices.new", {"total": "12.50"}),
            ("invoices.new", {"total": "a lot"}),
            ("invoices.new", {"sum": 3}),
        ]
    )

    @log.on("invoices.*", id="bookkeeping", max_attempts=3, backoff=0)
    def book(message: headwater.ReceivedMessage) -> None:
        if "total" not in message.data:
            raise headwater.Reject("no total")  # a retry does not help
        print("attempt", message.attempt, "at message", message.seq)
        if message.attempt == 3:
            given_up.set()
        float(message.data["total"])  # an error is retried; when the handler returns, the message is acked

    log.start()
    given_up.wait(10)
    log.stop()  # waits until the handler has finished its current message

    for letter in log.dead_letters.list():
        print(f"dead: message {letter.message.seq}, {letter.reason} after {letter.attempts}: {letter.error}")

    @log.on("invoices.*", id="bookkeeping", max_attempts=3, backoff=0)
    def book_better(message: headwater.ReceivedMessage) -> None:
        print("booked with care:", message.data)
        mended.set()

    redriven = log.dead_letters.redrive(reason="max_attempts")
    print("redriven:", redriven.redriven)
    log.start()
    mended.wait(10)
    log.stop()
    print("still dead:", [letter.message.seq for letter in log.dead_letters.list()])
