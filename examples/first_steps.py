"""Publish, subscribe, ack, close, open again: the subscription continues at its position.

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

    # The same id on a topic within the dedupe window is the same message: a repeated publish is stored once.
    print("paid", log.publish("orders.paid", {"order": 1}, id="payment-1"))
    print("paid again", log.publish("orders.paid", {"order": 1}, id="payment-1"))

    with log.subscribe("billing", "orders.>") as subscription:
        first, second = subscription.fetch(2)
        first.ack()
        print("acked", first.seq, "and left", second.seq, "open")

# Another process, later. Nothing was lost: the unacked message is redelivered, with a higher attempt number.
with headwater.open(directory / "first_steps.db") as log, log.subscribe("billing", "orders.>") as subscription:
    for message in subscription.messages():  # ends when none is left; `for message in subscription` waits for more
        print(message.seq, message.topic, message.data, "attempt", message.attempt)
        message.ack()
    print("left to do:", subscription.info().lag)
