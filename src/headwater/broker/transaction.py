"""The user's own writes and a publish or an ack, committed together or not at all.

`OwnTransaction` has the writing connection to itself: no other publish or ack commits until it ends, so keep it short.

`ExternalTransactions` publish and ack inside a transaction that the user runs on a connection of its own to the log's
database (`tx=`). The log does not learn whether that commits, so nothing in memory may depend on it. An ack there
removes a row, and a delivery that has none yet gets one first; if the transaction is rolled back the row remains, and
the message is redelivered when its ack wait is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from headwater.broker.committer import TransactionHooks
from headwater.broker.consumer import Consumer, ephemeral_error
from headwater.broker.deliveries import Claimed, taken_over
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Call, Flow
from headwater.errors import ConflictError, InvalidOptionError, InvalidStateError
from headwater.message import PublishOptions, make_draft
from headwater.ports.store import ExternalTx, Writer
from headwater.topics import check_topic


class OwnTransaction:
    """Made by the thread or task that is to be inside. All methods block; `begin` waits for the writer's turn. `settle`
    is what happens to the message in hand at the end, in the subscription that it came by; it may refuse, and then
    nothing is committed."""

    def __init__(
        self,
        engine: Engine,
        subscription: str | None = None,
        settle: Callable[[Writer, TransactionHooks], object] | None = None,
    ) -> None:
        engine.refuse_closed()
        refuse_in_transaction(engine)
        self.engine = engine
        self._subscription = subscription
        self._settle = settle
        self._undo = TransactionHooks()
        self._context: AbstractContextManager[Writer] | None = None
        self._writer: Writer | None = None
        self._began_at = 0

    def begin(self) -> None:
        try:
            self._begin()
        except ConflictError:  # nothing has been run in it yet
            self._begin()

    def _begin(self) -> None:
        self._context = self.engine.store.write(self._undo.take_back, alone=False)
        self._writer = self._context.__enter__()
        try:
            if self._subscription is not None:  # before a publish: all writers lock in this order
                self._writer.subscription(self._subscription)
            self._began_at = self._writer.last_seq()
        except BaseException as exc:
            self.rollback(exc)  # or the writer's turn would never end
            raise

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return self._open_writer().execute(sql, bindings)

    def publish(self, topic: str, data: Any, options: PublishOptions) -> int:
        now_ms = self.engine.clock.now_ms()
        draft = make_draft(check_topic(topic), data, options, now_ms)
        appended = self._open_writer().append([draft], now_ms, self.engine.dedupe)
        return appended.seqs[0]

    def commit(self) -> None:
        try:
            writer = self._open_writer()
            if self._settle is not None:
                self._settle(writer, self._undo)
            ended_at = writer.last_seq()
            topics = set(writer.topics_between(self._began_at, ended_at))  # also of what the user's triggers put in
        except BaseException as exc:
            self.rollback(exc)
            raise
        self._leave(None)
        self._undo.after_commit()
        if topics:
            self.engine.wakeups.published(topics, self._began_at + 1, ended_at)

    def abandon(self, beginning: Future[None]) -> None:
        """End a transaction whose caller was cancelled while it began."""
        if not beginning.cancelled() and beginning.exception() is None:
            self.rollback(GeneratorExit())

    def rollback(self, exc: BaseException) -> None:
        try:
            self._leave(exc)
        except BaseException as raised:
            if raised is not exc:
                raise

    def _leave(self, exc: BaseException | None) -> None:
        context, self._context, self._writer = self._context, None, None
        if context is not None:
            context.__exit__(None if exc is None else type(exc), exc, None if exc is None else exc.__traceback__)

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise InvalidStateError("the transaction is over", next="Use it inside its `with` block")
        return self._writer


class ExternalTransactions:
    """What `tx=` does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def publish(self, tx: Any, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
        engine, store = self._engine, self._store()
        engine.check_usable()
        now_ms = engine.clock.now_ms()
        if options.get("published_at") is not None:
            raise InvalidOptionError(
                "published_at and tx exclude each other", where=topic, next="Publish messages of the past without tx"
            )
        draft = make_draft(check_topic(topic), data, options, now_ms)
        seq: int = yield _call(partial(store.publish, tx, draft, now_ms, engine.dedupe))
        return seq

    def ack(self, tx: Any, consumer: Consumer, claimed: Claimed) -> Flow[None]:
        store = self._store()
        if not isinstance(consumer, DurableConsumer):
            raise ephemeral_error(consumer, "has nothing to ack")
        if not (yield _call(partial(store.may_ack, tx))):
            raise InvalidStateError(
                "this transaction has published already, and others wait for its end",
                where=consumer.id,
                next="Ack first and publish last",
            )
        yield from consumer.persist_delivery(claimed)
        seq, attempt, token = claimed.message.seq, claimed.attempt, claimed.token
        if not (yield _call(partial(store.ack, tx, consumer.id, seq, attempt, token))):
            raise taken_over(consumer.id)

    def _store(self) -> ExternalTx:
        if self._engine.store.external_tx is None:
            raise InvalidStateError(
                "tx= needs a log in PostgreSQL",
                where=self._engine.store.name,
                next="Use `with log.transaction() as tx` or `with message.transaction() as tx`",
            )
        return self._engine.store.external_tx


def _call(verb: Callable[[], Any]) -> Call:
    return Call(lambda _: verb(), None)
