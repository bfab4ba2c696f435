"""What every store promises of a selection that takes time: the same answer as without haste, in bounded looks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater.delivery.filters import parse_entity_filter, parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.message import Message, make_draft
from headwater.ports.records import Selection
from headwater.ports.store import Store
from headwater.stores import sql
from headwater.stores.sql import SIFT_BYTES_MAX, SMALL_BYTES_MAX
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000


def publish(store: Store, *messages: tuple[str, Any, str | None]) -> None:
    with store.write() as writer:
        drafts = [make_draft(topic, data, {"from_": from_}, NOW) for topic, data, from_ in messages]
        writer.append(drafts, NOW, DedupeWindow())


def scanned(store: Store, selection: Selection, limit: int = 100) -> tuple[list[int], int]:
    """All that matches, and how many looks it took."""
    found: list[int] = []
    after = looks = 0
    with store.read() as reader:
        while after < reader.last_seq():
            messages, to = reader.scan(selection, after, limit)
            assert to > after, "every look gets further"
            found += [message.seq for message in messages]
            after, looks = to, looks + 1
    return found, looks


@pytest.mark.parametrize("padding", [0, SMALL_BYTES_MAX, 100_000], ids=["small", "just large", "large"])
@pytest.mark.parametrize(
    ("where", "from_"),
    [
        ("data.n >= 3 and data.n < 6", None),
        ("data.text contains 'xyxz' or data.n in [0, 7]", None),
        ("not (data.text starts with 'xy') or data.n == 2", None),
        (None, "/^b.b$/"),
        ("data.n != 4", ["/^b.b$/", "ann"]),
    ],
)
def test_the_same_by_the_database_and_by_python(store: Store, where: str | None, from_: Any, padding: int) -> None:
    senders = ["bob", "ann", None, "bab", "bobby"]
    publish(
        store, *(("a.b", {"n": n, "text": "xy" * (padding // 2) + "xz" * (n % 2)}, senders[n % 5]) for n in range(9))
    )
    publish(store, ("other", {"n": 3}, "bob"))
    selection = Selection(
        parse_pattern("a.*"), parse_entity_filter(from_=from_), None if where is None else parse_where(where)
    )
    with store.read() as reader:
        expected = [seq for seq, message in reader.messages(range(1, 11)).items() if selection.keeps(message)]
        assert reader.count(selection, 0, 10) == len(expected)
    assert expected
    assert scanned(store, selection)[0] == sorted(expected)
    assert scanned(store, selection, limit=1)[0] == sorted(expected)


def test_a_look_ends_after_so_many_bytes(store: Store) -> None:
    publish(store, *(("a", {"n": n, "text": "x" * (SIFT_BYTES_MAX // 2)}, None) for n in range(6)))
    found, looks = scanned(store, Selection(parse_pattern("a"), where=parse_where("data.n == 5")))
    assert found == [6]
    assert looks >= 3


def test_a_look_ends_after_its_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "SIFT_S_MAX", -1.0)
    publish(store, *(("a", n, "bob") for n in range(5)))
    assert scanned(store, Selection(parse_pattern("a"), parse_entity_filter(from_="/b$/"))) == ([1, 2, 3, 4, 5], 5)


def test_a_large_payload_is_decoded_once_for_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, ("a", {"n": 1, "text": "x" * 100_000}, None))
    decoded: list[int] = []
    once = sql.Decoded.__init__

    def counted(self: sql.Decoded, message: Any) -> None:
        decoded.append(message.seq)
        once(self, message)

    monkeypatch.setattr(sql.Decoded, "__init__", counted)
    for n in range(20):
        assert scanned(store, Selection(parse_pattern("a"), where=parse_where(f"data.n == {n}")))[0] == [1] * (n == 1)
    assert decoded == [1]


def test_two_copies_of_a_log_do_not_share_what_was_decoded() -> None:
    """They have the same salt, and may give the same seq at the same time to different messages."""
    candidate = sql.Candidate(1, "a", None, None, 100_000, NOW, False)
    selection = Selection(parse_pattern("a"), where=parse_where("data.n == 1"))

    def found(log: object, n: int) -> list[int]:
        message = Message(1, "a", msgspec.Raw(b'{"n": %d}' % n), NOW, 100_000, 0)
        return sql.sift(selection, [candidate], 10, log, lambda _: message).seqs

    assert found(object(), 1) == [1]
    assert found(object(), 2) == []
