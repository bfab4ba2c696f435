"""Looking at a log before it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import InvalidOption
from headwater.pipeline.source.options import SourceOptions
from headwater.pipeline.source.place import Condition, Identity, Look, Param, Range, log_at
from headwater.ports.store import Reader
from headwater.topics import Pattern

COUNTED_SEQS = 200_000  # how much of the log is looked through in one transaction
RUNS_TOLD_MAX = 5


@contextmanager
def looking(path: str) -> Iterator[Look]:
    """The log at one moment: read-only, and without ever making it or changing its schema."""
    with log_at(path).looking() as look:
        yield look


@contextmanager
def reading(path: str) -> Iterator[Reader]:
    with looking(path) as look:
        yield look.reader


def log_identity(path: str) -> Identity:
    return log_at(path).identity()


def log_name(path: str) -> str:
    """What may be shown and kept: without a password."""
    return log_at(path).name


def starting_after(reader: Reader, options: SourceOptions) -> int:
    """The seq after which the first wanted message comes."""
    if options.starting_ms is not None:
        return reader.seq_before(options.starting_ms)
    if options.starting_seq == "earliest":
        return 0
    if options.starting_seq == "latest":
        return reader.last_seq()
    after = max(0, options.starting_seq - 1)
    if options.fail_on_data_loss:
        refuse_pruned(reader, Range(after, reader.last_seq()), log_name(options.path))
    return after


def refuse_pruned(reader: Reader, asked: Range, where: str) -> None:
    """An error if retention deleted anything of what is asked for."""
    runs = reader.pruned(asked.after + 1, asked.upto)
    if runs:
        raise InvalidOption(
            f"retention has deleted {sum(last - first + 1 for first, last in runs)} messages from {asked.after + 1} "
            f"on: {told(runs)}",
            where=where,
            next="Start at what is there with startingSeq=earliest, or read on without them with failOnDataLoss=false",
        )


def told(runs: list[tuple[int, int]]) -> str:
    """The first of the runs in words."""
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:RUNS_TOLD_MAX]]
    return ", ".join(words) + (f" and {len(runs) - RUNS_TOLD_MAX} more runs" if len(runs) > RUNS_TOLD_MAX else "")


def stored_range(look: Look, asked: Range) -> Range:
    """The part of a range in which there are messages."""
    sql = "SELECT (SELECT min(seq) FROM messages WHERE seq > ?), (SELECT max(seq) FROM messages WHERE seq <= ?)"
    ((first, last),) = look.query(sql, asked)
    if first is None or last is None or first > last:
        return Range(asked.after, asked.after)
    return Range(first - 1, last)


def seq_after(look: Look, after: int) -> int | None:
    """The seq of the first message above `after`."""
    ((found,),) = look.query("SELECT min(seq) FROM messages WHERE seq > ?", (after,))
    return None if found is None else int(found)


def seq_of_nth(path: str, asked: Range, condition: Condition, n: int) -> int | None:
    """The seq of the n-th message of a range that fits; None if there are fewer."""
    after = asked.after
    if asked.upto - after < n:
        return None
    while after < asked.upto:
        part = Range(after, min(after + max(n, COUNTED_SEQS), asked.upto))
        with looking(path) as look:
            sql, params = _exact(look, part, condition)
            where = f"FROM messages WHERE seq > ? AND seq <= ? AND ({sql})"
            found = look.query(f"SELECT seq {where} ORDER BY seq LIMIT 1 OFFSET ?", (*part, *params, n - 1))
            if found:
                return int(found[0][0])
            ((counted,),) = look.query(f"SELECT count(*) {where}", (*part, *params))
        n -= int(counted)
        after = part.upto
    return None


def _exact(look: Look, asked: Range, condition: Condition) -> tuple[str, tuple[Param, ...]]:
    """The condition where it needs no second look: with the topics that fit by name."""
    if not condition.patterns:
        return condition.sql, condition.params
    sql = f"SELECT DISTINCT {look.words.topic_bytes} FROM messages WHERE seq > ? AND seq <= ? AND ({condition.sql})"
    found = [
        raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        for (raw,) in look.query(sql, (*asked, *condition.params))
    ]
    topics = [topic for topic in found if _matches(condition.patterns, topic)]
    return f"({condition.sql}) AND {look.words.topics_in}", (*condition.params, json.dumps(topics))


def _matches(patterns: tuple[Pattern, ...], topic: str) -> bool:
    return any(pattern.matches(topic) for pattern in patterns)
