"""Who sends to whom: a table that is a heat map."""

from __future__ import annotations

from headwater.pipeline.page.charts import heat
from headwater.pipeline.page.facts import Report, name, number, ranked
from headwater.pipeline.page.layout import caption, empty, named, panel
from headwater.pipeline.page.markup import Html, tag
from headwater.pipeline.page.words import LABEL_CHARS_MAX, count, short, some

ENTITIES_SHOWN = 10  # on each side; the rest are summed
SENDER_UNNAMED, RECEIVER_UNNAMED = "(nobody named)", "(everybody)"


def traffic_section(report: Report) -> Html:
    rows = report.rows("traffic")
    pairs: dict[tuple[str, str], float] = {}
    senders: dict[str, float] = {}
    receivers: dict[str, float] = {}
    for row in rows:
        sender, receiver = name(row.get("from"), SENDER_UNNAMED), name(row.get("to"), RECEIVER_UNNAMED)
        messages = number(row.get("messages"))
        pairs[sender, receiver] = pairs.get((sender, receiver), 0.0) + messages
        senders[sender] = senders.get(sender, 0.0) + messages
        receivers[receiver] = receivers.get(receiver, 0.0) + messages
    if set(senders) <= {SENDER_UNNAMED} and set(receivers) <= {RECEIVER_UNNAMED}:
        why = "No message names who it is from or to. Publish with"
        return panel(
            "traffic",
            "Traffic between entities",
            empty(why, tag("code", "from"), "and", tag("code", "to"), "to see who talks to whom."),
            half=True,
        )
    shown_from, shown_to = ranked(senders, ENTITIES_SHOWN), ranked(receivers, ENTITIES_SHOWN)
    more_from, more_to = len(senders) - len(shown_from), len(receivers) - len(shown_to)
    cells = _folded(pairs, set(shown_from), set(shown_to))
    rows_of = [*shown_from, *([None] if more_from else [])]
    columns_of = [*shown_to, *([None] if more_to else [])]
    high = max(cells.values())
    head = tag(
        "tr",
        tag("th", "from ↓  to →", scope="col", class_="corner"),
        *(tag("th", tag("span", _label(one, more_to)), scope="col") for one in columns_of),
    )
    body = [
        tag(
            "tr",
            tag("th", _label(sender, more_from), scope="row"),
            *(_cell(cells.get((sender, receiver), 0.0), high) for receiver in columns_of),
        )
        for sender in rows_of
    ]
    about = "Messages by sender and receiver"
    made = tag("table", tag("caption", about), tag("thead", head), tag("tbody", *body), class_="heat")
    return panel(
        "traffic",
        "Traffic between entities",
        tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=about),
        caption("The stronger the colour, the more messages, on a logarithmic scale."),
        note=f"{some(len(senders), 'sender')}, {some(len(receivers), 'receiver')}",
        half=True,
    )


def _folded(
    pairs: dict[tuple[str, str], float], shown_from: set[str], shown_to: set[str]
) -> dict[tuple[str | None, str | None], float]:
    """Those not shown become None."""
    cells: dict[tuple[str | None, str | None], float] = {}
    for (sender, receiver), messages in pairs.items():
        key = (sender if sender in shown_from else None, receiver if receiver in shown_to else None)
        cells[key] = cells.get(key, 0.0) + messages
    return cells


def _label(entity: str | None, more: int) -> Html:
    return named(entity, LABEL_CHARS_MAX) if entity is not None else tag("em", f"{more:,} more")


def _cell(messages: float, high: float) -> Html:
    warmth = heat(messages, high)
    if not warmth:
        return tag("td", "·", class_="cold")
    return tag("td", short(messages), style=f"--warmth:{warmth}%", title=count(messages))
