"""The audit's verdict as both pages show it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from headwater.pipeline.page.facts import whole
from headwater.pipeline.page.layout import command, named
from headwater.pipeline.page.markup import Html, join, tag
from headwater.pipeline.page.words import PATH_CHARS_MAX, count, cut, iso_moment, moment, some, without_password

CHECKS_TOLD = 5  # of those that failed, on the report; the audit's page has them all
SIGNS = {
    "whole": "M6 12.5l4 4 8-9",
    "broken": "M7 7l10 10M17 7L7 17",
    "unknown": "M9.2 9.3a3 3 0 1 1 4.2 2.8c-.9.4-1.4 1-1.4 2M12 17.2v.1",
}

Audit = Mapping[str, Any]
Range = tuple[int, int]


def ranges(audit: Audit, key: str) -> list[Range]:
    """The runs of seqs under `key`, ascending; gaps are dicts, the others pairs."""
    found = audit.get(key) or []
    pairs = [(run["from"], run["to"]) if isinstance(run, Mapping) else (run[0], run[1]) for run in found]
    return sorted((whole(low), whole(high)) for low, high in pairs)


def messages_in(runs: list[Range]) -> int:
    return sum(max(0, high - low + 1) for low, high in runs)


def verdict(audit: Audit | None, *, log: str, lake: str, high_water: int | None = None, page: bool = False) -> Html:
    """The first thing on a page. `high_water` is the lake's now: what came after the audit is said."""
    again = audit_command(log, lake)
    if audit is None:
        return _banner(
            "unknown",
            "Not audited yet",
            tag("p", "Nobody has compared this lake with its log so far."),
            tag("p", "Find out: ", command(again)),
        )
    if audit.get("whole"):
        seen = whole(audit.get("high_water"))
        sure = f"Every message up to seq {seen:,} is in it exactly once." if seen else "It is empty, and so is the log."
        return _banner("whole", "The lake is whole", tag("p", sure), _facts(audit), _since(audit, high_water, again))
    told = [] if page else [tag("p", "Ranges and files: ", command(f"{again} --page"))]
    return _banner(
        "broken",
        "The lake is not whole",
        tag("p", _wrongs(audit)),
        "" if page else _failed(audit),
        _facts(audit),
        *told,
        _since(audit, high_water, again),
    )


def audit_command(log: str, lake: str) -> str:
    paths = [cut(path, PATH_CHARS_MAX) for path in (without_password(log), lake)]
    return shlex.join(["headwater", "pipeline", "audit", "--log", paths[0], "--lake", paths[1]])


def _banner(state: str, heading: str, *body: str) -> Html:
    sign = tag(
        "svg",
        tag("circle", cx=12, cy=12, r=11),
        tag("path", d=SIGNS[state]),
        viewBox="0 0 24 24",
        class_="sign",
        aria_hidden="true",
    )
    return tag(
        "section",
        sign,
        tag("div", tag("h2", heading, id="verdict-heading"), *body),
        id="verdict",
        class_=f"verdict {state}",
        aria_labelledby="verdict-heading",
    )


def _wrongs(audit: Audit) -> str:
    """`12 messages are missing, 1 file is changed.`"""
    parts = []
    for key, said in (("missing", "missing"), ("repeated", "there more than once"), ("different", "not as in the log")):
        if number := messages_in(ranges(audit, key)):
            parts.append(f"{some(number, 'message')} {'is' if number == 1 else 'are'} {said}")
    for key, said in (("files_missing", "missing"), ("files_changed", "changed")):
        if number := len(audit.get(key) or []):
            parts.append(f"{some(number, 'file')} {'is' if number == 1 else 'are'} {said}")
    return f"{', '.join(parts)}." if parts else "A check failed."


def _failed(audit: Audit) -> Html:
    failed = [check for check in audit.get("checks") or [] if not check.get("ok")]
    told = [
        tag("li", tag("strong", named(str(check.get("name")))), ": ", named(str(check.get("what")), 300))
        for check in failed[:CHECKS_TOLD]
    ]
    more = len(failed) - len(told)
    return tag("ul", *told, tag("li", f"and {more:,} more") if more else "") if told else join([])


def _facts(audit: Audit) -> Html:
    at = iso_moment(audit.get("checked_at"))
    gaps = ranges(audit, "gaps")
    facts = [
        f"checked {moment(at)}" if at else "",
        f"{count(whole(audit.get('rows')))} rows",
        f"{count(whole(audit.get('compared')))} compared with the log by checksum" if audit.get("compared") else "",
        f"{some(messages_in(gaps), 'message')} in {some(len(gaps), 'gap')} explained by retention"
        if gaps
        else "no gaps",
        f"{some(whole(audit.get('not_yet')), 'newer message')} not in the lake yet" if audit.get("not_yet") else "",
    ]
    return tag("ul", *(tag("li", fact) for fact in facts if fact), class_="facts")


def _since(audit: Audit, high_water: int | None, again: str) -> Html:
    grown = (high_water or 0) - whole(audit.get("high_water"))
    if grown <= 0:
        return join([])
    return tag("p", f"The lake has grown by {grown:,} seqs since. Audit it again: ", command(again), class_="since")
