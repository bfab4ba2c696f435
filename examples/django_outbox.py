"""Django on SQLite: an order and its message are one transaction of Django; the consumer is another process.

python examples/django_outbox.py [directory]

The process of Django uses the `sqlite3` module, so it must not open the log itself. It publishes by plain SQL.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.db import IntegrityError, connection, models, transaction

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
path = directory / "django.db"

CREATE_LOG = "import headwater, sys; headwater.open(sys.argv[1], adopt=True).close()"
CONSUME = """
import headwater, sys

with headwater.open(sys.argv[1]) as log, log.subscribe("mailer", "orders.>") as orders:
    for message in orders.messages():  # a worker would use `@log.on(…)` and `log.run()`
        print("consumer:", message.topic, message.data)
        message.ack()
"""


def in_another_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, path], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")


# --- the project: settings.py, models.py ----------------------------------------------------------------------------

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": path,
            # IMMEDIATE: a transaction waits for its turn at its beginning, for up to `timeout` seconds.
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 10},
        }
    },
    USE_TZ=True,
)
django.setup()


class Order(models.Model):
    item = models.TextField()

    class Meta:
        app_label = "shop"


def publish(topic: str, data: Any) -> None:
    """Part of the transaction that is open: committed with it, or not at all."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO messages (topic, data) VALUES (%s, %s)", [topic, json.dumps(data)])


# --- once, beside `manage.py migrate`: Headwater's tables in the same database ---------------------------------------

with connection.schema_editor() as editor:
    editor.create_model(Order)
connection.close()
in_another_process(CREATE_LOG)

# --- a view ---------------------------------------------------------------------------------------------------------

with transaction.atomic():
    order = Order.objects.create(item="lamp")
    publish("orders.new", {"order": order.pk, "item": order.item})
print("committed:", Order.objects.count(), "order")

try:
    with transaction.atomic():
        order = Order.objects.create(item="chair")
        publish("orders.new", {"order": order.pk, "item": order.item})
        raise RuntimeError("the payment failed")
except RuntimeError as exc:
    print("rolled back:", exc)

try:
    with transaction.atomic():
        publish("orders..new", {})
except IntegrityError as exc:
    print("refused:", exc)

connection.close()
in_another_process(CONSUME)
in_another_process(CONSUME)  # nothing comes twice: the messages are acked
print("orders:", list(Order.objects.values_list("item", flat=True)))
