"""Filters: by topic, by sender and receiver, by content, by priority.

python examples/filters.py [directory]
"""

import sys
from pathlib import Path

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

with headwater.open(directory / "filters.db") as log:
    log.publish("orders.eu.new", {"amount": 20, "vip": False}, from_="shop-1", to="billing")
    log.publish("orders.us.new", {"amount": 900, "vip": True}, from_="shop-2", to="billing", priority=5)
    log.publish("orders.us.paid", {"amount": 900}, from_="billing", to="shipping", type="payment")
    log.publish("notices.maintenance", {"at": "noon"}, from_="admin")  # no receiver: a broadcast
    log.publish("orders.eu.new", {"amount": 350, "vip": False}, from_="shop-3", to="billing", priority=1)

    def show(title: str, id: str, pattern: str, **options: object) -> None:
        with log.subscribe(id, pattern, **options) as subscription:  # type: ignore[arg-type]
            print(f"{title}: {[message.seq for message in subscription.messages()]}")

    show("one token each", "new", "orders.*.new")
    show("all below", "orders", "orders.>")
    show("amqp spelling, wildcard inside", "ends-in-new", "#.new", dialect="amqp")
    show("by content", "big", "orders.>", where="data.amount >= 350 and not data.vip")
    show("by header", "payments", ">", where="type in ['payment', 'refund']")
    show("from any shop", "shops", ">", from_="/^shop-/")
    show("to billing, or to everybody", "billing", ">", to="billing", broadcast=True)
    show("urgent first", "urgent", ">", order="priority")
    show("from the third on", "late", ">", start=3)

    try:
        log.subscribe("broken", ">", where="data.amount => 350")
    except headwater.errors.InvalidWhereError as exc:
        print("refused:", exc.why)
