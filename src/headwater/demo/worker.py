"""A subscriber in a process of its own: `python -m headwater.demo.worker LOG [ORDER]`.

It handles orders one at a time and says so, a JSON line each. At the first attempt of ORDER it stops in the middle,
with the message neither acked nor failed, and waits there to be killed. It ends when nothing is left.
"""

from __future__ import annotations

import json
import signal
import sys
import time

import headwater
from headwater.errors import SubscriptionActiveError

SUBSCRIPTION = "billing"
LEASE_S = 1.0
ASK_AGAIN_S = 0.05


def main(path: str, stop_at: int | None) -> None:
    with headwater.open(path) as log, subscribe_when_free(log) as billing:
        for message in billing.messages():
            order = message.data["order"]
            say("handling", order=order, attempt=message.attempt)
            if order == stop_at and message.attempt == 1:
                signal.pause()
            message.ack()
            say("acked", order=order)


def subscribe_when_free(log: headwater.Log) -> headwater.Subscription:
    """An exclusive subscription has one holder. If that one was killed, its lease has to run out first."""
    refused = False
    while True:
        try:
            # One in flight: a killed worker then leaves just the one message in the middle.
            return log.subscribe(SUBSCRIPTION, "orders.>", lease=LEASE_S, max_in_flight=1)
        except SubscriptionActiveError as exc:
            if not refused:
                say("refused", why=exc.why)
            refused = True
            time.sleep(ASK_AGAIN_S)


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
