"""The user's own writes and a publish or an ack, committed together or not at all.

The transaction has the writing connection to itself: nobody else's publish or ack commits until it ends, so keep it
short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Unpack

from headwater.broker.committer import Undo
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.errors import InvalidOption
from headwater.message import PublishOptions, make_draft
from headwater.ports.store import Writer
from headwater.topics import check_topic


class OwnTransaction:
    """Made by the thread or task that is to be inside. All methods block; `begin` waits for the writer's turn. `settle`
    is what happens to the message in hand at the end, in the subscription that it came by; it may refuse, and then
    nothing is committed."""

    def __init__(
        self, engine: Engine, subscription: str | None = None, settle: Callable[[Writer, Undo], None] | None = None
    ) -> None:
        refuse_in_transaction(engine)
        self.engine = engine
        self._subscription = subscription
        self._settle = settle
        self._undo = Undo()
        self._context: AbstractContextManager[Writer] | None = None
        self._writer: Writer | None = None
        self._began_at = 0

    def begin(self) -> None:
        if not self.engine.store.supports_sql:
            raise InvalidOption(
                "this log keeps no tables of yours", where=self.engine.store.name, next="Open a file instead"
            )
        self._context = self.engine.store.write(self._undo.take_back, alone=False)
        self._writer = self._context.__enter__()
        try:
            if self._subscription is not None:  # before anything is published: everybody locks in this order
                self._writer.subscription(self._subscription)
            self._began_at = self._writer.last_seq()
        except BaseException as exc:
            self.rollback(exc)  # nobody else will; the writer's turn would never end
            raise

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return self._open_writer().execute(sql, bindings)

    def publish(self, topic: str, data: Any, **options: Unpack[PublishOptions]) -> int:
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
        for step in self._undo.then:
            step()
        if topics:
            self.engine.wakeups.published(topics, self._began_at + 1, ended_at)

    def abandon(self, beginning: Future[None]) -> None:
        """End what was begun and nobody is there to end."""
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
            raise InvalidOption("the transaction is over", next="Use it inside its `with` block")
        return self._writer
