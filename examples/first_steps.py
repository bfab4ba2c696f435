"""Publish, subscribe, ack, go away, come back: the subscription goes on where it stood.

python examples/first_steps.py [directory]
"""

import sys
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

with headwater.open(directory / "first_steps.db") as log:
    for number in range(1, 5):
        seq = log.publish("orders.new", {"order": number})
        print("published", seq)

    # The same id on a topic within the dedupe window is the same message: a retried publish stores nothing twice.
    print("paid", log.publish("orders.paid", {"order": 1}, id="payment-1"))
    print("paid again", log.publish("orders.paid", {"order": 1}, id="payment-1"))

    with log.subscribe("billing", "orders.>") as subscription:
        first, second = subscription.fetch(2)
        first.ack()
        print("acked", first.seq, "and left", second.seq, "open")

# Another process, another day. Nothing was lost: what was not acked comes again, and says that it has been here.
with headwater.open(directory / "first_steps.db") as log, log.subscribe("billing", "orders.>") as subscription:
    for message in subscription.messages():  # ends when there is nothing more; `for message in subscription` waits
        print(message.seq, message.topic, message.data, "attempt", message.attempt)
        message.ack()
    print("left to do:", subscription.info().lag)
