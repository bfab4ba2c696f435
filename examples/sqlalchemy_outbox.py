"""SQLAlchemy on SQLite: an order and its message are one transaction of the session; the consumer is another process.

python examples/sqlalchemy_outbox.py [directory]

The process of SQLAlchemy uses the `sqlite3` module, so it must not open the log itself. It publishes by an INSERT.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Column, Integer, MetaData, Table, Text, create_engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
path = directory / "sqlalchemy.db"

CREATE_LOG = "import headwater, sys; headwater.open(sys.argv[1], adopt=True).close()"
CONSUME = """
import headwater, sys

with headwater.open(sys.argv[1]) as log, log.subscribe("mailer", "orders.>") as orders:
    for message in orders.messages():  # a worker would use `@log.on(…)` and `log.run()`
        print("consumer:", message.topic, message.data, message.type)
        message.ack()
"""


def in_another_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, path], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


# Headwater's table, with the columns that are used here; in a MetaData of its own, so that `create_all` and Alembic
# leave it alone.
messages = Table(
    "messages",
    MetaData(),
    Column("seq", Integer, primary_key=True),
    Column("topic", Text),
    Column("data", JSON),
    Column("type", Text),
)


def publish(session: Session, topic: str, data: Any, *, type: str | None = None) -> int:
    """Part of the session's transaction: committed with it, or not at all. Returns the seq."""
    inserted = session.execute(insert(messages).values(topic=topic, data=data, type=type))
    return int(inserted.inserted_primary_key[0])


engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 10})
Base.metadata.create_all(engine)
engine.dispose()
in_another_process(CREATE_LOG)  # once, beside the migrations: Headwater's tables in the same database

with Session(engine) as session, session.begin():
    order = Order(item="lamp")
    session.add(order)
    session.flush()
    print("seq:", publish(session, "orders.new", {"order": order.id, "item": order.item}, type="order"))

try:
    with Session(engine) as session, session.begin():
        publish(session, "orders.new", {"order": 2, "item": "chair"})
        raise RuntimeError("the payment failed")
except RuntimeError as exc:
    print("rolled back:", exc)

engine.dispose()
in_another_process(CONSUME)
in_another_process(CONSUME)  # nothing comes twice: the messages are acked
