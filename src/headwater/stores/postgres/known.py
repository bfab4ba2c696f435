"""What a store knows of its subscriptions from its own last transactions, so that the next one need not ask.

A transaction goes on with it, and statements that travel with the others check it: `queue_checks` of the writer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.message import Message
from headwater.ports.records import DeliveryRow, Selection, SubscriptionRecord
from headwater.stores.postgres.connection import array_of

if TYPE_CHECKING:
    from headwater.stores.postgres.writer import PostgresWriter

KNOWN_MAX = 10_000  # subscriptions whose state is remembered
ROWS_MAX = 10_000  # of the deliveries of each: those that a user's transaction has acked are never seen to go
AHEAD_MAX = 100  # subscriptions that messages are read ahead for
AHEAD_CLAIMS = 7  # so many claims find their messages read
AHEAD_MESSAGES_MAX = 100
AHEAD_BYTES_MAX = 64 * 1024  # by the size of those read before


class ReadAhead(NamedTuple):
    """Messages behind those that a claim has taken: the next claim takes them from here. Also what else a claim asks
    for: nothing was due before `quiet_to_ms`, and no gaps were to be reported."""

    selection: Selection
    after: int
    messages: list[Message]
    mean_bytes: int
    quiet_to_ms: int = -1

    def next(self, selection: Selection, after: int, limit: int, bytes_max: int | None) -> list[Message]:
        """The first `limit` messages above a seq; [] if not so many are here."""
        if after < self.after or selection != self.selection:
            return []
        found = [message for message in self.messages if message.seq > after][:limit]
        fits = bytes_max is None or sum(message.size for message in found) <= bytes_max
        return found if fits and len(found) == limit else []

    def rest_after(self, seq: int) -> ReadAhead:
        return self._replace(after=seq, messages=[message for message in self.messages if message.seq > seq])

    def how_many_more(self, limit: int) -> int:
        """How many messages to read ahead: for whole claims of the same size, and not too much."""
        most = min(AHEAD_CLAIMS * limit, AHEAD_MESSAGES_MAX, AHEAD_BYTES_MAX // self.mean_bytes)
        return most - most % limit


class Assumed:
    """What a transaction takes for true of a subscription until a statement checks it that travels with the others."""

    __slots__ = ("due_ms", "messages", "rows")

    def __init__(self) -> None:
        self.due_ms = -1  # nothing is due up to then, and there are no gaps to report
        self.messages: set[int] = set()  # are still in the log
        self.rows: set[int] = set()  # are still there, and locked by no other transaction

    def values(self, id: str) -> tuple[Any, ...]:
        """The bindings of `as_assumed` in queries.sql."""
        messages, rows = array_of(self.messages), array_of(self.rows)
        quiet = (self.due_ms, id, self.due_ms, id)
        return (*quiet, len(self.messages), messages, len(self.rows), id, rows)


class KnownSubscriptions:
    """Subscriptions as the last transaction of this store has left them, and their versions. As long as no other host
    changes one, a transaction need not ask for it before it goes on; whether it is unchanged is checked by a statement
    that travels with the others. A version is the id of the transaction that wrote the row, and as good as the
    connection, or the server's process behind a pooler: a server that crashed gives ids out again. The rows of
    deliveries in flight are known as long as the subscription is unchanged: a host that claims them changes it."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[SubscriptionRecord, str]] = {}
        self._written: dict[str, str] = {}  # the versions that were written here
        self._rows: dict[str, dict[int, DeliveryRow]] = {}
        self._ahead: dict[str, ReadAhead] = {}

    def get(self, id: str) -> tuple[SubscriptionRecord, str] | None:
        return self._records.get(id)

    def seen(self, id: str, version: str) -> None:
        """A subscription was read. One that another host has written since is asked for again the next time."""
        if self._written.get(id) != version:
            self._written.pop(id, None)
            self._rows.pop(id, None)

    def rows(self, id: str) -> Mapping[int, DeliveryRow]:
        return self._rows.get(id, {})

    def take_ahead(self, id: str) -> ReadAhead | None:
        """Take what was read ahead, at most once: a transaction that fails reads again."""
        return self._ahead.pop(id, None)

    def committed(self, writer: PostgresWriter, xid: str) -> None:
        """Remember what a transaction wrote. The second one in a row that no other host comes between makes a
        subscription known. A transaction that excludes all others reads no versions, so what another host wrote before
        it would go unnoticed."""
        if writer.alone:
            self.forget({*writer.saved, *writer.rows_changed})
            return
        version = str(int(xid) & 0xFFFFFFFF)
        for id, record in writer.saved.items():
            if id in self._written:
                self._records[id] = record, version
            elif len(self._written) >= KNOWN_MAX:
                self.clear()
            self._written[id] = version
        for id, rows in writer.rows_changed.items():
            known = self._rows.setdefault(id, {})
            known.update((seq, row) for seq, row in rows.items() if row is not None)
            for seq, row in rows.items():
                if row is None:
                    known.pop(seq, None)
            if not known or len(known) > ROWS_MAX:
                del self._rows[id]
        for id, ahead in writer.read_ahead():
            self._ahead[id] = ahead
            if len(self._ahead) > AHEAD_MAX:
                del self._ahead[next(iter(self._ahead))]

    def forget_rows(self, id: str | None = None) -> None:
        if id is None:
            self._rows.clear()
        else:
            self._rows.pop(id, None)

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            for known in (self._records, self._written, self._rows, self._ahead):
                known.pop(id, None)

    def clear(self) -> None:
        for known in (self._records, self._written, self._rows, self._ahead):
            known.clear()
