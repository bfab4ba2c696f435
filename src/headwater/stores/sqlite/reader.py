"""Reading a log through one SQLite connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import apsw
import msgspec

from headwater.delivery.publishing import Receipt
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
    Times,
)
from headwater.stores.conditions import EVERYTHING, Condition, all_of, topic_condition
from headwater.stores.sql import (
    CANDIDATES,
    SCAN_SEQS_MAX,
    SMALL_BYTES_MAX,
    TIMES,
    Candidate,
    SqlReader,
    TopicTail,
    count_by_scanning,
    kept_times,
    letter_of,
    letters_page,
    times_by_scanning,
    to_json,
)
from headwater.stores.sqlite.conditions import entity_condition, where_condition
from headwater.stores.sqlite.connection import AMONG, SQL

SCAN_BYTES_MAX = 8 * 1024 * 1024  # of messages read at a time
ROW_BYTES = 1_024  # that a message may take besides its payload

_messages = msgspec.json.Decoder(list[Message])
_due = msgspec.json.Decoder(list[tuple[DeliveryRow, Message | None]])
_rows = msgspec.json.Decoder(list[DeliveryRow])

_ORDER_BY: dict[Order, str] = {"seq": "seq", "priority": "priority DESC, seq"}
_WHICH: dict[bool | None, str] = {None: "TRUE", True: "token > 0", False: "token = 0"}  # suspects, or not


def _due_sql(name: str) -> dict[tuple[Order, bool | None], str]:
    return {
        (order, suspects): SQL[name].replace("{which}", which).replace("{order}", "due_at, seq" if suspects else by)
        for order, by in _ORDER_BY.items()
        for suspects, which in _WHICH.items()
    }


_DUE, _DUE_SEQS = _due_sql("due"), _due_sql("due_seqs")
_NEXT_DUE = {suspects: SQL["next_due_ms"].replace("{which}", _WHICH[suspects]) for suspects in (None, False)}
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class SqliteReader(SqlReader):
    """`ports.store.Reader` over a connection that is inside a transaction."""

    _sql, _among = SQL, AMONG
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
        condition, exact = _condition_of(selection)
        try:
            found = self._scan(condition, after, end, limit, bytes_max)
        except apsw.TooBigError:
            if limit == 1:
                raise
            fewer = limit // (4 if bytes_max is None else 16)
            return self.scan(selection, after, max(1, fewer), upto, bytes_max)  # huge payloads: fewer at a time
        scanned_to = found[-1].seq if len(found) == limit else end
        return Scan(found if exact else [message for message in found if selection.keeps(message)], scanned_to)

    def _sift(self, selection: Selection, after: int, end: int, limit: int) -> Scan:
        seqs, stopped_at, _ = self._sifted(selection, after, end, limit)
        messages = self.messages(seqs)
        return Scan([messages[seq] for seq in seqs], end if stopped_at is None else stopped_at)

    def _candidates(self, selection: Selection, after: int, end: int, limit: int, direction: str) -> list[Candidate]:
        condition, is_small = _sieve_of(selection)
        try:
            return self._sieve(condition, is_small, direction, (after, end), limit)
        except (
            apsw.SQLError
        ):  # a payload put in by force that SQLite cannot read as JSON: leave it to Python, which can
            condition, _ = _sieve_of(Selection(selection.pattern, selection.entities))
            return self._sieve(condition, "FALSE", direction, (after, end), limit)

    def _sieve(
        self, condition: Condition, is_judged: str, direction: str, between: tuple[int, int], limit: int
    ) -> list[Candidate]:
        sql = SQL["candidates"].replace("{judged}", is_judged).replace("{direction}", direction)
        rows = self._connection.execute(condition.into(sql), (*between, *condition.params, limit))
        return [
            Candidate(seq, _text(topic) or "", _text(from_), _text(to), size, published_ms, bool(is_judged))
            for seq, topic, from_, to, size, published_ms, is_judged in rows
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
            return _messages.decode(text) if text else []
        except _UNREADABLE:
            sql = SQL["scan_seqs"].replace("{condition}", condition.sql)
            return self._one_by_one(self._seqs(sql, bindings))
        finally:
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, usual)

    def scan_times(self, selection: Selection, after: int, limit: int, upto: int) -> Times:
        end = min(upto, self.last_seq(), after + SCAN_SEQS_MAX)
        if end <= after or limit < 1:
            return Times([], after)
        condition, exact = _condition_of(selection)
        sql = SQL["scan_times" if exact else "scan_candidates"].replace("{condition}", condition.sql)
        try:
            text = self._connection.execute(sql, (after, end, *condition.params, limit)).get
            if exact:
                found = TIMES.decode(text)
                return Times(found, found[-1][0] if len(found) == limit else end)
            return kept_times(selection, CANDIDATES.decode(text), limit, end)
        except (*_UNREADABLE, apsw.SQLError):  # rows by hand, which `scan` knows how to read
            return times_by_scanning(self, selection, after, limit, end)

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        wanted = list(seqs)
        try:
            text = self._value("messages", self._salt, to_json(wanted))
            found = _messages.decode(text) if text else []
        except (*_UNREADABLE, apsw.TooBigError):
            found = self._one_by_one(wanted)
        return {message.seq: message for message in found}

    def heads(self, seqs: Iterable[int]) -> dict[int, Message]:
        wanted = list(seqs)
        try:
            found = _messages.decode(self._value("heads", self._salt, to_json(wanted)))
        except _UNREADABLE:
            found = self._one_by_one(wanted)
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

    def count(self, selection: Selection, after: int, upto: int) -> int:
        condition, exact = _condition_of(selection)
        if exact:
            sql = SQL["count"].replace("{condition}", condition.sql)
            # Where SQLite cannot read a payload as JSON, `scan` leaves `where` to Python.
            with contextlib.suppress(apsw.SQLError):
                return int(self._connection.execute(sql, (after, upto, *condition.params)).get)
        return count_by_scanning(self, selection, after, upto)

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
        except _UNREADABLE:
            seqs = self._seqs(_DUE_SEQS[order, suspects], (subscription, now_ms, limit))
            rows, there = self.deliveries(subscription, seqs), self.messages(seqs)
            return [Due(rows[seq], there.get(seq)) for seq in seqs]
        finally:
            self._connection.limit(apsw.SQLITE_LIMIT_LENGTH, usual)

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        found = self._connection.execute(_NEXT_DUE[None if suspects else False], (subscription,)).get
        return None if found is None else int(found)

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]:
        wanted = list(seqs)
        if not wanted:
            return {}
        text = self._value("deliveries", subscription, to_json(wanted))
        return {row.seq: row for row in _rows.decode(text)}

    def deliveries_by(self, subscription: str, token: int) -> list[DeliveryRow]:
        return list(_rows.decode(self._value("deliveries_by", subscription, token)))

    def dead_letters(self, query: DeadLetterQuery, after: int, limit: int) -> list[DeadLetter]:
        condition = self._letters(query)
        sql = condition.into(SQL["dead_letters"])
        with contextlib.closing(self._connection.execute(sql, (after, *condition.params))) as rows:
            return letters_page(map(letter_of, rows), query, limit)

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        found: list[Receipt] = []
        with contextlib.closing(self._connection.execute(SQL["receipts"], (publisher, first + count))) as rows:
            for number, length, seq in rows:
                if number + length > first:
                    found.append(Receipt(number, length, seq))
                if number <= first:  # receipts do not overlap: those further down end below
                    break
        return found[::-1]

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


@lru_cache(maxsize=4096)
def _condition_of(selection: Selection) -> tuple[Condition, bool]:
    topics, topics_exact = topic_condition(selection.pattern)
    entities, entities_exact = entity_condition(selection.entities)
    content = EVERYTHING if selection.where is None else where_condition(selection.where)
    return all_of(topics, entities, content), topics_exact and entities_exact


@lru_cache(maxsize=4096)
def _sieve_of(selection: Selection) -> tuple[Condition, str]:
    """The part of a slow selection that the database can check, and for which messages that is all of it."""
    topics, _ = topic_condition(selection.pattern)
    entities, _ = entity_condition(selection.entities)
    if selection.where is None:
        return all_of(topics, entities), "TRUE"
    content = where_condition(selection.where)
    is_small = f"octet_length(data) <= {SMALL_BYTES_MAX}"
    content = Condition(f"CASE WHEN {is_small} THEN {content.sql} ELSE TRUE END", content.params)
    return all_of(topics, entities, content), is_small


def _text(text: bytes | None) -> str | None:
    return None if text is None else text.decode(errors="replace")
