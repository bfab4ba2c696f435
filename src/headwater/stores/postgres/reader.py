"""Reading a log through one PostgreSQL connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import msgspec
import psycopg
from psycopg import errors

from headwater.delivery.retention import Kept
from headwater.message import HEADERS_AT, NO_HEADERS, Message
from headwater.ports.records import (
    ERROR_LINE_CHARS,
    DeadLetter,
    DeadLetterQuery,
    Due,
    Order,
    Scan,
    Selection,
)
from headwater.ports.store import LETTERS_BYTES_MAX, SEQ_MAX, Interruption
from headwater.stores.conditions import EVERYTHING, Condition, Wanted, topic_condition
from headwater.stores.postgres.conditions import reads_json, wanted_by
from headwater.stores.postgres.connection import AMONG, SQL, array_of
from headwater.stores.postgres.pipelined import PipelinedConnection, Statement
from headwater.stores.sql import (
    DELIVERIES,
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
)
from headwater.topics import Pattern

TEXT_MESSAGES_MAX = 500  # how many messages travel as one text, which may have 1 GB
UNKNOWN_MESSAGES_MAX = 32  # how many are read before it is known how large they are, where that matters
LETTERS_AT_ONCE = 100  # the most dead letters whose sizes are looked at to find out how many make a page

LOOK_AHEAD = SQL["look_ahead"].replace("{which}", WHICH[None])
_NOT_FOR_SQL = (psycopg.DataError, errors.StatementTooComplex, errors.ProgramLimitExceeded)


class PostgresReader(SqlReader):
    """`ports.store.Reader` over a connection that is inside a transaction."""

    _sql: ClassVar = {name: sql.replace("{locked}", "") for name, sql in SQL.items()}
    _among, _wanted = AMONG, staticmethod(wanted_by)
    _error_line = f"left(split_part(error, E'\\n', 1), {ERROR_LINE_CHARS})"

    def __init__(
        self,
        connection: PipelinedConnection,
        salt: int,
        topics: TopicTail | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.connection = connection
        self._interruption = interruption
        self._salt = str(salt)
        self._topics = topics or TopicTail()
        self._seen_last: int | None = None  # found by a scan

    def last_seq(self) -> int:
        return int(self._value("last_seq")) if self._seen_last is None else self._seen_last

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        end = after + SCAN_SEQS_MAX if upto is None else min(upto, after + SCAN_SEQS_MAX)
        if end <= after or limit < 1:
            return Scan([], after)
        wanted = wanted_by(selection)
        if selection.takes_time:
            return self._sift(selection, wanted, after, end, limit, upto)
        found, last, is_full = self._scan(wanted.condition, after, end, limit, bytes_max)
        self._seen_last = last
        if is_full:
            scanned_to = found[-1].seq
        else:
            scanned_to = max(after, min(end, last))
            if not found and scanned_to < last:
                scanned_to = self._quiet_to(wanted, after, scanned_to, last if upto is None else end)
        return Scan(found if wanted.exact else [message for message in found if selection.keeps(message)], scanned_to)

    def _sift(self, selection: Selection, wanted: Wanted, after: int, end: int, limit: int, upto: int | None) -> Scan:
        last = self.last_seq()  # what is there by now is seen by the next statement, too
        self._seen_last, end = last, max(after, min(end, last))
        seqs, stopped_at, is_empty = self._sifted(selection, after, end, limit)
        if stopped_at is None:
            stopped_at = end
            if is_empty and stopped_at < last:
                stopped_at = self._quiet_to(wanted, after, stopped_at, last if upto is None else end)
        messages = self.messages(seqs)
        return Scan([messages[seq] for seq in seqs if seq in messages], stopped_at)

    def _found_candidates(self, sql: str, bindings: Sequence[Any]) -> list[Candidate]:
        return [Candidate(*row) for row in self._execute(sql, bindings).rows()]

    def _quiet_to(self, wanted: Wanted, after: int, scanned_to: int, most: int) -> int:
        """Far behind, and nothing here: perhaps nothing for long."""
        return max(scanned_to, min(self._quiet_upto(wanted.topics, after), most))

    def _quiet_upto(self, topics: Condition, after: int) -> int:
        """Up to where it is known from the counts of topics that there is nothing above `after` with such a topic."""
        if topics == EVERYTHING:
            return after
        found = self._execute(topics.into(SQL["quiet_upto"]), (after, *topics.params)).value()
        return after if found is None else max(after, int(found))

    def _tried(self, selection: Selection, ask: Callable[[Wanted], AnswerT]) -> AnswerT | None:
        """A payload that holds a NUL, or half a surrogate pair, is none that PostgreSQL can read."""
        try:
            with self._savepoint() if reads_json(selection.where) else nullcontext():
                return ask(wanted_by(selection))
        except _NOT_FOR_SQL:
            if not reads_json(selection.where):
                raise
            return None

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        """Take back what fails inside, so that the transaction stays usable."""
        self.connection.queue("SAVEPOINT headwater")
        try:
            yield
        except BaseException:
            if not self.connection.closed:
                self.connection.execute("ROLLBACK TO SAVEPOINT headwater; RELEASE SAVEPOINT headwater", prepare=False)
            raise
        self.connection.queue("RELEASE SAVEPOINT headwater")

    def _scan(
        self, condition: Condition, after: int, end: int, limit: int, bytes_max: int | None
    ) -> tuple[list[Message], int, bool]:
        """Returns the messages, the last seq at the time of the first query (later messages were not searched), and
        whether more may follow."""
        asked = min(limit, TEXT_MESSAGES_MAX if bytes_max is None else UNKNOWN_MESSAGES_MAX)
        found, last = self._page(condition, after, end, asked)
        page = found
        while len(page) == asked and len(found) < limit:
            asked = min(limit - len(found), TEXT_MESSAGES_MAX, _fitting(found, bytes_max))
            if asked < 1:
                return found, last, True
            page, _ = self._page(condition, page[-1].seq, min(end, last), asked)
            found = found + page
        return found, last, len(found) == limit

    def _page(self, condition: Condition, after: int, end: int, limit: int) -> tuple[list[Message], int]:
        bindings = (self._salt, self._salt, after, end, *condition.params, limit)
        messages, last = self._decoded(condition.into(SQL["scan"]), bindings)
        if messages is None:
            bindings = (after, min(end, last), *condition.params, limit)
            rows = self._execute(condition.into(SQL["scan_seqs"]), bindings).rows()
            messages = self._one_by_one(seq for (seq,) in rows)
        return messages, last

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        wanted = list(seqs)
        found: dict[int, Message] = {}
        for start in range(0, len(wanted), TEXT_MESSAGES_MAX):
            part = wanted[start : start + TEXT_MESSAGES_MAX]
            messages, _ = self._decoded(SQL["messages"], (self._salt, self._salt, array_of(part)))
            if messages is None:
                messages = self._one_by_one(part)
            found.update((message.seq, message) for message in messages)
        return found

    def heads(self, seqs: Iterable[int]) -> dict[int, Message]:
        text = self._execute(SQL["heads"], (self._salt, array_of(list(seqs)))).text()
        return {message.seq: message for message in MESSAGES.decode(text or b"[]")}

    def _decoded(self, sql: str, bindings: tuple[Any, ...]) -> tuple[list[Message] | None, int]:
        """Messages that come as one text with their number, and the last seq; None if they must be read one by one."""
        statement = self._execute(sql, bindings)
        text, count, last = statement.text(), int(statement.text(1) or 0), int(statement.text(2) or 0)
        try:
            messages = MESSAGES.decode(text) if text else []
        except UNREADABLE:
            return None, last
        return (messages if len(messages) == count else None), last

    def _one_by_one(self, seqs: Iterable[int]) -> list[Message]:
        """Column by column, where some row inserted by hand is huge, or JSON to PostgreSQL and not to us. Handed out as
        it is, it can fail and be dead-lettered; it must not block all others."""
        found: list[Message] = []
        for seq in seqs:
            row = self._row("columns", seq)
            if row is not None:
                columns: list[Any] = list(row)
                columns[2] = msgspec.Raw(columns[2].encode())
                columns[5] = int(self._salt) if columns[5] is None else columns[5]
                headers = columns[HEADERS_AT]
                columns[HEADERS_AT] = NO_HEADERS if headers is None else msgspec.Raw(headers.encode())
                found.append(Message(*columns))
        return found

    def oldest(self, pattern: Pattern, after: int, limit: int, upto: int = SEQ_MAX) -> list[Kept]:
        topics, _ = topic_condition(pattern)
        return super().oldest(pattern, self._quiet_upto(topics, after), limit, upto)

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
        columns = "due_at, seq" if suspects else ORDER_BY[order]
        sql = self._sql["due"].replace("{which}", WHICH[suspects]).replace("{order}", columns)
        text = self._execute(sql, (subscription, now_ms, limit)).text()
        if not text:
            return []
        rows = DELIVERIES.decode(text)
        asked = len(rows) if bytes_max is None else UNKNOWN_MESSAGES_MAX
        due: list[Due] = []
        while asked and (part := rows[len(due) : len(due) + asked]):
            there = self.messages([row.seq for row in part])
            due += [Due(row, there.get(row.seq)) for row in part]
            asked = _fitting([message for _, message in due if message is not None], bytes_max)
        return due

    def is_announced(self, number: int) -> bool:
        return bool(self._value("is_announced", number))

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        sql = SQL["next_due_ms"].replace("{which}", WHICH[None if suspects else False])
        found: int | None = self._execute(sql, (subscription,)).value()
        return found

    def dead_letters(self, query: DeadLetterQuery, after: int, limit: int) -> list[DeadLetter]:
        return letters_page(self._all_letters(self._letters(query), after), query, limit)

    def _all_letters(self, condition: Condition, after: int) -> Iterator[DeadLetter]:
        sql = condition.into(SQL["dead_letters"])
        while page := self._execute(sql, (after, *condition.params, LETTERS_AT_ONCE, LETTERS_BYTES_MAX)).rows():
            yield from map(letter_of, page)
            after = page[-1][0]

    def _execute(self, sql: str, bindings: Sequence[Any] = ()) -> Statement:
        if self._interruption is not None:  # between two statements there is nothing that could be cancelled
            self._interruption.check()
        return self.connection.ask(sql, bindings)

    def _rows(self, name: str, *bindings: Any) -> Iterable[tuple[Any, ...]]:
        return self._execute(SQL[name], bindings).rows()

    def _row(self, name: str, *bindings: Any) -> Any:
        return self._execute(SQL[name], bindings).row()

    def _value(self, name: str, *bindings: Any) -> Any:
        return self._execute(SQL[name], bindings).value()

    def _text(self, sql: str, bindings: Sequence[Any]) -> Any:
        return self._execute(sql, bindings).text()

    def _numbers(self, numbers: Iterable[int]) -> str:
        return array_of(numbers)


def _fitting(found: Sequence[Message], bytes_max: int | None) -> int:
    """How many more messages of this size there is room for."""
    if bytes_max is None:
        return TEXT_MESSAGES_MAX
    total = sum(message.size for message in found)
    return 0 if total >= bytes_max else (bytes_max - total) * len(found) // max(1, total)
