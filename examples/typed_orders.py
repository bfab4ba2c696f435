"""Messages as classes: validated fields, versions, a request and its reply.

python examples/typed_orders.py [directory]
"""

import sys
import tempfile
import threading
from decimal import Decimal
from pathlib import Path

import headwater
from headwater.errors import InvalidMessageError

temporary = tempfile.TemporaryDirectory()  # removed at the end
directory = Path(sys.argv[1] if len(sys.argv) > 1 else temporary.name)


class OrderPlaced(headwater.Event, topic="orders.{region}.placed", version=2, from_="shop"):
    region: str
    order_id: str
    amount: Decimal


@OrderPlaced.upgrade(from_version=1)  # version 1 had cents and only one region
def with_region(fields: dict) -> dict:
    return {"region": "eu", "order_id": fields["order_id"], "amount": Decimal(fields["cents"]) / 100}


class PriceAsked(headwater.Event, topic="prices.asked"):
    sku: str


class PriceQuoted(headwater.Event):
    price: Decimal


last = threading.Event()

with headwater.open(directory / "typed_orders.db") as log:

    @OrderPlaced.on(log, id="billing")
    def bill(order: OrderPlaced, message: headwater.ReceivedMessage) -> None:
        print(f"{message.seq}: {order.amount} for {order.order_id}, {order.region}")
        if order.order_id == "o-4":
            last.set()

    @PriceAsked.on(log, id="pricer")
    def price(question: PriceAsked) -> PriceQuoted:
        return PriceQuoted(price=Decimal("1.10") * len(question.sku))

    OrderPlaced(region="us", order_id="o-1", amount="9.90").publish(log, to="billing")
    log.publish("orders.eu.placed", {"order_id": "o-2", "cents": 250}, type="OrderPlaced", version=1)
    log.publish("orders.eu.placed", {"order_id": "o-3"}, type="OrderPlaced", version=3)
    OrderPlaced(region="us", order_id="o-4", amount=1).publish(log)

    try:
        OrderPlaced.model_construct(region="us", order_id="o-5", amount="much").publish(log)
    except InvalidMessageError as exc:
        print("refused:", exc.where, exc.why)

    log.start()
    last.wait(10)
    print("a price:", PriceAsked(sku="ab").request(log, reply=PriceQuoted).price)
    log.stop()

    for letter in log.dead_letters.list():
        print("dead:", letter.error.partition(". ")[0])
