"""The log's own figures: a snapshot at each run, and the reports made of them. Without Spark.

Messages are their own history; how far behind a subscription was is known later only if it was recorded.
`record_metrics` does that, in `metrics/…`; `update_reports` brings five tables of `gold/…` up to date with it.

Snapshots are kept for 90 days: all of this hour and the one before it, of earlier hours the last. Of topics, which may
be 100,000, each day has its last snapshot only; `gold/volume` has what was published to them by the hour. Tables by day
are rewritten only in the days that change, which are the last two: a run costs the same however long the history is.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import asdict

from headwater.delivery.histogram import upper_bound_ms
from headwater.formats import datetime_of
from headwater.pipeline.columns import DAY, GOLD_SCHEMAS, TABLE_SCHEMAS, TIME
from headwater.pipeline.delta import Table
from headwater.pipeline.logs import open_reader, read_table
from headwater.topics import Dialect, TopicTrie, parse_pattern

if TYPE_CHECKING:
    from headwater.pipeline.lake import Lake

KEPT_DAYS = 90
HOUR_MS = 3_600_000
HOUR, DAYS = dt.timedelta(hours=1), dt.timedelta(days=1)
STORM_REDELIVERED_MIN = 10
STORM_RATIO_MIN = 0.5
TREND_DAYS = 7
ERROR_CHARS_MAX = 2_000
SIGNATURE_CHARS_MAX = 200
WHOLE_LOG = ">"
PACE_DAYS = 7
AHEAD_DAYS = 30

Row = dict[str, Any]
Size = dict[str, float]
"""What a pattern covers now and how much is published to it, by the names of the forecast's columns."""
_SIZES = ("messages", "bytes", "messages_per_day", "bytes_per_day")


# --- snapshots ------------------------------------------------------------------------------------------------------


def record_metrics(lake: Lake, log: str, now_ms: int) -> None:
    """Adds a snapshot of the log's figures to `metrics/…`."""
    now = datetime_of(now_ms)
    for name in ("subscriptions", "topics", "retention"):
        rows = pa.Table.from_batches(read_table(log, name, now_ms), schema=TABLE_SCHEMAS[name])
        snapshot, table = with_day(rows, "observed_at"), lake.table(f"metrics/{name}")
        if name == "topics":
            table.replace(snapshot, days={str(now.date()), *_expired_days(table, now)}, transaction=now_ms)
        else:
            _add_snapshot(table, snapshot, now_ms)
    _merge_timings(lake.table("metrics/timings"), log, now_ms)
    _add_dead_letters(lake.table("metrics/dead_letters"), log)


def with_day(rows: pa.Table, moment: str) -> pa.Table:
    """Rows with the UTC day of one of their times."""
    return rows.append_column(DAY, rows[moment].cast(DAY.type))


def _add_snapshot(table: Table, snapshot: pa.Table, now_ms: int) -> None:
    """Add a snapshot to a table. Within an hour it is appended; the first of another hour rewrites the last days,
    thinned, as one file each."""
    now, last = datetime_of(now_ms), datetime_of(table.transaction())
    if _hour(now) == _hour(last):
        if snapshot.num_rows:
            table.append(snapshot, transaction=now_ms)
        return
    expired = _expired_days(table, now)
    days = (_last_days(table) - expired) | {str(now.date())}
    rows = pa.concat_tables([table.read(snapshot.schema, days=days), snapshot])
    _replace_days(table, thinned(rows, now), days | expired, now_ms)


def thinned(snapshots: pa.Table, now: dt.datetime) -> pa.Table:
    """What is kept of snapshots. A snapshot is all rows of one `observed_at`: it stays or goes whole."""
    moments = sorted(pc.unique(snapshots["observed_at"]).to_pylist())
    last_of_hour = {_hour(at): at for at in moments}
    in_full = _hour(now) - HOUR
    kept = [at for at in moments if at >= in_full or at == last_of_hour[_hour(at)]]
    rows = snapshots.filter(pc.is_in(snapshots["observed_at"], value_set=pa.array(kept, TIME)))
    return _sorted(rows, *rows.column_names[:3])


def _hour(at: dt.datetime) -> dt.datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def _last_days(table: Table) -> set[str]:
    """The days that may still change. When a day is followed by two others, its last hour has long been thinned."""
    return set(sorted(_days(table))[-2:])


def _expired_days(table: Table, now: dt.datetime) -> set[str]:
    oldest = str(now.date() - KEPT_DAYS * DAYS)
    return {day for day in _days(table) if day < oldest}


def _days(table: Table) -> set[str]:
    return {file.day for file in table.files if file.day is not None}


def _replace_days(table: Table, rows: pa.Table, days: Collection[str], transaction: int) -> None:
    """Rewrite those of the days that have other rows now, each as one file."""
    table = table.ensure(rows.schema)
    old = table.read(rows.schema, days=days)
    changed = {day for day in days if not _of_days(rows, {day}).equals(_of_days(old, {day}))}
    if changed:
        table.replace(_of_days(rows, changed), days=changed, transaction=transaction)


def _of_days(rows: pa.Table, days: Collection[str]) -> pa.Table:
    wanted = pa.array([dt.date.fromisoformat(day) for day in days], DAY.type)
    return rows.filter(pc.is_in(rows["day"], value_set=wanted))


def _merge_timings(table: Table, log: str, now_ms: int) -> None:
    """Merge the log's timings into a table. The log has a row for each hour already, and its counts only grow. It saves
    them within seconds, so they are read from the hour before the last snapshot on."""
    now = datetime_of(now_ms)
    with open_reader(log) as reader:
        found = reader.timings(table.transaction() - 2 * HOUR_MS)
    rows = [{**asdict(each), "hour": datetime_of(each.hour_ms), "observed_at": now} for each in found]
    new = with_day(pa.Table.from_pylist(rows, schema=TABLE_SCHEMAS["timings"]), "hour")
    days = {str(day) for day in pc.unique(new["day"]).to_pylist()}
    merged = greatest_counts(pa.concat_tables([table.read(new.schema, days=days), new]))
    _replace_days(table, merged, days | _expired_days(table, now), now_ms)


def greatest_counts(timings: pa.Table) -> pa.Table:
    """The greatest reading of each count; of equal ones the first, so that an unchanged count is no change."""
    keys = ["subscription", "hour", "stage", "bucket"]
    others = [name for name in timings.column_names if name not in keys]
    greatest_first = timings.sort_by([("count", "descending"), ("observed_at", "ascending")])
    found = greatest_first.group_by(keys, use_threads=False).aggregate([(name, "first") for name in others])
    return _sorted(found.rename_columns([*keys, *others]).select(timings.column_names), *keys)


def _sorted(rows: pa.Table, *columns: str) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in columns])


def _add_dead_letters(table: Table, log: str) -> None:
    """Add new dead letters by their ids, which are never used twice. One that is purged or redriven later stays."""
    table = table.ensure(TABLE_SCHEMAS["dead_letters"])
    for letters in read_table(log, "dead_letters", after=(table.transaction(),)):
        table = table.append(pa.Table.from_batches([letters]), transaction=letters["id"][-1].as_py())


# --- reports --------------------------------------------------------------------------------------------------------


def update_reports(lake: Lake) -> None:
    """Bring the reports on the log's figures up to what was observed. A report that stays as it is gets no commit."""
    subscriptions, topics, retention, timings, letters = (
        lake.table(f"metrics/{name}") for name in ("subscriptions", "topics", "retention", "timings", "dead_letters")
    )
    _report_days(lake.table("gold/lag"), subscriptions, lag)
    _report_days(lake.table("gold/latency"), timings, latency)
    _report_dead_letters(lake.table("gold/dead_letters"), letters)
    storms = retry_storms(_read(subscriptions, columns=("id", "observed_at", "created_at", "acked", "redelivered")))
    lake.table("gold/retry_storms").replace(storms, transaction=subscriptions.transaction())
    volume = lake.table("gold/volume")
    made = forecast(
        _read(topics, days=_last_days(topics)),
        _read(retention, days=_last_days(retention)),
        volume.read(GOLD_SCHEMAS["volume"], days=_pace_days(volume)),
    )
    lake.table("gold/forecast").replace(made, transaction=topics.transaction())


def _read(metrics: Table, days: Collection[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    return metrics.read(TABLE_SCHEMAS[metrics.name.removeprefix("metrics/")], days=days, columns=columns)


def _report_days(gold: Table, metrics: Table, report: Callable[[pa.Table], pa.Table]) -> None:
    """Days before the last two of the report were complete when it was made."""
    have, want = _days(gold), _days(metrics)
    days = {day for day in want if day >= min(_last_days(gold), default="")}
    _replace_days(gold, report(_read(metrics, days=days)), days | (have - want), metrics.transaction())


def _report_dead_letters(gold: Table, letters: Table) -> None:
    """A letter never changes, so only those that the report does not have yet are looked at."""
    known = gold.transaction()
    if gold.exists and known == letters.transaction():
        return
    columns = ("id", "subscription", "reason", "handler", "error", "died_at")
    rows = _read(letters, columns=columns).filter(pc.field("id") > known)
    made = dead_letters(rows, gold.read(GOLD_SCHEMAS["dead_letters"]))
    _replace_days(gold, made, {str(day) for day in pc.unique(made["day"]).to_pylist()}, letters.transaction())


def latency(timings: pa.Table) -> pa.Table:
    """Percentiles of the time from publish to delivery and to ack, per subscription and hour.

    They come from a histogram, so each is the upper bound of the bucket that it falls into: at most 19 % too high,
    never too low.
    """
    series = ["subscription", "hour", "stage"]
    buckets = greatest_counts(timings.filter(pc.field("count") > 0))
    found = _sorted(buckets.group_by(series).aggregate([("count", "sum")]), *series)
    reached, totals = np.cumsum(buckets["count"].to_numpy()), found["count_sum"].to_numpy()
    before = np.cumsum(totals) - totals
    columns = {**{name: found[name] for name in series}, "count": totals, "day": found["hour"].cast(DAY.type)}
    for name, percent in {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "max_ms": 100}.items():
        rank = -(-totals * percent // 100)  # in whole numbers: 0.9 * 10 need not be 9
        holds_it = buckets["bucket"].to_numpy()[np.searchsorted(reached, before + rank)]
        columns[name] = [upper_bound_ms(bucket) for bucket in holds_it.tolist()]
    return _report("latency", columns)


def lag(subscriptions: pa.Table) -> pa.Table:
    """How far behind each subscription was in each snapshot."""
    seen = _sorted(subscriptions, "id", "observed_at")
    columns = {**dict(zip(seen.column_names, seen.columns, strict=True)), "subscription": seen["id"]}
    return _report("lag", {**columns, "day": seen["observed_at"].cast(DAY.type)})


def retry_storms(subscriptions: pa.Table) -> pa.Table:
    """Times in which a subscription mostly delivered what it had delivered before.

    A storm lasts from one snapshot to the next; the counts are what was added in between. `ratio` is the share of
    redeliveries among deliveries, redelivered / (acked + redelivered): from 0 to 1, and in a storm at least one half.
    """
    seen = _sorted(subscriptions, "id", "observed_at")
    before, after = seen.slice(0, max(seen.num_rows - 1, 0)), seen.slice(1)
    # A subscription that was dropped and created again counts from zero.
    goes_on = pc.equal(before["created_at"], after["created_at"])
    for name in ("acked", "redelivered"):
        goes_on = pc.and_(goes_on, pc.greater_equal(after[name], before[name]))
    acked, redelivered = (
        pc.subtract(after[name], pc.if_else(pc.fill_null(goes_on, False), before[name], 0))
        for name in ("acked", "redelivered")
    )
    ratio = pc.divide(redelivered.cast(pa.float64()), pc.add(acked, redelivered).cast(pa.float64()))
    is_storm = pc.and_(pc.greater_equal(redelivered, STORM_REDELIVERED_MIN), pc.greater_equal(ratio, STORM_RATIO_MIN))
    found = {"subscription": after["id"], "acked": acked, "redelivered": redelivered, "ratio": ratio}
    intervals = _report("retry_storms", {**found, "from_at": before["observed_at"], "to_at": after["observed_at"]})
    return intervals.filter(pc.and_(is_storm, pc.equal(before["id"], after["id"])))


def _report(name: str, columns: Row) -> pa.Table:
    return pa.table({field.name: columns[field.name] for field in GOLD_SCHEMAS[name]}, schema=GOLD_SCHEMAS[name])


def dead_letters(letters: pa.Table, reported: pa.Table) -> pa.Table:
    """Dead letters per day by subscription, reason, handler and kind of error: what is `reported` already, and these
    with higher ids. `trend` is how many more they are than on a mean day of the week before."""
    kinds = ("day", "subscription", "reason", "handler", "error_signature")
    groups: dict[tuple[Any, ...], Row] = {tuple(row[name] for name in kinds): row for row in reported.to_pylist()}
    for letter in letters.sort_by("id").to_pylist():
        died_at, error = letter["died_at"], letter["error"]
        key = (died_at.date(), letter["subscription"], letter["reason"], letter["handler"], error_signature(error))
        row = groups.setdefault(key, {**dict(zip(kinds, key, strict=True)), "letters": 0, "first_at": died_at})
        row["letters"] += 1
        row["first_at"] = min(row["first_at"], died_at)
        if died_at >= row.get("last_at", died_at):
            row |= {"last_at": died_at, "example_error": error and error[:ERROR_CHARS_MAX]}
    for (day, *kind), row in groups.items():
        week = [groups.get((day - back * DAYS, *kind)) for back in range(1, TREND_DAYS + 1)]
        row["trend"] = row["letters"] - sum(each["letters"] for each in week if each) / TREND_DAYS
    return _sorted(pa.Table.from_pylist(list(groups.values()), schema=GOLD_SCHEMAS["dead_letters"]), *kinds)


# In this order: what stands in quotes may hold a path, a path a uuid, a uuid numbers.
_PLACEHOLDERS = {
    r'"[^"]*"': "<text>",
    r"(?<!\w)'[^']*'(?!\w)": "<text>",  # not the apostrophe of "can't"
    r"\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s,;)\]]+": "<path>",
    r"(?<![\w<])[A-Za-z]:\\[^\s:,;)\]]+": "<path>",
    r"(?<![\w<.~/])(?:~|\.{1,2})?/[^\s:,;)\]]+": "<path>",
    r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b": "<uuid>",
    r"(?i)\b0x[0-9a-f]+\b": "<hex>",
    r"(?i)\b(?=[0-9a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}\b": "<hex>",
    r"(?<!\w)[+-]?\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?": "<n>",  # not the 8 of "utf8"
    r"\s+": " ",
}


def error_signature(error: str | None) -> str | None:
    """What errors of a kind have in common: their text without the parts that change from one to the next."""
    if error is None:
        return None
    text = error[:ERROR_CHARS_MAX]
    for changing, placeholder in _PLACEHOLDERS.items():
        text = re.sub(changing, placeholder, text)
    return text.strip()[:SIGNATURE_CHARS_MAX]


def forecast(topics: pa.Table, retention: pa.Table, volume: pa.Table) -> pa.Table:
    """How large the log and what each retention policy covers is, and when the limits are reached: a row for the whole
    log without a limit, and one for each limit of each policy.

    Growth is what is published, as retention deletes only once a limit is reached. The newest snapshot counts; a
    policy that is older than the newest snapshot of topics is gone.
    """
    observed_at = pc.max(topics["observed_at"]).as_py()
    policies = [row for row in _newest(retention) if observed_at is None or row["observed_at"] >= observed_at]
    limits: list[tuple[str, Dialect, str | None, int]] = [(WHOLE_LOG, "nats", None, 0)]
    for row in policies:
        values = {"max_age": row["max_age_ms"], "max_count": row["max_count"], "max_bytes": row["max_bytes"]}
        limits += [(row["pattern"], row["dialect"], *each) for each in values.items() if each[1] is not None]
    sizes: dict[tuple[str, Dialect], Size] = {limit[:2]: dict.fromkeys(_SIZES, 0) for limit in limits}
    trie: TopicTrie[tuple[str, Dialect]] = TopicTrie()
    for pattern in sizes:
        trie.add(parse_pattern(*pattern), pattern)
    stored = ((row["topic"], {"messages": row["count"], "bytes": row["bytes"]}) for row in _newest(topics))
    for topic, size in chain(stored, _pace(volume)):
        for pattern in trie.match(topic):
            for name, value in size.items():
                sizes[pattern][name] += value
    rows = [_forecast_row(limit[0], sizes[limit[:2]], *limit[2:]) for limit in limits]
    return pa.Table.from_pylist(rows, schema=GOLD_SCHEMAS["forecast"])


def _forecast_row(pattern: str, size: Size, kind: str | None, limit: int) -> Row:
    """A maximal age is never reached: what it covers settles at what is published in that time."""
    days_left, ahead = None, size["bytes"] + size["bytes_per_day"] * AHEAD_DAYS
    limited = {"max_count": "messages", "max_bytes": "bytes"}.get(kind or "")
    if limited and size[f"{limited}_per_day"] > 0:
        days_left = max(limit - size[limited], 0) / size[f"{limited}_per_day"]
    if kind == "max_age":
        age_days = limit / (24 * HOUR_MS)
        settled = size["bytes_per_day"] * age_days
        ahead = settled if age_days <= AHEAD_DAYS else min(ahead, max(size["bytes"], settled))
    elif kind == "max_count":
        which = "" if size["messages"] else "_per_day"
        messages = size[f"messages{which}"]
        ahead = min(ahead, limit * size[f"bytes{which}"] / messages if messages else 0)
    elif kind == "max_bytes":
        ahead = min(ahead, limit)
    row = {**size, "pattern": pattern, "limit_kind": kind, "limit": limit if kind else None}
    return {**row, "days_left": days_left, "bytes_in_30_days": ahead}


def _newest(snapshots: pa.Table) -> list[Row]:
    newest = pc.equal(snapshots["observed_at"], pc.max(snapshots["observed_at"]))
    return list(snapshots.filter(newest).to_pylist())


def _pace(volume: pa.Table) -> Iterator[tuple[str, Size]]:
    """Messages and bytes a day by topic, over the last days of data; over a whole day at least."""
    volume = volume.filter(pc.and_(pc.is_valid(volume["hour"]), pc.is_valid(volume["topic"])))
    if not volume.num_rows:
        return
    span = pc.min_max(volume["hour"]).as_py()
    end = span["max"] + HOUR
    begin = max(span["min"], end - PACE_DAYS * DAYS)
    days = max((end - begin) / DAYS, 1.0)
    recent = volume.filter(pc.greater_equal(volume["hour"], pa.scalar(begin, TIME)))
    sums = recent.group_by("topic").aggregate([("messages", "sum"), ("bytes", "sum")])
    for row in sums.sort_by("topic").to_pylist():  # sums of floats depend on their order
        yield row["topic"], {f"{name}_per_day": row[f"{name}_sum"] / days for name in ("messages", "bytes")}


def _pace_days(volume: Table) -> set[str]:
    """The days that the pace is computed from, and the first day of all, since when there is data."""
    days = sorted(_days(volume))
    dates = [dt.date.fromisoformat(day) for day in days]
    return {*days[:1], *(str(date) for date in dates if dates[-1] - date <= PACE_DAYS * DAYS)}
