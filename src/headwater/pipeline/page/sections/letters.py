"""What died, of what, and whether it is getting better."""

from __future__ import annotations

from datetime import date
from typing import Any

from headwater.pipeline.page.charts import sparkline
from headwater.pipeline.page.facts import Report, by_day, days_drawn, maybe_number, name, newest_day, whole
from headwater.pipeline.page.layout import Column, behind, caption, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html, join, tag
from headwater.pipeline.page.words import ERROR_CHARS_MAX, brief_moment, count, cut_end, day, short, some

KINDS_SHOWN = 25  # of (subscription, reason, handler, signature)
STEADY = 0.5  # letters a day up or down that are no news
SIGNATURE_CHARS_MAX = 160

Key = tuple[str, str, str, str]
Rows = list[dict[str, Any]]


def letters_section(report: Report) -> Html:
    rows = report.rows("dead_letters")
    if not rows:
        why = "No message has died. One that fails too often, expires or is rejected would be here with its error."
        return panel("letters", "Dead letters", empty(why))
    kinds: dict[Key, Rows] = {}
    for row in rows:
        key = (
            name(row.get("subscription")),
            name(row.get("reason")),
            name(row.get("handler")),
            name(row.get("error_signature"), "no error told"),
        )
        kinds.setdefault(key, []).append(row)
    totals = {key: sum(whole(row.get("letters")) for row in found) for key, found in kinds.items()}
    shown = sorted(totals, key=lambda key: (-totals[key], key))[:KINDS_SHOWN]
    last = newest_day(report)
    first = days_drawn(rows, last) if last else None
    columns = [
        Column("What went wrong", kind="name"),
        Column("Reason"),
        Column("Handler", kind="wrap"),
        Column("Letters", number=True),
        Column("By day", kind="spark-cell"),
        Column("Trend", kind="trend"),
        Column("Last", number=True),
    ]
    cells = [_cells(key, kinds[key], totals[key], first, last) for key in shown]
    some_left = left_out(len(shown), len(totals), "kinds, by letters")
    return panel(
        "letters",
        "Dead letters",
        table("Dead letters by reason, handler and error", columns, cells),
        caption(
            f"By day: from {day(first)} to {day(last)}." if first and last else "",
            "Trend: the letters of the last day against the average of the seven days before.",
            f"Shown are {some_left}." if some_left else "",
        ),
        note=f"{some(sum(totals.values()), 'letter')} of {some(len(totals), 'kind')}",
    )


def _cells(key: Key, rows: Rows, letters: int, first: date | None, last: date | None) -> list[str]:
    subscription, reason, handler, signature = key
    latest = max(rows, key=lambda row: row.get("day") or date.min)
    said = [
        tag("code", cut_end(signature, SIGNATURE_CHARS_MAX), class_="signature"),
        tag("p", "in ", named(subscription), class_="quiet"),
    ]
    example = latest.get("example_error")
    if example and str(example) != signature:
        said.append(behind("An example", tag("pre", cut_end(str(example), ERROR_CHARS_MAX))))
    ended = latest.get("last_at")
    return [
        join(said),
        tag("span", named(reason, 32), class_="reason"),
        named(handler),
        count(letters),
        _by_day(rows, first, last),
        _trend(latest, last),
        brief_moment(ended) if ended else "–",
    ]


def _by_day(rows: Rows, first: date | None, last: date | None) -> str:
    if first is None or last is None:
        return "–"
    values = by_day(rows, "letters", first, last)
    return sparkline(values, f"Letters a day from {day(first)} to {day(last)}; at most {short(max(values))}")


def _trend(latest: dict[str, Any], last: date | None) -> Html:
    on = latest.get("day")
    if on and last and on < last:
        return tag("span", f"none since {day(on)}", class_="good")
    change = maybe_number(latest.get("trend"))
    if change is None:
        return tag("span", "–", class_="quiet")
    if abs(change) < STEADY:
        return tag("span", "→ steady", class_="quiet")
    arrow, kind = ("▲", "bad") if change > 0 else ("▼", "good")
    return tag("span", f"{arrow} {short(abs(round(change, 1)))} a day", class_=kind)
