"""What every store promises about finding, counting and deleting messages."""

from collections.abc import Sequence
from typing import Any

import pytest
from rows_looked_at import rows_looked_at

from headwater.delivery.filters import parse_entity_filter, parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.delivery.retention import Kept
from headwater.formats import TIME_MS_MAX
from headwater.message import Draft, Message, make_draft
from headwater.ports.records import Selection, TopicCount
from headwater.ports.store import Reader, Store
from headwater.topics import Dialect, parse_pattern

NOW = 1_700_000_000_000
EVERYTHING = Selection(parse_pattern(">"))


def draft(topic: str, data: Any = None, **options: Any) -> Draft:
    return make_draft(topic, data, options, NOW)


def append(store: Store, *drafts: Draft, now_ms: int = NOW) -> None:
    with store.write() as writer:
        writer.append(drafts, now_ms, DedupeWindow())


def selection(pattern: str, dialect: Dialect = "nats", where: str | None = None, **entities: Any) -> Selection:
    return Selection(
        parse_pattern(pattern, dialect),
        parse_entity_filter(**entities),
        None if where is None else parse_where(where),
    )


def scan_to_end(reader: Reader, selected: Selection, after: int = 0, limit: int = 1_000) -> list[Message]:
    """As a subscription reads: call again from `scanned_to` until the whole log has been looked through."""
    found: list[Message] = []
    while after < reader.last_seq():
        page = reader.scan(selected, after, limit)
        assert page.scanned_to > after
        assert all(after < message.seq <= page.scanned_to for message in page.messages)
        found += page.messages
        after = page.scanned_to
    return found


def scanned(store: Store, selected: Selection = EVERYTHING, after: int = 0) -> list[Message]:
    with store.read() as reader:
        return scan_to_end(reader, selected, after)


def delete(store: Store, seqs: Sequence[int]) -> None:
    with store.write() as writer:
        gone = [kept for kept in writer.oldest(EVERYTHING.pattern, 0, 1_000) if kept.seq in seqs]
        writer.delete_messages(gone)


# --- scan ---------------------------------------------------------------------------------------------------

TOPICS = ["orders", "orders.new", "orders.new.eu", "orders.paid", "ordersX.new", "Orders.new", "stock.low"]


@pytest.mark.parametrize(
    ("pattern", "dialect", "matching"),
    [
        (">", "nats", TOPICS),
        ("orders.new", "nats", ["orders.new"]),
        ("orders.*", "nats", ["orders.new", "orders.paid"]),
        ("orders.>", "nats", ["orders.new", "orders.new.eu", "orders.paid"]),
        ("*.new", "nats", ["orders.new", "ordersX.new", "Orders.new"]),
        ("nothing.here", "nats", []),
        ("#", "amqp", TOPICS),
        ("orders.#", "amqp", ["orders", "orders.new", "orders.new.eu", "orders.paid"]),
        ("#.eu", "amqp", ["orders.new.eu"]),
        ("*.#.new.#", "amqp", ["orders.new", "orders.new.eu", "ordersX.new", "Orders.new"]),
    ],
)
def test_scan_by_pattern(store: Store, pattern: str, dialect: Dialect, matching: list[str]) -> None:
    append(store, *(draft(topic) for topic in TOPICS))

    found = scanned(store, selection(pattern, dialect))
    assert [message.topic for message in found] == matching
    with store.read() as reader:
        assert reader.count(selection(pattern, dialect), 0, 100) == len(matching)


@pytest.mark.parametrize(
    ("entities", "kept"),
    [
        ({}, [1, 2, 3, 4]),
        ({"from_": "ann"}, [1, 2]),
        ({"from_": ["bob", "/^an/"]}, [1, 2, 3]),
        ({"to": "bob"}, [2]),
        ({"broadcast": True}, [1, 4]),
        ({"to": "/^a/", "broadcast": True}, [1, 3, 4]),
        ({"from_": "ann", "broadcast": True}, [1]),
    ],
    ids=str,
)
def test_scan_by_sender_and_receiver(store: Store, entities: dict[str, Any], kept: list[int]) -> None:
    append(
        store,
        draft("a", from_="ann"),
        draft("a", from_="ann", to="bob"),
        draft("a", from_="bob", to="ann"),
        draft("a"),
    )

    assert [message.seq for message in scanned(store, selection(">", **entities))] == kept


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("data.n > 1", [2, 3]),
        ("data.n == 1 or type == 'T'", [1, 3]),
        ("priority >= 5", [2]),
        ("headers.tenant starts with 'ac'", [3]),
        ("data.tags[0] == 'x'", [2]),
        ("not (data.n > 1)", [1, 4]),
        ("seq in [1, 4]", [1, 4]),
        ("from == 'ann'", [4]),
    ],
)
def test_scan_by_content(store: Store, where: str, kept: list[int]) -> None:
    append(
        store,
        draft("a", {"n": 1}),
        draft("a", {"n": 2, "tags": ["x"]}, priority=5),
        draft("a", {"n": 3}, type="T", headers={"tenant": "acme"}),
        draft("a", ["no object"], from_="ann"),
    )

    assert [message.seq for message in scanned(store, selection(">", where=where))] == kept
    with store.read() as reader:
        assert reader.count(selection(">", where=where), 0, 100) == len(kept)


def test_scan_by_all_conditions_together(store: Store) -> None:
    append(
        store,
        draft("a.x", 1, from_="ann"),
        draft("b.x", 1, from_="ann"),
        draft("a.x", 2, from_="ann"),
        draft("a.x", 1, from_="bob"),
        draft("a.y", 1, from_="anna"),
    )

    wanted = selection("a.*", where="data == 1", from_="/^ann/")
    assert [message.seq for message in scanned(store, wanted)] == [1, 5]


def test_scan_stops_at_the_limit_and_goes_on_from_scanned_to(store: Store) -> None:
    append(store, *(draft("even" if n % 2 == 0 else "odd", n) for n in range(1, 21)))

    with store.read() as reader:
        first = reader.scan(selection("even"), 0, 3)
        assert [message.seq for message in first.messages] == [2, 4, 6]
        assert 6 <= first.scanned_to < 8
        rest = scan_to_end(reader, selection("even"), first.scanned_to, limit=3)
    assert [message.seq for message in rest] == [8, 10, 12, 14, 16, 18, 20]


@pytest.mark.parametrize("limit", [1, 2, 7, 1_000])
def test_a_rare_match_is_found_by_scanning_on(store: Store, limit: int) -> None:
    append(store, *(draft("rare" if n % 1_000 == 0 else "common", n) for n in range(1, 3_501)))

    with store.read() as reader:
        found = scan_to_end(reader, selection("*", where="topic == 'rare'"), limit=limit)
    assert [message.seq for message in found] == [1_000, 2_000, 3_000]


def test_scan_looks_no_further_than_upto(store: Store) -> None:
    append(store, *(draft("a", n) for n in range(1, 11)))

    with store.read() as reader:
        page = reader.scan(EVERYTHING, 3, 100, upto=6)
        assert [message.seq for message in page.messages] == [4, 5, 6]
        assert page.scanned_to == 6
        assert reader.scan(selection("none"), 3, 100, upto=6) == ([], 6)
        assert reader.scan(EVERYTHING, 8, 100, upto=1_000).scanned_to == 10


def test_scan_reaches_the_end_over_deleted_messages(store: Store) -> None:
    append(store, *(draft("a", n) for n in range(1, 7)))
    delete(store, [2, 3, 5, 6])

    with store.read() as reader:
        page = reader.scan(EVERYTHING, 0, 100)
    assert ([message.seq for message in page.messages], page.scanned_to) == ([1, 4], 6)


def test_scan_of_nothing_new_stays_where_it_was(store: Store) -> None:
    append(store, draft("a"))

    with store.read() as reader:
        assert reader.scan(EVERYTHING, 1, 10) == ([], 1)


def test_messages_gives_those_that_exist(store: Store) -> None:
    append(store, *(draft("a", n) for n in range(1, 5)))
    delete(store, [2])

    with store.read() as reader:
        found = reader.messages([4, 2, 1, 99, 4])
        assert {seq: message.data for seq, message in found.items()} == {1: 1, 4: 4}
        assert reader.messages([]) == {}
        assert len(reader.messages(range(1, 3_000))) == 3


# --- what retention looks at --------------------------------------------------------------------------------


def test_oldest(store: Store) -> None:
    append(store, draft("a.x", "1"), draft("b", "22"), draft("a.y", "333"), now_ms=NOW)
    append(store, draft("a.x.z", "4"), draft("a.x", "5"), now_ms=NOW + 1)

    with store.read() as reader:
        one_below_a = parse_pattern("a.*")
        assert reader.oldest(one_below_a, 0, 10) == [
            Kept(1, "a.x", 3, NOW),
            Kept(3, "a.y", 5, NOW),
            Kept(5, "a.x", 3, NOW + 1),
        ]
        assert [kept.seq for kept in reader.oldest(one_below_a, 0, 2)] == [1, 3]
        assert [kept.seq for kept in reader.oldest(one_below_a, 1, 10)] == [3, 5]
        assert [kept.seq for kept in reader.oldest(parse_pattern("#.z", "amqp"), 0, 10)] == [4]


def test_oldest_looks_no_further_than_upto(store: Store) -> None:
    append(store, *[draft("b")] * 10, draft("a"))
    few = rows_looked_at(store, lambda reader: reader.oldest(parse_pattern("a"), 0, 10, 11))
    append(store, *[draft("b")] * 5_000, draft("a"))

    with store.read() as reader:
        assert [kept.seq for kept in reader.oldest(parse_pattern("a"), 0, 10, 11)] == [11]
        assert reader.oldest(parse_pattern("a"), 0, 10, 10) == reader.oldest(parse_pattern("*"), 5, 10, 5) == []
        assert [kept.seq for kept in reader.oldest(parse_pattern("#.a", "amqp"), 0, 1, 11)] == [11]
    assert rows_looked_at(store, lambda reader: reader.oldest(parse_pattern("a"), 0, 10, 11)) <= few + 20


def test_oldest_finds_matches_behind_many_others(store: Store) -> None:
    append(store, *(draft("common" if n < 3_000 else "a.rare") for n in range(3_002)))

    with store.read() as reader:
        found = reader.oldest(parse_pattern("*.rare"), 0, 10)
    assert [kept.seq for kept in found] == [3_001, 3_002]


def test_seq_before(store: Store) -> None:
    append(store, draft("a"), draft("a"), now_ms=NOW)
    append(store, draft("a"), now_ms=NOW + 10)
    append(store, draft("a"), draft("a"), now_ms=NOW + 20)

    with store.read() as reader:
        times = [0, NOW, NOW + 1, NOW + 10, NOW + 11, NOW + 20, NOW + 21, TIME_MS_MAX]
        assert [reader.seq_before(at_ms) for at_ms in times] == [0, 0, 2, 2, 3, 3, 5, 5]


def test_seq_before_among_what_is_left(store: Store) -> None:
    for n in range(6):
        append(store, draft("a"), now_ms=NOW + n)
    delete(store, [1, 2, 4])

    with store.read() as reader:
        for n in range(7):
            last_before = reader.seq_before(NOW + n)
            # It may be the seq of a deleted message, as long as it divides what is left at the right place.
            left_before = [kept.seq for kept in reader.oldest(EVERYTHING.pattern, 0, 10) if kept.seq <= last_before]
            assert left_before == [seq for seq in (3, 5, 6) if seq <= n]


COUNTED = [selection("a"), selection("*", where="topic == 'a'"), selection(">", from_="/^ann/")]


@pytest.mark.parametrize("counted", COUNTED, ids=["topic", "where", "regex"])
def test_count_of_a_range(store: Store, counted: Selection) -> None:
    append(store, *(draft("a", from_="anna") if n % 2 else draft("b") for n in range(10)))

    with store.read() as reader:
        assert reader.count(counted, 0, 100) == 5
        assert reader.count(counted, 0, 3) == 1
        assert reader.count(counted, 4, 100) == 3
        assert reader.count(counted, 10, 100) == reader.count(counted, 4, 4) == reader.count(counted, 6, 4) == 0


@pytest.mark.parametrize("counted", COUNTED, ids=["topic", "where", "regex"])
def test_count_looks_at_nothing_outside_its_range(store: Store, counted: Selection) -> None:
    append(store, *[draft("b")] * 10)
    few = rows_looked_at(store, lambda reader: reader.count(counted, 5, 10))
    append(store, *[draft("b")] * 5_000)
    assert rows_looked_at(store, lambda reader: reader.count(counted, 5, 10)) <= few + 20


def test_topics_between(store: Store) -> None:
    append(store, *(draft(topic) for topic in ("a", "b.c", "a", "ü", "d")))
    delete(store, [5])

    with store.read() as reader:
        assert sorted(reader.topics_between(0, 100)) == ["a", "b.c", "ü"]
        assert sorted(reader.topics_between(1, 3)) == ["a", "b.c"]
        assert reader.topics_between(3, 3) == reader.topics_between(4, 5) == []


# --- topic counts and deletion ------------------------------------------------------------------------------


def fold_all(store: Store, limit: int) -> None:
    with store.write() as writer:
        while taken := writer.fold_topic_counts(limit):
            assert taken <= limit


def topic_counts(store: Store) -> list[TopicCount]:
    with store.read() as reader:
        return reader.topic_counts()


def test_topic_counts_are_the_same_before_during_and_after_folding(store: Store) -> None:
    append(store, draft("b", 1), draft("a", "xyz"), draft("B", 1), now_ms=NOW)
    append(store, draft("a", "x"), draft("ä", 1), now_ms=NOW + 7)
    expected = [
        TopicCount("B", 1, 1, 3, NOW),
        TopicCount("a", 2, 8, 4, NOW + 7),
        TopicCount("b", 1, 1, 1, NOW),
        TopicCount("ä", 1, 1, 5, NOW + 7),
    ]

    assert topic_counts(store) == expected
    with store.write() as writer:
        assert writer.fold_topic_counts(2) <= 2
        assert writer.topic_counts() == expected
    assert topic_counts(store) == expected
    fold_all(store, 2)
    assert topic_counts(store) == expected
    append(store, draft("b", 22), now_ms=NOW + 9)
    assert topic_counts(store)[2] == TopicCount("b", 2, 3, 6, NOW + 9)


@pytest.mark.parametrize("folded", ["not", "partly", "wholly"])
def test_deleted_messages_leave_the_counts(store: Store, folded: str) -> None:
    append(store, draft("a", 1), draft("b", 1), draft("a", 22), draft("a", 333))
    with store.write() as writer:
        writer.fold_topic_counts({"not": 0, "partly": 2, "wholly": 100}[folded])
    delete(store, [1, 2, 3])

    expected = [TopicCount("a", 1, 3, 4, NOW), TopicCount("b", 0, 0, 2, NOW)]
    assert topic_counts(store) == expected
    fold_all(store, 1)
    assert topic_counts(store) == expected


def test_a_topic_is_known_after_all_its_messages_are_gone(store: Store) -> None:
    append(store, draft("a", 1), draft("a", 1))
    delete(store, [1, 2])
    fold_all(store, 10)

    assert topic_counts(store) == [TopicCount("a", 0, 0, 2, NOW)]
    append(store, draft("a", 1), now_ms=NOW + 3)
    assert topic_counts(store) == [TopicCount("a", 1, 1, 3, NOW + 3)]


def test_deleting_what_is_gone_already_changes_nothing(store: Store) -> None:
    append(store, draft("a", 1), draft("a", 1), draft("a", 1))
    with store.read() as reader:
        seen = reader.oldest(EVERYTHING.pattern, 0, 2)
    for _ in range(2):
        with store.write() as writer:
            writer.delete_messages(seen)

    assert topic_counts(store) == [TopicCount("a", 1, 1, 3, NOW)]
    assert [message.seq for message in scanned(store)] == [3]


@pytest.mark.parametrize("folded", [0, 2, 100])
def test_the_last_seq_of_a_topic_is_the_one_that_is_counted(store: Store, folded: int) -> None:
    append(store, draft("a", 1), draft("b", 2), draft("a", 3), draft("c", 4))
    with store.write() as writer:
        writer.fold_topic_counts(folded)
        assert [writer.topic_max_seq(topic) for topic in ("a", "b", "c", "never")] == [3, 2, 4, 0]
    append(store, draft("b", 5))
    with store.write() as writer:
        writer.append([draft("c", 6)], NOW, DedupeWindow())
        assert writer.topic_max_seq("c") == 6
        writer.delete_messages(writer.oldest(parse_pattern("a"), 0, 2))
    for _ in range(2):
        with store.read() as reader:
            assert [reader.topic_max_seq(topic) for topic in ("a", "b", "c", "never")] == [3, 5, 6, 0]
            assert {each.topic: each.last_seq for each in reader.topic_counts()} == {"a": 3, "b": 5, "c": 6}


def test_many_messages_are_deleted_at_once(store: Store) -> None:
    append(store, *(draft("a" if n % 3 else "b", n) for n in range(1, 3_001)))
    with store.write() as writer:
        writer.delete_messages(writer.oldest(parse_pattern("a"), 0, 3_000))

    assert [message.seq for message in scanned(store)] == list(range(3, 3_001, 3))
    with store.read() as reader:
        assert [(counted.topic, counted.count) for counted in reader.topic_counts()] == [
            ("a", 0),
            ("b", 1_000),
        ]


@pytest.mark.parametrize(
    "selected",
    [
        EVERYTHING,
        selection("a.b"),
        selection("*.b"),
        selection(">", from_="/^a/"),
        selection(">", from_="ann", where="data.n > 2"),
        selection("*.b", where="data.n > 2"),
    ],
)
def test_times_are_those_of_the_messages_that_a_scan_finds(store: Store, selected: Selection) -> None:
    for number in range(30):
        topic, sender = ("a.b", "a.c", "b.b")[number % 3], ("ann", "bob", None)[number % 4 % 3]
        options = {} if sender is None else {"from_": sender}
        append(store, draft(topic, {"n": number}, **options), now_ms=NOW + number)
    expected = [(message.seq, message.published_ms) for message in scanned(store, selected, 3) if message.seq <= 25]
    assert expected
    with store.read() as reader:
        for limit in (1, 4, 100):
            found, after = [], 3
            while after < 25:
                page = reader.scan_times(selected, after, limit, 25)
                assert after < page.scanned_to <= 25
                found += page.found
                after = page.scanned_to
            assert found == expected
        assert reader.scan_times(selected, 25, 5, 25) == ([], 25)
