"""Reading a log through one SQLite connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import apsw
import msgspec

from headwater.message import HEADERS_AT, NO_HEADERS, Message
from headwater.ports.records import (
    ERROR_LINE_CHARS,
    DeadLetter,
    DeadLetterQuery,
    DeliveryRow,
    Due,
    Order,
    Scan,
    Selection,
)
from headwater.stores.conditions import Condition, Wanted
from headwater.stores.sql import (
    MESSAGES,
    ORDER_BY,
    SCAN_SEQS_MAX,
    UNREADABLE,
    WHICH,
    AnswerT,
    Candidate,
    SqlReader,
    TopicTail,
    letter_of,
    letters_page,
    to_json,
)
from headwater.stores.sqlite.conditions import wanted_by
from headwater.stores.sqlite.connection import AMONG, SQL

SCAN_BYTES_MAX = 8 * 1024 * 1024  # of messages read at a time
ROW_BYTES = 1_024  # that a message may take besides its payload

_due = msgspec.json.Decoder(list[tuple[DeliveryRow, Message | None]])


def _due_sql(name: str) -> dict[tuple[Order, bool | None], str]:
    return {
        (order, suspects): SQL[name].replace("{which}", which).replace("{order}", "due_at, seq" if suspects else by)
        for order, by in ORDER_BY.items()
        for suspects, which in WHICH.items()
    }


_DUE, _DUE_SEQS = _due_sql("due"), _due_sql("due_seqs")
_NEXT_DUE = {suspects: SQL["next_due_ms"].replace("{which}", WHICH[suspects]) for suspects in (None, False)}


class SqliteReader(SqlReader):
    """`ports.store.Reader` over a connection that is inside a transaction."""

    _sql, _among, _wanted = SQL, AMONG, staticmethod(wanted_by)
    _error_line = f"substr(error || char(10), 1, min(instr(error || char(10), char(10)) - 1, {ERROR_LINE_CHARS}))"

    def __init__(self, connection: apsw.Connection, salt: int, topics: TopicTail | None = None) -> None:
        self._connection = connection
        self._salt = salt
        self._topics = topics or TopicTail()

    def last_seq(self) -> int:
        return int(self._value("last_seq"))

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        last = self.last_seq()
        end = min(last if upto is None else min(upto, last), after + SCAN_SEQS_MAX)
        if end <= after or limit < 1:
            return Scan([], after)
        if selection.takes_time:
            return self._sift(selection, after, end, limit)
        wanted = wanted_by(selection)
        try:
            found = self._scan(wanted.condition, after, end, limit, bytes_max)
        except apsw.TooBigError:
            if limit == 1:
                raise
            fewer = limit // (4 if bytes_max is None else 16)
            return self.scan(selection, after, max(1, fewer), upto, bytes_max)  # huge payloads: fewer at a time
        scanned_to = found[-1].seq if len(found) == limit else end
        return Scan(found if wanted.exact else [message for message in found if selection.keeps(message)], scanned_to)

    def _sift(self, selection: Selection, after: int, end: int, limit: int) -> Scan:
        seqs, stopped_at, _ = self._sifted(selection, after, end, limit)
        messages = self.messages(seqs)
        return Scan([messages[seq] for seq in seqs], end if stopped_at is None else stopped_at)

    def _tried(self, selection: Selection, ask: Callable[[Wanted], AnswerT]) -> AnswerT | None:
        try:
            return ask(wanted_by(selection))
        except apsw.SQLError:  # a payload put in by force that SQLite cannot read as JSON
            return None

    def _found_candidates(self, sql: str, bindings: Sequence[Any]) -> list[Candidate]:
        return [
            Candidate(seq, _text(topic) or "", _text(from_), _text(to), size, published_ms, bool(is_judged))
            for seq, topic, from_, to, size, published_ms, is_judged in self._connection.execute(sql, bindings)
        ]

    def _scan(self, condition: Condition, after: int, end: int, limit: int, bytes_max: int | None) -> list[Message]:
        bindings = (after, end, *condition.params, limit)
        # One row may be as long as SQLite allows; many are not read into one text of any length.
        usual = self._connection.limit(apsw.SQLITE_LIMIT_LENGTH)
        if limit > 1:
            wanted = SCAN_BYTES_MAX if bytes_max is None else 2 * bytes_max + limit * ROW_BYTES
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, min(wanted, SCAN_BYTES_MAX))
        try:
            text = self._connection.execute(
                SQL["scan"].replace("{condition}", condition.sql), (self._salt, *bindings)
            ).get
            return MESSAGES.decode(text) if text else []
        except UNREADABLE:
            sql = SQL["scan_seqs"].replace("{condition}", condition.sql)
            return self._one_by_one(self._seqs(sql, bindings))
        finally:
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, usual)

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        return self._read("messages", list(seqs))

    def heads(self, seqs: Iterable[int]) -> dict[int, Message]:
        return self._read("heads", list(seqs))

    def _read(self, name: str, seqs: list[int]) -> dict[int, Message]:
        try:
            text = self._value(name, self._salt, to_json(seqs))
            found = MESSAGES.decode(text) if text else []
        except (*UNREADABLE, apsw.TooBigError):
            found = self._one_by_one(seqs)
        return {message.seq: message for message in found}

    def _one_by_one(self, seqs: Iterable[int]) -> list[Message]:
        """Column by column, where some row inserted by hand is JSON to SQLite and not to us, or no text at all. Handed
        out as it is, it can fail and be dead-lettered; it must not block all others."""
        found: list[Message] = []
        for seq in seqs:
            row = self._row("columns", self._salt, seq)
            if row is not None:
                columns: list[Any] = list(row)
                columns[1] = columns[1].decode(errors="replace")
                columns[2] = msgspec.Raw(columns[2])
                headers = columns[HEADERS_AT]
                columns[HEADERS_AT] = NO_HEADERS if headers is None else msgspec.Raw(headers)
                found.append(Message(*columns))
        return found

    def due(
        self,
        subscription: str,
        now_ms: int,
        limit: int,
        order: Order,
        *,
        suspects: bool | None = None,
        bytes_max: int | None = None,
    ) -> list[Due]:
        usual = self._connection.limit(apsw.SQLITE_LIMIT_LENGTH)
        if limit > 1 and bytes_max is not None:
            wanted = 2 * bytes_max + limit * ROW_BYTES
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, min(wanted, SCAN_BYTES_MAX))
        try:
            text = self._connection.execute(_DUE[order, suspects], (self._salt, subscription, now_ms, limit)).get
            return [Due(row, message) for row, message in _due.decode(text)] if text else []
        except apsw.TooBigError:
            if limit == 1:
                raise
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, usual)
            fewer = max(1, limit // 16)
            return self.due(subscription, now_ms, fewer, order, suspects=suspects, bytes_max=bytes_max)
        except UNREADABLE:
            seqs = self._seqs(_DUE_SEQS[order, suspects], (subscription, now_ms, limit))
            rows, there = self.deliveries(subscription, seqs), self.messages(seqs)
            return [Due(rows[seq], there.get(seq)) for seq in seqs]
        finally:
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, usual)

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        found = self._connection.execute(_NEXT_DUE[None if suspects else False], (subscription,)).get
        return None if found is None else int(found)

    def dead_letters(self, query: DeadLetterQuery, after: int, limit: int) -> list[DeadLetter]:
        condition = self._letters(query)
        sql = condition.into(SQL["dead_letters"])
        with contextlib.closing(self._connection.execute(sql, (after, *condition.params))) as rows:
            return letters_page(map(letter_of, rows), query, limit)

    def _numbers(self, numbers: Iterable[int]) -> str:
        return to_json(list(numbers))

    def _seqs(self, sql: str, bindings: tuple[Any, ...]) -> list[int]:
        rows: list[Any] = self._connection.execute(sql, bindings).fetchall()
        return [row[0] for row in rows]

    def _rows(self, name: str, *bindings: Any) -> Iterable[tuple[Any, ...]]:
        return self._connection.execute(SQL[name], bindings)

    def _row(self, name: str, *bindings: Any) -> Any:
        return self._connection.execute(SQL[name], bindings).fetchone()

    def _value(self, name: str, *bindings: Any) -> Any:
        return self._connection.execute(SQL[name], bindings).get

    def _text(self, sql: str, bindings: Sequence[Any]) -> Any:
        return self._connection.execute(sql, bindings).get


def _text(text: bytes | None) -> str | None:
    return None if text is None else text.decode(errors="replace")
