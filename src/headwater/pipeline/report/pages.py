"""The two pages: facts in, one HTML text out. The same facts make the same text."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from headwater.formats import format_count, format_seconds, format_size, plural
from headwater.pipeline.report import charts
from headwater.pipeline.report import model as m
from headwater.pipeline.report.model import PageTable, Report, Section, cut
from headwater.pipeline.report.sections import sections_of

LISTED_MAX = 100  # checks, files, ranges of each kind
NOTES_SHOWN, FAILED_SHOWN = 20, 5
PATH_CHARS_MAX, WHAT_CHARS_MAX = 240, 500
LEAST_SHARE_DRAWN = 0.0035  # narrower, and a single lost message could not be seen
RANGES = {
    "missing": ("in the log, not in the lake", charts.BAD),
    "repeated": ("in the lake more than once", charts.SERIES[1]),
    "different": ("not as in the log", charts.SERIES[2]),
    "gaps": ("deleted by retention", charts.OTHER),
}
FILES = {
    "files_missing": "not in storage",
    "files_changed": "not as it was written",
    "files_repeated": "holds messages that are there more than once",
}
STATES = ("failed", "skipped", "ok")
_NOT_READ: dict[str, Any] = {
    **dict.fromkeys(("last_seq", "rows", "compared", "not_yet"), 0),
    **dict.fromkeys((*RANGES, *FILES), ()),
    **{f"{key}_total": {"runs": 0, "messages": 0} for key in RANGES},
}
"""What the document of an audit lacks if a table could not be read."""

Audit = Mapping[str, Any]


def render_report(report: Report) -> str:
    log, lake = cut(report.log, PATH_CHARS_MAX), cut(report.lake, PATH_CHARS_MAX)
    sections = sections_of(report)
    if report.notes:
        shown = [[cut(note, WHAT_CHARS_MAX)] for note in report.notes[:NOTES_SHOWN]]
        sections.insert(0, Section("notes", "Notes", table=PageTable(["~Note"], shown, len(report.notes), "notes")))
    return _template().render(
        title="Report",
        subject=lake,
        made=f"made {m.full(report.made_at)} UTC",
        verdict=_report_verdict(report, shlex.join(["headwater", "pipeline", "audit", log, "--lake", lake])),
        tiles=_tiles(report),
        sections=sections,
        foot=f"Made by headwater pipeline report from {lake}, of the log {log}, up to seq {report.lake_seq:,}.",
    )


def render_audit(document: Audit) -> str:
    audit = _NOT_READ | dict(document)
    checks = PageTable([" State", "~Check", "~Found"], _check_rows(audit)[:LISTED_MAX], len(audit["checks"]), "checks")
    log, lake = cut(audit["log"], PATH_CHARS_MAX), cut(audit["lake"], PATH_CHARS_MAX)
    return _template().render(
        title="Audit",
        subject=lake,
        made=f"checked {m.full(datetime.fromisoformat(audit['checked_at']))} UTC",
        verdict=_verdict(audit),
        tiles=[],
        sections=[_coverage(audit), Section("checks", "Checks", table=checks), _ranges(audit), _files(audit)],
        foot=f"Made by headwater pipeline audit from {lake} and the log {log}.",
    )


@cache
def _template() -> Template:
    made = Environment(
        loader=PackageLoader("headwater.pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: m.clean(value) if type(value) is str else value,
    )
    style = resources.files("headwater.pipeline.report").joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Even if something got past the escaping, a browser would run and load nothing, and take no other style.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return made.get_template("page.html", globals={"style": Markup(style), "policy": policy})


# --- verdict and figures --------------------------------------------------------------------------------------------


def _report_verdict(report: Report, again: str) -> dict[str, Any]:
    """The verdict of the last audit, and what came after it. `again` is the command that makes another."""
    if report.audit is None:
        text = "This lake has not been compared with its log."
        return {"state": "unknown", "text": text, "failed": [], "facts": [], "commands": [("Audit it:", again)]}
    audit = _NOT_READ | dict(report.audit)
    commands = [] if audit["whole"] else [("Ranges and files:", f"{again} --out audit.html")]
    grown = report.lake_seq - audit["lake_seq"]
    if grown > 0:
        commands.append((f"The lake has grown by {grown:,} seqs since. Audit it again:", again))
    return _verdict(audit) | {"commands": commands}


def _verdict(audit: Audit) -> dict[str, Any]:
    """The first thing on a page."""
    gaps, checks = audit["gaps_total"], audit["checks"]
    excused = f"{plural(gaps['messages'], 'message')} in {plural(gaps['runs'], 'gap')} explained by retention"
    states = Counter(check["status"] for check in checks)
    facts = [
        f"checked {m.full(datetime.fromisoformat(audit['checked_at']))} in {format_seconds(audit['seconds'])}",
        plural(audit["rows"], "row"),
        f"{audit['compared']:,} compared with the log by checksum",
        excused if gaps["runs"] else "no gaps found",
        f"{plural(audit['not_yet'], 'newer message')} not in the lake yet" if audit["not_yet"] else "",
        f"{plural(states['skipped'], 'check')} skipped" if states["skipped"] else "",
    ]
    made = {"facts": [fact for fact in facts if fact], "failed": [], "commands": []}
    if audit["whole"]:
        upto = audit["lake_seq"]
        text = f"Every message up to seq {upto:,} is in it exactly once." if upto else "It has no messages yet."
        return made | {"state": "whole", "text": text}
    failed = _check_rows(audit)[: min(states["failed"], FAILED_SHOWN)]
    text = f"{states['failed']} of {plural(len(checks), 'check')} failed."
    return made | {"state": "broken", "text": text, "failed": failed}


def _tiles(report: Report) -> list[tuple[str, str, str, bool]]:
    """The figures at the top, each a label, a value, the line below it, and whether it is an alarm."""
    volume, lag = report.rows("volume"), report.rows("lag")
    subscriptions = {row["subscription"] for row in [*lag, *report.rows("latency")]}
    types = {row["type"] for row in volume} - {None}
    letters = sum(row["letters"] for row in report.rows("dead_letters"))
    snapshots = m.grouped(lag, "subscription").values()
    behind = sum(max(rows, key=lambda row: row["observed_at"])["lag"] for rows in snapshots)
    days = [row["day"] for row in volume]
    first = f"{m.day(min(days))} to " if days and min(days) < max(days) else ""
    extent = f"{first}{m.day(max(days))} {max(days).year}" if days else ""
    each = f"{format_size(report.bytes / report.messages)} each" if report.messages else ""
    return [
        ("Messages", f"{report.messages:,}", f"up to seq {report.lake_seq:,}", False),
        ("Size", format_size(report.bytes), each, False),
        ("Topics", f"{len({row['topic'] for row in volume}):,}", plural(len(types), "type"), False),
        ("Subscriptions", f"{len(subscriptions):,}", f"{format_count(behind)} behind", False),
        ("Dead letters", f"{letters:,}", f"{plural(report.quarantined, 'row')} in quarantine", letters > 0),
        ("Days", f"{(max(days) - min(days)).days + 1 if days else 0:,}", extent, False),
    ]


# --- the audit's sections -------------------------------------------------------------------------------------------


def _coverage(audit: Audit) -> Section:
    """Seq 1 to the last as one strip: what is there, what is explained, what is wrong."""
    upto, last = audit["lake_seq"], max(audit["lake_seq"], audit["last_seq"])
    if not upto:
        return Section("coverage", "Coverage", empty="No messages of the lake were read.")
    kinds = [("in the lake", charts.HELD, [(1, upto)], 0.0)]
    for key in reversed(RANGES):
        if audit[key]:  # what is wrong is drawn wide enough to be seen; what is explained as wide as it is
            kinds.append((*RANGES[key], _spans(audit, key), 0.0 if key == "gaps" else last * LEAST_SHARE_DRAWN))
    rows = []
    for text, colour, spans, least in kinds:
        for low, high in spans:
            end = min(max(high + 1, low + least), last + 1)
            tip = f"seq {low:,}{'' if low == high else f' to {high:,}'}: {text}"
            rows.append({"low": max(1, min(low, end - least)), "high": end, "colour": colour, "tip": tip})
    note, legend = f"seq 1 to {last:,}; the lake reaches {upto:,}", {text: colour for text, colour, *_ in kinds}
    if audit["gaps_total"]["runs"] > LISTED_MAX:
        note += f"; the first {LISTED_MAX} of {audit['gaps_total']['runs']:,} gaps are drawn"
    chart = charts.strip(f"Coverage of the log by the lake: {note}", rows, last)
    return Section("coverage", "Coverage", note=note, legend=legend, chart=chart)


def _spans(audit: Audit, key: str) -> list[tuple[int, int]]:
    """Gaps are objects, the others pairs. The document lists the first; its totals count all of them."""
    return [(run["from"], run["to"]) if key == "gaps" else (run[0], run[1]) for run in audit[key][:LISTED_MAX]]


def _check_rows(audit: Audit) -> list[list[Any]]:
    """Failed ones first."""
    rows = []
    for check in sorted(audit["checks"], key=lambda check: STATES.index(check["status"])):
        state = {"text": check["status"], "tone": f"state {check['status']}"}
        rows.append([state, cut(check["name"]), cut(check["what"], WHAT_CHARS_MAX)])
    return rows


def _ranges(audit: Audit) -> Section:
    rows = [
        [key.rstrip("s"), f"{low:,}", f"{high:,}", f"{high - low + 1:,}", text]
        for key, (text, _) in RANGES.items()
        for low, high in _spans(audit, key)
    ]
    totals = {key: audit[f"{key}_total"] for key in RANGES}
    note = "; ".join(f"{key}: {plural(total['messages'], 'message')}" for key, total in totals.items() if total["runs"])
    columns = [" Kind", ">From seq", ">To seq", ">Messages", " Found"]
    table = PageTable(columns, rows, sum(total["runs"] for total in totals.values()), "ranges")
    empty = "No missing, repeated, different or deleted messages were found."
    return Section("ranges", "Ranges", note=note, empty=empty, table=table)


def _files(audit: Audit) -> Section:
    rows = [[cut(file, PATH_CHARS_MAX), text] for key, text in FILES.items() for file in audit[key][:LISTED_MAX]]
    empty = "No missing or changed files were found."
    return Section("files", "Files", empty=empty, table=PageTable(["~File", " Found"], rows))
