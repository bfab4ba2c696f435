"""Your tables and the log in one database: a write and its message, or a write and its ack, commit together.

python examples/own_tables.py [directory]
"""

import sys
from pathlib import Path

import apsw  # not the sqlite3 module: a second SQLite library in this process would drop the locks of the first

import headwater

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
path = directory / "shop.db"

shop = apsw.Connection(str(path))
shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
shop.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, sold INTEGER CHECK (sold <= 2))")
shop.execute("INSERT INTO stock VALUES ('lamp', 0)")

with headwater.open(path, adopt=True) as log:  # adopt: this database already has other tables
    # Publishing: the order and its message are one transaction, in plain SQL. No outbox is needed.
    with shop:
        shop.execute("INSERT INTO orders VALUES (1, 'lamp')")
        shop.execute("INSERT INTO messages (topic, data) VALUES ('orders.new', json_object('item', 'lamp'))")

    # Consuming: the update and the ack are one transaction, so a crash between the two cannot count a message twice.
    with log.subscribe("stock", "orders.new", backoff=0) as subscription:
        for message in subscription.messages():
            with message.transaction() as tx:
                tx.execute("UPDATE stock SET sold = sold + 1 WHERE item = ?", (message.data["item"],))
                tx.publish("stock.changed", {"item": message.data["item"]})
            print("sold:", shop.execute("SELECT sold FROM stock").get)

        # If the block raises, it is rolled back: no update, no message, no ack.
        log.publish("orders.new", {"item": "lamp"})
        [message] = subscription.fetch(1)
        try:
            with message.transaction() as tx:
                tx.publish("stock.changed", {"item": "lamp"})
                tx.execute("UPDATE stock SET sold = sold + 2 WHERE item = 'lamp'")  # violates the CHECK
        except headwater.errors.SqlError as exc:
            print("refused:", exc.why)
        print("sold:", shop.execute("SELECT sold FROM stock").get)
        message.nack(0)
        [again] = subscription.fetch(1)
        print("comes again: message", again.seq, "attempt", again.attempt)

    with log.subscribe("display", "stock.changed", mode="ephemeral", start="first") as subscription:
        print("stock.changed:", [message.data for message in subscription.messages()])
shop.close()
