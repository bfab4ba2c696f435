"""What is not needed is not read: messages without their data, rows by token, and claims within a budget of bytes."""

from __future__ import annotations

import msgspec

from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.records import DeliveryRow, Selection
from headwater.ports.store import Store
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
ALL = Selection(parse_pattern(">"))
LARGE = 200_000


def publish(store: Store, count: int, data: object = "x", **options: object) -> None:
    drafts = [make_draft("a.b", data, options, NOW) for _ in range(count)]  # type: ignore[arg-type]
    with store.write() as writer:
        writer.append(drafts, NOW, DedupeWindow(0, 0))


def test_heads_are_messages_without_their_data(store: Store) -> None:
    publish(store, 1, {"deep": "x" * 100}, type="t", version=3, from_="me", to="you", headers={"a": 1}, id="given")
    publish(store, 2)
    with store.read() as reader:
        heads, whole = reader.heads([1, 2, 99]), reader.messages([1, 2])
    assert [*heads] == [1, 2]
    for seq, head in heads.items():
        nothing = {"raw": whole[seq].raw, "raw_headers": whole[seq].raw_headers}
        assert msgspec.structs.replace(head, **nothing) == whole[seq]
        assert (bytes(head.raw), bytes(head.raw_headers)) == (b"null", b"null")
    with store.read() as reader:
        assert reader.heads([]) == {}


def test_rows_by_the_token_they_were_handed_out_under(store: Store) -> None:
    publish(store, 4)
    rows = [DeliveryRow(1, 1, NOW, 7), DeliveryRow(2, 3, NOW + 9, 7, 5, "key"), DeliveryRow(3, 1, NOW, 8)]
    with store.write() as writer:
        writer.put_deliveries("s", rows)
        writer.put_deliveries("other", [DeliveryRow(1, 1, NOW, 7)])
    with store.read() as reader:
        assert sorted(reader.deliveries_by("s", 7), key=lambda row: row.seq) == rows[:2]
        assert reader.deliveries_by("s", 9) == reader.deliveries_by("nothing", 7) == []
    with store.write() as writer:
        assert sorted(writer.deliveries_by("s", 7), key=lambda row: row.seq) == rows[:2]


def test_a_scan_within_a_budget_of_bytes_goes_on_where_it_ended(store: Store) -> None:
    publish(store, 50, "x" * LARGE)
    publish(store, 50)
    found, after, scans = list[int](), 0, 0
    with store.read() as reader:
        while after < 100:
            messages, after = reader.scan(ALL, after, 1_000, None, 2 * LARGE)
            assert messages
            found += [message.seq for message in messages]
            scans += 1
    assert found == list(range(1, 101))
    assert scans > 2


def test_due_rows_within_a_budget_of_bytes(store: Store) -> None:
    publish(store, 60, "x" * LARGE)
    with store.write() as writer:
        writer.put_deliveries("s", [DeliveryRow(seq, 1, NOW, 0) for seq in range(1, 61)])
    with store.read() as reader:
        due = reader.due("s", NOW, 60, "seq", bytes_max=2 * LARGE)
        assert [row.seq for row, _ in due] == list(range(1, len(due) + 1))
        assert all(message is not None and message.seq == row.seq for row, message in due)
        assert 1 <= len(due) < 40
        assert len(reader.due("s", NOW, 60, "seq")) == 60
