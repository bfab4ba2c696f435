"""A subscriber in a process of its own: `python -m headwater.demo.worker LOG [INVOICE]`.

It handles invoices one at a time and says so, a JSON line each. At the first attempt of INVOICE it stops in the middle,
with the message neither acked nor failed, and waits there to be killed. It ends when nothing is left.
"""

from __future__ import annotations

import json
import signal
import sys

import headwater
from headwater.errors import SubscriptionActiveError

SUBSCRIPTION = "printer"
LEASE_S = 1.0
FREE_S_MAX = 30.0


def main(path: str, stop_at: int | None) -> None:
    with headwater.open(path) as log, subscribe_when_free(log) as invoices:
        for message in invoices.messages():
            number = message.data["invoice"]
            say("handling", invoice=number, attempt=message.attempt)
            if number == stop_at and message.attempt == 1:
                signal.pause()
            message.ack()
            say("acked", invoice=number)


def subscribe_when_free(log: headwater.Log) -> headwater.Subscription:
    """An exclusive subscription has one holder. If that one was killed, its lease has to run out first."""
    for timeout in (0.0, FREE_S_MAX):
        try:
            # One in flight: a killed worker then leaves just the one message in the middle.
            return log.subscribe(SUBSCRIPTION, "invoices.new", lease=LEASE_S, max_in_flight=1, timeout=timeout)
        except SubscriptionActiveError as exc:
            say("refused", why=exc.why)
    sys.exit(1)


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
