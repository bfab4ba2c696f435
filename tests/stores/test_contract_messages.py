"""What every store promises about publishing: seqs, what a message carries, and repeated ids."""

import uuid
from typing import Any

import pytest

from headwater.delivery.publishing import DedupeWindow
from headwater.formats import TIME_MS_MAX
from headwater.message import DATA_BYTES_MAX, ID_CHARS_MAX, Draft, Message, make_draft
from headwater.ports.records import Appended, Selection, TopicCount
from headwater.ports.store import Store
from headwater.topics import TOPIC_BYTES_MAX, parse_pattern

NOW = 1_700_000_000_000
WINDOW = DedupeWindow(span_ms=60_000, count=1_000)
EVERYTHING = Selection(parse_pattern(">"))


def draft(topic: str, data: Any = None, **options: Any) -> Draft:
    return make_draft(topic, data, options, NOW)


def append(store: Store, *drafts: Draft, now_ms: int = NOW, window: DedupeWindow = WINDOW) -> Appended:
    with store.write() as writer:
        return writer.append(drafts, now_ms, window)


def stored(store: Store) -> list[Message]:
    with store.read() as reader:
        return reader.scan(EVERYTHING, 0, 1_000).messages


def data_of(store: Store) -> list[Any]:
    return [message.data for message in stored(store)]


def delete_all(store: Store) -> None:
    with store.write() as writer:
        writer.delete_messages(writer.oldest(EVERYTHING.pattern, 0, 1_000))


# --- append -------------------------------------------------------------------------------------------------


def test_an_empty_log(store: Store) -> None:
    with store.read() as reader:
        assert reader.last_seq() == 0
        assert reader.scan(EVERYTHING, 0, 10) == ([], 0)
        assert reader.messages([1, 2]) == {}
        assert reader.oldest(EVERYTHING.pattern, 0, 10) == []
        assert reader.seq_before(NOW) == 0
        assert reader.count(EVERYTHING, 0, 10) == 0
        assert reader.topic_counts() == []


def test_seqs_follow_each_other_within_and_between_appends(store: Store) -> None:
    first = append(store, draft("a", 1), draft("b", 2))
    second = append(store, draft("a", 3))
    third = append(store)

    assert (first.seqs, second.seqs, third.seqs) == ([1, 2], [3], [])
    assert first.duplicates == second.duplicates == frozenset()
    with store.read() as reader:
        assert reader.last_seq() == 3
    assert data_of(store) == [1, 2, 3]


def test_a_writer_sees_what_it_has_written(store: Store) -> None:
    with store.write() as writer:
        writer.append([draft("a", 1)], NOW, WINDOW)
        writer.append([draft("a", 2)], NOW, WINDOW)
        assert writer.last_seq() == 2
        assert [message.data for message in writer.scan(EVERYTHING, 0, 10).messages] == [1, 2]
        assert writer.topic_counts() == [TopicCount("a", 2, 2, 2, NOW)]


def test_seq_is_never_used_twice_even_if_everything_was_deleted(store: Store) -> None:
    append(store, draft("a"), draft("a"), draft("a"))
    delete_all(store)

    assert data_of(store) == []
    with store.read() as reader:
        assert reader.last_seq() == 3
    assert append(store, draft("a")).seqs == [4]


def test_seq_goes_on_if_the_last_ones_are_deleted_with_the_append_itself(store: Store) -> None:
    append(store, draft("a"))
    with store.write() as writer:
        writer.append([draft("a"), draft("a")], NOW, WINDOW)
        writer.delete_messages(writer.oldest(EVERYTHING.pattern, 1, 10))
        assert writer.last_seq() == 3
    assert append(store, draft("a")).seqs == [4]


# --- what a message carries ---------------------------------------------------------------------------------


def test_every_header_comes_back(store: Store) -> None:
    append(
        store,
        draft(
            "orders.new",
            {"n": 1},
            id="order-1",
            headers={"tenant": "acme", "nested": {"deep": [1, None, "ü"]}},
            from_="shop",
            to="till",
            reply_to="shop.replies",
            correlation_id="c-9",
            type="OrderPlaced",
            version=3,
            content_type="application/json",
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            priority=-7,
            delay=1.5,
            ttl=60,
        ),
        now_ms=NOW + 5,
    )

    with store.read() as reader:
        by_scan, by_seq = reader.scan(EVERYTHING, 0, 10).messages[0], reader.messages([1])[1]
    assert by_scan == by_seq
    assert by_seq.data == {"n": 1}
    assert by_seq.headers == {"tenant": "acme", "nested": {"deep": [1, None, "ü"]}}
    assert (by_seq.seq, by_seq.id, by_seq.topic) == (1, "order-1", "orders.new")
    assert (by_seq.from_, by_seq.to, by_seq.reply_to) == ("shop", "till", "shop.replies")
    assert (by_seq.correlation_id, by_seq.type, by_seq.version) == ("c-9", "OrderPlaced", 3)
    assert by_seq.content_type == "application/json"
    assert by_seq.traceparent == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert (by_seq.priority, by_seq.deliver_ms, by_seq.expires_ms) == (-7, NOW + 1_500, NOW + 60_000)
    assert (by_seq.published_ms, by_seq.size) == (NOW + 5, len(b'{"n":1}'))


def test_what_was_not_given_is_absent(store: Store) -> None:
    append(store, draft("a", None))

    (message,) = stored(store)
    assert message.data is None
    assert message.headers == {}
    assert message.priority == 0
    assert {message.deliver_ms, message.expires_ms, message.from_, message.to, message.reply_to} == {None}
    assert {message.correlation_id, message.type, message.version} == {None}
    assert {message.content_type, message.traceparent} == {None}


@pytest.mark.parametrize(
    "data",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        0.1,
        -1.5e300,
        "",
        "'; DROP TABLE messages; --",
        "null \x00 byte, line\nend, 漢字, 🎈, \u2028",
        [],
        {},
        {"": {"a.b": [[], [{}], "ключ"]}, "日本": None},
        {"deep": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]},
    ],
    ids=ascii,
)
def test_data_comes_back_as_it_was(store: Store, data: Any) -> None:
    append(store, draft("a", data))

    (message,) = stored(store)
    assert message.data == data
    assert type(message.data) is type(data)
    assert message.size == len(message.data_json.encode())


def test_the_largest_data_comes_back(store: Store) -> None:
    largest = "é" * ((DATA_BYTES_MAX - 2) // 2)
    append(store, draft("a", largest))

    (message,) = stored(store)
    assert message.size == DATA_BYTES_MAX
    assert message.data == largest


def test_extreme_numbers_and_names_come_back(store: Store) -> None:
    append(
        store,
        draft("ü.漢字", id="🎈" * 128, priority=1_000_000, expires_at=TIME_MS_MAX / 1000, from_="'\"%_"),
    )

    (message,) = stored(store)
    assert (message.topic, message.id, message.from_) == ("ü.漢字", "🎈" * 128, "'\"%_")
    assert (message.priority, message.expires_ms) == (1_000_000, TIME_MS_MAX)


def test_what_has_to_be_escaped_comes_back_as_it_was(store: Store) -> None:
    odd = "back\\slash \\N \\. tab\t new\nline\r\x01 \"quotes\" 'single' %s {} €"
    plain = [draft(topic, odd) for topic in ("a\\b", "a\\N", 'a"b', "a'b.%s.{}")]
    full = draft("a\\n", {odd: odd}, id=odd, from_=odd, headers={"h": odd}, type="\\N")
    append(store, *plain, draft("a", odd))
    append(store, full)

    *first, last = stored(store)
    assert [message.topic for message in first] == ["a\\b", "a\\N", 'a"b', "a'b.%s.{}", "a"]
    assert {message.data for message in first} == {odd}
    assert (last.topic, last.data, last.id, last.from_, last.type) == ("a\\n", {odd: odd}, odd, odd, "\\N")
    assert last.headers == {"h": odd}


def test_ids_that_were_not_given_are_uuids_of_version_7_and_stay_the_same(store: Store) -> None:
    append(store, draft("a"), draft("a"), now_ms=NOW)

    ids = [uuid.UUID(message.id) for message in stored(store)]
    assert [id.version for id in ids] == [7, 7]
    assert [id.variant for id in ids] == [uuid.RFC_4122] * 2
    assert [id.int >> 80 for id in ids] == [NOW, NOW]
    assert ids[0] < ids[1]
    assert [uuid.UUID(message.id) for message in stored(store)] == ids


# --- dedupe -------------------------------------------------------------------------------------------------


def test_a_repeated_id_gets_the_first_seq_and_is_not_stored(store: Store) -> None:
    append(store, draft("a", "first", id="x"))
    again = append(store, draft("a", "other"), draft("a", "repeat", id="x"), draft("a", "last", id="y"))

    assert again == Appended([2, 1, 3], frozenset({1}))
    assert data_of(store) == ["first", "other", "last"]


def test_a_repeat_within_one_call_gets_the_first_seq(store: Store) -> None:
    drafts = [draft("a", 1, id="x"), draft("a", 2, id="x"), draft("a", 3), draft("a", 4, id="x")]

    assert append(store, *drafts) == Appended([1, 1, 2, 1], frozenset({1, 3}))
    assert data_of(store) == [1, 3]


def test_a_repeat_within_one_call_is_one_even_if_nothing_is_remembered(store: Store) -> None:
    drafts = [draft("a", 1, id="x"), draft("a", 2, id="x")]

    assert append(store, *drafts, window=DedupeWindow(0, 0)) == Appended([1, 1], frozenset({1}))


def test_an_id_belongs_to_its_topic(store: Store) -> None:
    append(store, draft("a.x", "another's", id="order-17"))

    assert append(store, draft("orders.new", "ours", id="order-17")) == Appended([2], frozenset())
    assert append(store, draft("orders.new", "again", id="order-17")) == Appended([2], frozenset({0}))
    assert append(store, draft("a.x", "again", id="order-17")) == Appended([1], frozenset({0}))
    assert data_of(store) == ["another's", "ours"]


def test_an_id_belongs_to_its_topic_within_one_call_too(store: Store) -> None:
    append(store, draft("a", 1, id="x"))
    topics = ["b", "a", "b", "c", "a", "c"]

    again = append(store, *(draft(topic, at, id="x") for at, topic in enumerate(topics)))
    assert again == Appended([2, 1, 2, 3, 1, 3], frozenset({1, 2, 4, 5}))
    assert data_of(store) == [1, 0, 3]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a", "b#x"), ("a", "x")),
        (("a", "b x"), ("a.b", "x")),
        (("a", "b.x"), ("a.b", "x")),
        (("a", " x"), ("a", "x")),
        (("a", "A"), ("A", "a")),
    ],
)
def test_a_topic_and_an_id_are_distinguished(store: Store, first: tuple[str, str], second: tuple[str, str]) -> None:
    """No choice of an id on one topic stands for an id on another."""
    seqs = [append(store, draft(topic, id=id)).seqs for topic, id in (first, second, first, second)]

    assert seqs == [[1], [2], [1], [2]]


def test_the_longest_ids_on_the_longest_topics(store: Store) -> None:
    topic, id = "é" * (TOPIC_BYTES_MAX // 2), "\U0001f600" * ID_CHARS_MAX

    assert [append(store, draft(topic, id=id)).seqs for _ in range(2)] == [[1], [1]]


def test_an_id_that_is_too_old_on_one_topic_is_remembered_on_another(store: Store) -> None:
    window = DedupeWindow(span_ms=1_000, count=100)
    append(store, draft("a", id="x"), now_ms=NOW, window=window)
    append(store, draft("b", id="x"), now_ms=NOW + 1_000, window=window)

    assert append(store, draft("a", id="x"), draft("b", id="x"), now_ms=NOW + 1_001, window=window).seqs == [3, 2]
    with store.write() as writer:
        assert writer.forget_ids(window, NOW + 2_001, 10) == 1
    assert append(store, draft("a", id="x"), draft("b", id="x"), now_ms=NOW + 2_001, window=window).seqs == [3, 4]


def test_messages_without_id_are_never_repeats(store: Store) -> None:
    append(store, draft("a", 1), draft("a", 1))

    assert data_of(store) == [1, 1]


def test_an_id_is_remembered_up_to_the_span_of_the_window(store: Store) -> None:
    window = DedupeWindow(span_ms=1_000, count=100)
    append(store, draft("a", id="x"), window=window)

    assert append(store, draft("a", id="x"), now_ms=NOW + 1_000, window=window).seqs == [1]
    assert append(store, draft("a", id="x"), now_ms=NOW + 1_001, window=window).seqs == [2]
    # The second one is what is remembered now, from its own time on.
    assert append(store, draft("a", id="x"), now_ms=NOW + 2_001, window=window).seqs == [2]
    assert append(store, draft("a", id="x"), now_ms=NOW + 2_002, window=window).seqs == [3]


def test_an_id_is_remembered_for_so_many_messages(store: Store) -> None:
    window = DedupeWindow(span_ms=1_000, count=3)
    append(store, draft("a", id="x"), draft("a"), draft("a"), window=window)

    assert append(store, draft("a", id="x"), window=window).seqs == [1]
    append(store, draft("a"), window=window)
    assert append(store, draft("a", id="x"), window=window).seqs == [5]


def test_an_id_is_remembered_after_its_message_was_deleted(store: Store) -> None:
    append(store, draft("a", id="x"))
    delete_all(store)

    assert append(store, draft("a", id="x")) == Appended([1], frozenset({0}))
    assert data_of(store) == []
    assert append(store, draft("b", id="x")) == Appended([2], frozenset()), "on its own topic"


def test_forgotten_ids_are_those_outside_the_window(store: Store) -> None:
    append(store, draft("a", id="old"), now_ms=NOW)
    append(store, draft("a", id="new"), now_ms=NOW + 500)
    narrow = DedupeWindow(span_ms=1_000, count=100)

    with store.write() as writer:
        assert writer.forget_ids(narrow, NOW + 1_000, 10) == 0
        assert writer.forget_ids(narrow, NOW + 1_001, 10) == 1
        assert writer.forget_ids(narrow, NOW + 1_001, 10) == 0
    # A wide window would have remembered both.
    assert append(store, draft("a", id="old"), draft("a", id="new")).seqs == [3, 2]


def test_ids_are_forgotten_by_count_and_not_more_than_asked(store: Store) -> None:
    append(store, *(draft("a", id=f"id-{n}") for n in range(10)))
    last_four = DedupeWindow(span_ms=1_000, count=4)

    with store.write() as writer:
        assert [writer.forget_ids(last_four, NOW, 4) for _ in range(3)] == [4, 2, 0]
    again = append(store, *(draft("a", id=f"id-{n}") for n in range(10)))
    assert again == Appended([11, 12, 13, 14, 15, 16, 7, 8, 9, 10], frozenset({6, 7, 8, 9}))
