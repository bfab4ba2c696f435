"""A publish and an ack inside a transaction that the user runs on a connection of its own to the log's database.

Whether that transaction is committed is the user's business, and nobody tells us: so nothing in memory may depend on
it. An ack there removes a row, and a delivery that has none yet gets one first; if the transaction is rolled back the
row is still there, and the message comes again when its ack wait is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headwater.broker.claims import Claimed, taken_over
from headwater.broker.consumer import Consumer
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Call, Flow
from headwater.broker.subscriber import Subscriber
from headwater.errors import InvalidOption
from headwater.message import PublishOptions, make_draft
from headwater.ports.store import Outside
from headwater.topics import check_topic


class OutsideTransactions:
    """What `tx=` does. The verbs are flows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def publish(self, tx: Any, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
        engine, outside = self._engine, self._store_side()
        refuse_in_transaction(engine)
        engine.refuse_closed()
        now_ms = engine.clock.now_ms()
        draft = make_draft(check_topic(topic), data, options, now_ms)
        seq: int = yield _call(partial(outside.publish, tx, draft, now_ms, engine.dedupe))
        return seq

    def ack(self, tx: Any, consumer: Consumer, claimed: Claimed) -> Flow[None]:
        outside = self._store_side()
        if not isinstance(consumer, Subscriber):
            raise InvalidOption(
                "an ephemeral subscription has nothing to ack", where=consumer.id, next="Use mode exclusive or shared"
            )
        if not (yield _call(partial(outside.may_ack, tx))):
            raise InvalidOption(
                "this transaction has published already, and others wait for its end",
                where=consumer.id,
                next="Ack first and publish last",
            )
        yield from consumer.lay_down(claimed)
        seq, attempt, token = claimed.message.seq, claimed.attempt, claimed.token
        if not (yield _call(partial(outside.ack, tx, consumer.id, seq, attempt, token))):
            raise taken_over(consumer.id)

    def _store_side(self) -> Outside:
        if self._engine.store.outside is None:
            raise InvalidOption(
                "tx= needs a log in PostgreSQL",
                where=self._engine.store.name,
                next="Use `with log.transaction() as tx` or `with message.transaction() as tx`",
            )
        return self._engine.store.outside


def _call(verb: Callable[[], Any]) -> Call:
    return Call(lambda _: verb(), None)
