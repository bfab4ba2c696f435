"""The same random operations, done to every store side by side, give the same answers.

The memory store is simple enough to be read as the meaning of the contract; this holds the others to it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.delivery.filters import parse_entity_filter, parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.records import DeliveryRow, Selection, SubscriptionRecord, SubscriptionSpec
from headwater.ports.store import Reader, Store, Writer
from headwater.topics import parse_pattern

START_MS = 1_700_000_000_000
WINDOW = DedupeWindow(span_ms=20, count=6)
SUBSCRIPTIONS = ("s", "t")


class RollBack(Exception):
    """Ends a transaction that was to have no effect."""


# --- random operations; they are data, so that a failing script can be read ---------------------------------

Row = tuple[int, int, int, int, int, str | None, int | None]


@dataclass
class Append:
    contents: list[tuple[str, Any, dict[str, Any]]]

    def do(self, writer: Writer, now_ms: int) -> object:
        drafts = [make_draft(topic, data, options, now_ms) for topic, data, options in self.contents]
        return writer.append(drafts, now_ms, WINDOW)


@dataclass
class Delete:
    pattern: str
    after: int
    limit: int

    def do(self, writer: Writer, now_ms: int) -> object:
        return writer.delete_messages(writer.oldest(parse_pattern(self.pattern), self.after, self.limit))


@dataclass
class Put:
    """Rows as in DeliveryRow, but with a delay from now on in place of `due_ms`."""

    subscription: str
    rows: list[Row]

    def do(self, writer: Writer, now_ms: int) -> object:
        rows = [DeliveryRow(seq, attempts, now_ms + delay_ms, *rest) for seq, attempts, delay_ms, *rest in self.rows]
        return writer.put_deliveries(self.subscription, rows)


@dataclass
class Remove:
    subscription: str
    seqs: list[int]

    def do(self, writer: Writer, now_ms: int) -> object:
        return writer.remove_deliveries(self.subscription, self.seqs)


@dataclass
class Clear:
    subscription: str

    def do(self, writer: Writer, now_ms: int) -> object:
        return writer.clear_deliveries(self.subscription)


@dataclass
class EndLeases:
    subscription: str

    def do(self, writer: Writer, now_ms: int) -> object:
        return writer.end_leases(self.subscription, now_ms)


@dataclass
class ForgetIds:
    limit: int

    def do(self, writer: Writer, now_ms: int) -> object:
        return writer.forget_ids(WINDOW, now_ms, self.limit)


@dataclass
class FoldCounts:
    limit: int

    def do(self, writer: Writer, now_ms: int) -> object:
        writer.fold_topic_counts(self.limit)
        return None  # how many it took in is the store's own business


Step = Append | Delete | Put | Remove | Clear | EndLeases | ForgetIds | FoldCounts

topics = st.sampled_from(["a", "a.b", "a.b.c", "a.c", "ab", "b", "A.b", "ä.b"])
names = st.none() | st.sampled_from(["ann", "bob"])
payloads = st.none() | st.integers(0, 3) | st.fixed_dictionaries({"n": st.integers(0, 3) | st.text(max_size=2)})
options = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["x", "y", "z"]),
        "from_": names,
        "to": names,
        "type": names,
        "priority": st.integers(-2, 2),
        "headers": st.fixed_dictionaries({"h": payloads}),
    },
)
subscriptions = st.sampled_from(SUBSCRIPTIONS)
seqs = st.integers(1, 40)
rows = st.tuples(
    seqs,
    st.integers(0, 3),
    st.integers(-10, 30),
    st.integers(0, 2),
    st.integers(-2, 2),
    st.none() | st.sampled_from(["k", "l"]),
    st.none() | st.integers(1, 5),
)
limits = st.integers(1, 10)

steps = st.one_of(
    st.builds(Append, st.lists(st.tuples(topics, payloads, options), max_size=6)),
    st.builds(Delete, st.sampled_from([">", "a.>", "a", "*.b"]), st.integers(0, 20), limits),
    st.builds(Put, subscriptions, st.lists(rows, max_size=6, unique_by=lambda row: row[0])),
    st.builds(Remove, subscriptions, st.lists(seqs, max_size=10)),
    st.one_of(
        st.builds(Clear, subscriptions),
        st.builds(EndLeases, subscriptions),
        st.builds(ForgetIds, limits),
        st.builds(FoldCounts, limits),
    ),
)


@dataclass
class Transaction:
    steps: list[Step]
    waits_ms: int
    commits: bool


transactions = st.builds(Transaction, st.lists(steps, max_size=5), st.integers(0, 15), st.booleans())


# --- what is compared ---------------------------------------------------------------------------------------

SELECTIONS = [
    Selection(parse_pattern(">")),
    Selection(parse_pattern("a.*")),
    Selection(parse_pattern("#.b.#", "amqp")),
    Selection(parse_pattern("a.#", "amqp"), parse_entity_filter(from_="/^a/", broadcast=True)),
    Selection(parse_pattern(">"), parse_entity_filter(to=["ann", "bob"])),
    Selection(parse_pattern(">"), where=parse_where("data.n >= 1 or headers.h == 2 or priority > 1")),
    Selection(parse_pattern("*.b"), parse_entity_filter(from_="ann"), parse_where("not type == 'bob'")),
]


def scanned(reader: Reader, selection: Selection, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = 0
    while after < reader.last_seq():
        messages, after = reader.scan(selection, after, limit)
        found += [message.to_json() for message in messages]
    # Ids that were not given follow from a salt, in which stores differ by intent.
    return [shown | {"id": shown["id"] if len(shown["id"]) == 1 else None} for shown in found]


def times_of(reader: Reader, selection: Selection, limit: int) -> list[tuple[int, int]]:
    """All of them: at how many messages one look looks is the store's own affair."""
    found, after = list[tuple[int, int]](), 3
    while after < min(9, reader.last_seq()):
        times, after = reader.scan_times(selection, after, limit, 9)
        assert len(times) <= limit
        found += times
    return found


def answers(reader: Reader, now_ms: int) -> dict[str, Any]:
    return {
        "last_seq": reader.last_seq(),
        "scan": [scanned(reader, selection, limit) for selection in SELECTIONS for limit in (5, 100)],
        "count": [reader.count(selection, 3, upto) for selection in SELECTIONS for upto in (2, 9, 100)],
        "scan_times": [times_of(reader, selection, limit) for selection in SELECTIONS for limit in (2, 100)],
        "oldest": [reader.oldest(selection.pattern, 2, 5) for selection in SELECTIONS],
        "pruned": [reader.pruned(low, high) for low, high in ((0, 1_000), (3, 9))],
        "topic_counts": reader.topic_counts(),
        "topics_between": sorted(reader.topics_between(2, 9)),
        "leased_seqs": reader.leased_seqs(3, 30, now_ms),
        **{id: answers_about(reader, id, now_ms) for id in SUBSCRIPTIONS},
    }


def answers_about(reader: Reader, subscription: str, now_ms: int) -> dict[str, Any]:
    return {
        "due": [
            [
                (due.row, due.message and (due.message.seq, due.message.data_json))
                for due in reader.due(subscription, now_ms + wait_ms, limit, order)
            ]
            for wait_ms in (0, 10)
            for limit in (2, 100)
            for order in ("seq", "priority")
        ],
        "next_due_ms": reader.next_due_ms(subscription),
        "deliveries": reader.deliveries(subscription, range(50)),
        "delivery_counts": reader.delivery_counts(subscription),
    }


def subscribe(store: Store) -> None:
    with store.write() as writer:
        for id in SUBSCRIPTIONS:
            writer.save_subscription(SubscriptionRecord(id, SubscriptionSpec(">"), START_MS, START_MS))


def run(store: Store, transaction: Transaction, now_ms: int) -> list[object]:
    results: list[object] = []
    try:
        with store.write() as writer:
            results += [step.do(writer, now_ms) for step in transaction.steps]
            results.append(answers(writer, now_ms))
            if not transaction.commits:
                raise RollBack
    except RollBack:
        results.append("rolled back")
    with store.read() as reader:
        results.append(answers(reader, now_ms))
    return results


@settings(max_examples=30, deadline=None)
@given(script=st.lists(transactions, min_size=1, max_size=8))
def test_stores_agree(
    side_by_side: Callable[[], AbstractContextManager[list[Store]]], script: list[Transaction]
) -> None:
    with side_by_side() as stores:
        now_ms = START_MS
        for store in stores:
            subscribe(store)
        for transaction in script:
            now_ms += transaction.waits_ms
            expected, *others = [run(store, transaction, now_ms) for store in stores]
            for found in others:
                assert found == expected
