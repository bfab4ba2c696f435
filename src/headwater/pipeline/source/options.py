"""The options of the data source, read and checked. Pure, but for making the path absolute."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from headwater.broker.options import check_subscription_id
from headwater.errors import HeadwaterError, InvalidOption
from headwater.message.times import TIME_MS_MAX, time_ms
from headwater.pipeline.source.place import log_path
from headwater.topics import Pattern, parse_pattern

NAMES = (
    "path",
    "topics",
    "startingSeq",
    "startingTimestamp",
    "endingSeq",
    "maxMessagesPerTrigger",
    "minPartitions",
    "filterPushdown",
    "failOnDataLoss",
    "subscription",
    "table",
)
TABLES = ("messages", "subscriptions", "deliveries", "dead_letters", "gaps", "timings", "retention", "topics")
SEQ_MAX = 2**63 - 1
PARTITIONS_MAX = 10_000
_ALIKE = 0.75  # how much a name must resemble one of ours to be taken for a slip

Table = Literal["messages", "subscriptions", "deliveries", "dead_letters", "gaps", "timings", "retention", "topics"]
Starting = int | Literal["earliest", "latest"]


@dataclass(frozen=True)
class SourceOptions:
    """`starting_seq` is the first seq wanted; no patterns are all topics. `path` may hold a password."""

    path: str = field(repr=False)
    table: Table = "messages"
    patterns: tuple[Pattern, ...] = ()
    starting_seq: Starting = "earliest"
    starting_ms: int | None = None
    ending_seq: int | None = None
    messages_per_trigger: int | None = None
    partitions_min: int | None = None
    filter_pushdown: bool = False
    fail_on_data_loss: bool = True
    subscription: str | None = None


def read_options(given: Mapping[str, str]) -> SourceOptions:
    options = {name.lower(): value for name, value in given.items()}
    _refuse_slips(options)
    texts = {name: options[name.lower()] for name in NAMES if name.lower() in options}
    if "startingSeq" in texts and "startingTimestamp" in texts:
        raise InvalidOption(
            "startingSeq is given as well, and may say something else",
            where="startingTimestamp",
            next="Give one of them",
        )
    return SourceOptions(
        path=log_path(texts.get("path", "")),
        table=_table(texts.get("table", "messages")),
        patterns=_patterns(texts.get("topics", "")),
        starting_seq=_starting(texts.get("startingSeq", "earliest")),
        starting_ms=_moment_ms(texts["startingTimestamp"]) if "startingTimestamp" in texts else None,
        ending_seq=_whole("endingSeq", texts, 0, SEQ_MAX),
        messages_per_trigger=_whole("maxMessagesPerTrigger", texts, 1, SEQ_MAX),
        partitions_min=_whole("minPartitions", texts, 1, PARTITIONS_MAX),
        filter_pushdown=_yes_or_no("filterPushdown", texts.get("filterPushdown", "false")),
        fail_on_data_loss=_yes_or_no("failOnDataLoss", texts.get("failOnDataLoss", "true")),
        subscription=_subscription(texts["subscription"]) if "subscription" in texts else None,
    )


def read_table_name(given: Mapping[str, str]) -> Table:
    """Of which table the options speak, whatever else they say: those of the sink come this way too."""
    return _table(next((value for name, value in given.items() if name.lower() == "table"), "messages"))


def _refuse_slips(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in NAMES}
    for name in options:
        if name in known:
            continue
        meant = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if meant:  # any other may be one of Spark's own
            raise InvalidOption(
                f"there is no option {name!r}",
                where=name,
                next=f"Did you mean {known[meant[0]]}? All: {', '.join(NAMES)}",
            )


def _table(text: str) -> Table:
    for table in TABLES:
        if text.strip().lower() == table:
            return table  # type: ignore[return-value]  # TABLES are the values of Table
    raise InvalidOption(f"there is no table {text!r}", where="table", next=f"Use one of {', '.join(TABLES)}")


def _patterns(text: str) -> tuple[Pattern, ...]:
    spellings = [each.strip() for each in text.split(",")]
    if not text.strip():
        return ()
    try:
        return tuple(parse_pattern(each) for each in dict.fromkeys(spellings))
    except HeadwaterError as exc:
        raise InvalidOption(f"{exc.why} ({exc.where})", where="topics", next=exc.next) from exc


def _starting(text: str) -> Starting:
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return "earliest" if word == "earliest" else "latest"
    if word.isdecimal() and word.isascii() and int(word) <= SEQ_MAX:
        return int(word)
    raise InvalidOption(
        f"startingSeq is earliest, latest or a seq, not {text!r}",
        where="startingSeq",
        next="Give the first seq that is wanted; for a time use startingTimestamp",
    )


def _moment_ms(text: str) -> int:
    word = text.strip()
    if word.isdecimal() and word.isascii() and int(word) <= TIME_MS_MAX:
        return int(word)
    try:
        moment = datetime.fromisoformat(word)
    except ValueError as exc:
        raise InvalidOption(
            f"this is no time: {text!r}",
            where="startingTimestamp",
            next="Write 2026-01-31T12:00:00Z, or milliseconds since 1970",
        ) from exc
    if moment.tzinfo is None:
        raise InvalidOption(
            f"{text!r} has no time zone", where="startingTimestamp", next=f"Write {moment.isoformat()}Z if UTC is meant"
        )
    return time_ms(moment, "startingTimestamp")


def _whole(name: str, texts: Mapping[str, str], least: int, most: int) -> int | None:
    if name not in texts:
        return None
    word = texts[name].strip()
    if word.isdecimal() and word.isascii() and least <= int(word) <= most:
        return int(word)
    raise InvalidOption(
        f"{name} is a whole number, at least {least} and at most {most}, not {texts[name]!r}", where=name
    )


def _yes_or_no(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    raise InvalidOption(f"{name} is true or false, not {text!r}", where=name)


def _subscription(text: str) -> str:
    try:
        return check_subscription_id(text)
    except HeadwaterError as exc:
        raise InvalidOption(exc.why, where="subscription", next=exc.next) from exc
