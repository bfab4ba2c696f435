"""What every store promises about dead letters."""

from typing import Any

import msgspec
import pytest

from headwater.delivery.publishing import DedupeWindow
from headwater.delivery.retry import Reason
from headwater.message import Message, make_draft
from headwater.ports.records import DeadLetter, DeadLetterQuery, SubscriptionRecord, SubscriptionSpec
from headwater.ports.store import LETTERS_BYTES_MAX, Store
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
ALL = DeadLetterQuery()


def publish(store: Store, topic: str, data: Any = None, **options: Any) -> Message:
    with store.write() as writer:
        draft = make_draft(topic, data, options, NOW)
        (seq,) = writer.append([draft], NOW, DedupeWindow()).seqs
        return writer.messages([seq])[seq]


def letter(message: Message, subscription: str = "s", reason: Reason = "rejected", **fields: Any) -> DeadLetter:
    return DeadLetter(0, subscription, message, reason, attempts=1, died_ms=NOW, **fields)


def dead_letter(store: Store, *letters: DeadLetter) -> list[int]:
    with store.write() as writer:
        return writer.save_dead_letters(letters)


def found(store: Store, query: DeadLetterQuery = ALL, after: int = 0, limit: int = 100) -> list[DeadLetter]:
    with store.read() as reader:
        return reader.dead_letters(query, after, limit)


def found_ids(store: Store, query: DeadLetterQuery = ALL, after: int = 0, limit: int = 100) -> list[int]:
    return [letter.id for letter in found(store, query, after, limit)]


def plain(dead_lettered: DeadLetter) -> dict[str, Any]:
    """For comparing: a dead letter may keep its message in another form, as long as it says the same."""
    fields = {name: getattr(dead_lettered, name) for name in dead_lettered.__struct_fields__}
    return fields | {"message": dead_lettered.message.to_json()}


def test_no_dead_letters(store: Store) -> None:
    assert found(store) == []
    assert dead_letter(store) == []


def test_a_dead_letter_comes_back_whole(store: Store) -> None:
    message = publish(
        store,
        "orders.new",
        {"deep": [1, 2.5, None, "漢字\x00"]},
        headers={"tenant": "acme"},
        from_="shop",
        to="till",
        reply_to="r",
        correlation_id="c",
        type="T",
        version=2,
        content_type="application/json",
        traceparent="00-1-2-01",
        priority=-3,
        delay=1,
        ttl=2,
    )
    dead_lettered = DeadLetter(
        id=0,
        subscription="s",
        message=message,
        reason="max_attempts",
        attempts=5,
        died_ms=NOW + 9,
        error="ValueError: ü",
        stack="Traceback …\n  line 2",
        handler="shop.handle",
        redrives=2,
        redriving=True,
        redrive_error="still broken",
    )
    (id,) = dead_letter(store, dead_lettered)

    assert id > 0
    (read,) = found(store)
    assert plain(read) == plain(msgspec.structs.replace(dead_lettered, id=id))
    assert read.message.id == message.id
    assert read.message.data == message.data


def test_what_was_not_given_is_absent(store: Store) -> None:
    dead_lettered = letter(publish(store, "a"), reason="expired")
    (id,) = dead_letter(store, dead_lettered)

    (read,) = found(store)
    assert plain(read) == plain(msgspec.structs.replace(dead_lettered, id=id))
    assert (read.error, read.stack, read.handler, read.redrive_error) == (None, None, None, None)
    assert (read.redrives, read.redriving) == (0, False)


def test_a_dead_letter_outlives_its_message_and_its_subscription(store: Store) -> None:
    message = publish(store, "a", {"n": 1}, id="given")
    with store.write() as writer:
        writer.save_subscription(SubscriptionRecord("s", SubscriptionSpec(">"), NOW, NOW))
        (id,) = writer.save_dead_letters([letter(message)])
    with store.write() as writer:
        writer.delete_messages(writer.oldest(parse_pattern(">"), 0, 10))
        writer.delete_subscription("s")

    (read,) = found(store)
    assert read.id == id
    assert read.message.to_json() == message.to_json()


def test_ids_rise_and_are_not_used_twice(store: Store) -> None:
    message = publish(store, "a")
    first = dead_letter(store, letter(message), letter(message))
    second = dead_letter(store, letter(message))
    with store.write() as writer:
        writer.remove_dead_letters([*first, *second])
    third = dead_letter(store, letter(message))

    ids = [*first, *second, *third]
    assert ids == sorted(set(ids))


def test_a_letter_with_an_id_replaces_the_stored_one(store: Store) -> None:
    message = publish(store, "a", 1)
    first, second = dead_letter(store, letter(message, error="one"), letter(message, error="two"))
    (stored, _) = found(store)
    changed = msgspec.structs.replace(
        stored, redriving=True, redrives=1, error="again", attempts=7, reason="timeout", died_ms=NOW + 5
    )
    new = letter(message, error="three")

    ids = dead_letter(store, changed, new)
    assert ids[0] == first
    assert ids[1] > second
    assert [plain(read) for read in found(store, DeadLetterQuery(ids=(first,)))] == [plain(changed)]
    assert [read.error for read in found(store)] == ["again", "two", "three"]


def test_removing(store: Store) -> None:
    message = publish(store, "a")
    first, second, third = dead_letter(store, letter(message), letter(message), letter(message))
    with store.write() as writer:
        writer.remove_dead_letters([first, third, 999])
        writer.remove_dead_letters([])

    assert found_ids(store) == [second]


@pytest.fixture
def many(store: Store) -> list[int]:
    """Five letters that differ in everything a query asks for."""
    return dead_letter(
        store,
        letter(publish(store, "orders.new", type="T"), error="ValueError: bad total 17"),
        letter(publish(store, "orders.new.eu", type="U"), "other", "timeout"),
        letter(publish(store, "stock.low", type="T"), "other", "max_attempts", error="KeyError: 'total'"),
        letter(publish(store, "orders.paid"), "s", "max_attempts", error="line one\nValueError: late"),
        letter(publish(store, "orders.paid"), "S", "expired", error=""),
    )


@pytest.mark.parametrize(
    ("query", "positions"),
    [
        (DeadLetterQuery(), [0, 1, 2, 3, 4]),
        (DeadLetterQuery(subscription="s"), [0, 3]),
        (DeadLetterQuery(subscription="none"), []),
        (DeadLetterQuery(seqs=(1, 99)), [0]),
        (DeadLetterQuery(seqs=()), []),
        (DeadLetterQuery(topic=parse_pattern("orders.*")), [0, 3, 4]),
        (DeadLetterQuery(topic=parse_pattern("#.eu", "amqp")), [1]),
        (DeadLetterQuery(topic=parse_pattern("stock.low")), [2]),
        (DeadLetterQuery(type="T"), [0, 2]),
        (DeadLetterQuery(reason="max_attempts"), [2, 3]),
        (DeadLetterQuery(subscription="other", type="T", reason="max_attempts"), [2]),
        (DeadLetterQuery(subscription="other", topic=parse_pattern("orders.>")), [1]),
        (DeadLetterQuery(subscription="s", reason="timeout"), []),
        (DeadLetterQuery(ids=()), []),
    ],
    ids=str,
)
def test_query(store: Store, many: list[int], query: DeadLetterQuery, positions: list[int]) -> None:
    assert found_ids(store, query) == [many[position] for position in positions]


def test_query_by_ids(store: Store, many: list[int]) -> None:
    assert found_ids(store, DeadLetterQuery(ids=(many[3], many[1], 999, many[1]))) == [many[1], many[3]]
    assert found_ids(store, DeadLetterQuery(ids=tuple(many), reason="expired")) == [many[4]]
    assert found_ids(store, DeadLetterQuery(ids=tuple(range(10_000, 13_000)))) == []


@pytest.mark.parametrize(
    "query",
    [ALL, DeadLetterQuery(topic=parse_pattern("*.odd"))],
    ids=["all", "topic"],
)
def test_paging(store: Store, query: DeadLetterQuery) -> None:
    messages = [publish(store, "a.odd"), publish(store, "a.even.more")]
    dead_letter(store, *(letter(messages[n % 2], error=f"error {n}") for n in range(2_500)))
    expected = found_ids(store, query, limit=10_000)

    paged: list[int] = []
    while page := found_ids(store, query, after=paged[-1] if paged else 0, limit=100):
        assert len(page) <= 100
        paged += page
    assert len(expected) >= 250
    assert paged == expected == sorted(set(expected))


def test_letters_are_counted_by_each_column(store: Store) -> None:
    first, second = publish(store, "a", type="t"), publish(store, "b")
    long = "x" * 200
    dead_letter(
        store,
        letter(first, error="one\ntwo"),
        letter(first, "other", "expired", error="one"),
        letter(second, redriving=True, error=long),
        letter(second),
    )
    with store.read() as reader:

        def counted(by: Any, query: DeadLetterQuery = ALL, limit: int = 100) -> list[tuple[str, int]]:
            return [*reader.count_dead_letters(query, by, limit).items()]

        assert counted("reason") == [("rejected", 3), ("expired", 1)]
        assert counted("subscription") == [("s", 3), ("other", 1)]
        assert counted("topic") == [("a", 2), ("b", 2)]
        assert counted("type") == [("", 2), ("t", 2)]
        assert counted("redriving") == [("0", 3), ("1", 1)]
        assert counted("error") == [("one", 2), ("", 1), (long[:120], 1)]
        assert counted("reason", limit=1) == [("rejected", 3)]
        assert counted("reason", DeadLetterQuery(subscription="other", topic=parse_pattern("a"))) == [("expired", 1)]
        assert counted("reason", DeadLetterQuery(ids=())) == []


def test_a_page_has_so_many_bytes(store: Store) -> None:
    message = publish(store, "a", "x" * (LETTERS_BYTES_MAX // 4))
    ids = dead_letter(
        store, *[letter(message)] * 9, letter(message, error="e" * (2 * LETTERS_BYTES_MAX)), letter(message)
    )
    pages: list[list[int]] = []
    while page := found_ids(store, after=pages[-1][-1] if pages else 0):
        pages.append(page)
    assert [len(page) for page in pages] == [4, 4, 2, 1], "one is enough to exceed it"
    assert [id for page in pages for id in page] == ids


def test_redrives_end_together(store: Store) -> None:
    message = publish(store, "a")
    dead_letter(store, letter(message, redriving=True), letter(message, "other", redriving=True), letter(message))
    with store.write() as writer:
        writer.end_redrives("s", "gone")
    reported = [(each.subscription, each.redriving, each.redrive_error) for each in found(store)]
    assert reported == [("s", False, "gone"), ("other", True, None), ("s", False, None)]
