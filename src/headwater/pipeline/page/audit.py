"""The audit as a page: what was checked, what is wrong, and where. Its document in, one HTML page out."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.pipeline.page.charts import Series, legend
from headwater.pipeline.page.facts import number, whole
from headwater.pipeline.page.layout import Column, Tile, caption, empty, left_out, named, page, panel, table, tiles
from headwater.pipeline.page.markup import Html, tag
from headwater.pipeline.page.verdict import Audit, Range, messages_in, ranges, verdict
from headwater.pipeline.page.words import (
    PATH_CHARS_MAX,
    count,
    cut,
    iso_moment,
    moment,
    short,
    some,
    span,
    without_password,
)

RANGES_SHOWN = 100
RANGES_DRAWN = 300
FILES_SHOWN = 100
CHECKS_SHOWN = 100
WHAT_CHARS_MAX = 500
LEAST_MARK_PERCENT = 0.35  # narrower, and a single lost message could not be seen

WRONGS = (
    ("missing", "Missing", "in the log, not in the lake", "m1"),
    ("repeated", "Repeated", "in the lake more than once", "m2"),
    ("different", "Different", "not as they are in the log", "m3"),
)
FILES = (
    ("files_missing", "Files missing", "in the manifest, not on disk"),
    ("files_changed", "Files changed", "not as they were when they were sealed"),
)


def render_audit(audit: Audit) -> str:
    log, lake = str(audit.get("log", "")), str(audit.get("lake", ""))
    at = iso_moment(audit.get("checked_at"))
    sections = [
        ("verdict", "", verdict(audit, log=log, lake=lake, page=True)),
        ("figures", "", _figures(audit)),
        ("coverage", "Coverage", _coverage(audit)),
        ("checks", "Checks", _checks(audit)),
    ]
    for key, heading, said, _ in WRONGS:
        if found := ranges(audit, key):
            sections.append((key, heading, _ranges(key, heading, said, found)))
    for key, heading, said in FILES:
        if files := audit.get(key):
            sections.append((key, heading, _files(key, heading, said, [str(file) for file in files])))
    sections.append(("gaps", "Gaps", _gaps(audit)))
    paths = [cut(path, PATH_CHARS_MAX) for path in (lake, without_password(log))]
    foot = f"Made by headwater pipeline audit from {paths[0]} and the log {paths[1]}. All times are UTC."
    return page("Audit", lake, f"checked {moment(at)} UTC" if at else "", sections, foot)


def _figures(audit: Audit) -> Html:
    gaps = ranges(audit, "gaps")
    wrong = sum(messages_in(ranges(audit, key)) for key, _, _, _ in WRONGS)
    not_yet = whole(audit.get("not_yet"))
    shown = [
        Tile("Rows in the lake", count(whole(audit.get("rows"))), f"up to seq {whole(audit.get('high_water')):,}"),
        Tile("Wrong", count(wrong), "missing, repeated or different", alarm=wrong > 0),
        Tile("Gaps", count(len(gaps)), f"{some(messages_in(gaps), 'message')} deleted by retention"),
        Tile("Compared", count(whole(audit.get("compared"))), "rows, with the log by checksum"),
        Tile("Not in it yet", count(not_yet), f"the log is at seq {whole(audit.get('last_seq')):,}"),
        Tile("Took", span(1000 * number(audit.get("seconds"))), some(len(audit.get("checks") or []), "check")),
    ]
    return tag("section", tiles(shown), id="figures", class_="figures", aria_label="Figures")


def _coverage(audit: Audit) -> Html:
    """Seq 1 to the last as one strip: what is there, what is explained, what is wrong."""
    high_water = whole(audit.get("high_water"))
    last = max(high_water, whole(audit.get("last_seq")), 1)
    marks = [
        ("m0", [(1, high_water)] if high_water else [], "in the lake"),
        ("gap", ranges(audit, "gaps"), "deleted by retention"),
        *((kind, ranges(audit, key), said) for key, _, said, kind in WRONGS),
    ]
    shapes = [
        _mark(kind, run, last, said)
        for kind, runs, said in marks
        for run in sorted(runs, key=lambda run: run[0] - run[1])[:RANGES_DRAWN]
    ]
    about = f"Seq 1 to {last:,}; the lake reaches {high_water:,}."
    strip = tag(
        "svg",
        tag("title", "Coverage of the log by the lake"),
        tag("desc", about),
        tag("rect", class_="rail", width="100%", height=36, rx=4),
        *shapes,
        class_="strip",
        role="img",
        aria_label=f"Coverage of the log by the lake. {about}",
        width="100%",
        height=36,
    )
    ends = tag("p", tag("span", "seq 1"), tag("span", short(last / 2)), tag("span", f"{last:,}"), class_="ends")
    shown = [Series(said, [], kind) for kind, runs, said in marks if runs]
    seen = 100 * (last - high_water) / last >= LEAST_MARK_PERCENT
    beyond = "Pale at the right: in the log, not in the lake yet." if seen else ""
    return panel("coverage", "Coverage", legend(shown), strip, ends, caption(beyond), note=about.rstrip("."))


def _mark(kind: str, run: Range, last: int, said: str) -> Html:
    low, high = max(1, run[0]), min(last, run[1])
    width = max(LEAST_MARK_PERCENT, 100 * (high - low + 1) / last)
    left = min(100 - width, 100 * (low - 1) / last)
    title = tag("title", f"{_seqs(run)}: {said}")
    return tag("rect", title, class_=f"bar {kind}", x=f"{left:.3f}%", width=f"{width:.3f}%", height=36)


def _seqs(run: Range) -> str:
    return f"seq {run[0]:,}" if run[0] == run[1] else f"seq {run[0]:,} to {run[1]:,}"


def _checks(audit: Audit) -> Html:
    checks = [check for check in audit.get("checks") or [] if isinstance(check, Mapping)]
    if not checks:
        return panel("checks", "Checks", empty("The audit tells of no checks."))
    checks = sorted(checks, key=lambda check: bool(check.get("ok")))  # what failed comes first
    shown = [
        tag(
            "li",
            tag(
                "span",
                "passed" if check.get("ok") else "failed",
                class_=f"state {'good' if check.get('ok') else 'bad'}",
            ),
            tag(
                "div",
                tag("strong", named(str(check.get("name")))),
                tag("p", cut(str(check.get("what", "")), WHAT_CHARS_MAX)),
            ),
        )
        for check in checks[:CHECKS_SHOWN]
    ]
    passed = sum(bool(check.get("ok")) for check in checks)
    note = left_out(len(shown), len(checks), "checks") or f"{passed} of {some(len(checks), 'check')} passed"
    return panel("checks", "Checks", tag("ul", *shown, class_="checks"), note=note)


def _ranges(key: str, heading: str, said: str, found: list[Range]) -> Html:
    columns = [Column("From seq", number=True), Column("To seq", number=True), Column("Messages", number=True)]
    rows = [[count(low), count(high), count(high - low + 1)] for low, high in found[:RANGES_SHOWN]]
    left = left_out(len(rows), len(found), "ranges")
    return panel(
        key,
        heading,
        table(f"{heading}: {said}", columns, rows, kind="plain"),
        caption(f"Shown are {left}." if left else ""),
        note=f"{some(messages_in(found), 'message')}, {said}",
        half=True,
    )


def _files(key: str, heading: str, said: str, files: list[str]) -> Html:
    shown = [tag("li", tag("code", named(file, PATH_CHARS_MAX))) for file in files[:FILES_SHOWN]]
    left = left_out(len(shown), len(files), "files")
    return panel(
        key,
        heading,
        tag("ul", *shown, class_="files"),
        caption(f"Shown are {left}." if left else ""),
        note=f"{some(len(files), 'file')}, {said}",
        half=True,
    )


def _gaps(audit: Audit) -> Html:
    gaps = sorted((gap for gap in audit.get("gaps") or []), key=lambda gap: whole(gap.get("from")))
    if not gaps:
        return panel(
            "gaps", "Gaps", empty("None. Were messages deleted by retention before a run, their seqs would be here.")
        )
    columns = [
        Column("From seq", number=True),
        Column("To seq", number=True),
        Column("Messages", number=True),
        Column("Why"),
    ]
    rows = [
        [
            count(whole(gap.get("from"))),
            count(whole(gap.get("to"))),
            count(whole(gap.get("to")) - whole(gap.get("from")) + 1),
            named(str(gap.get("why", ""))),
        ]
        for gap in gaps[:RANGES_SHOWN]
    ]
    left = left_out(len(rows), len(gaps), "gaps")
    return panel(
        "gaps",
        "Gaps",
        table("Gaps that are explained", columns, rows, kind="plain"),
        caption(f"Shown are {left}." if left else ""),
        note="seqs that retention deleted; they are not missing",
    )
