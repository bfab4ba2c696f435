"""What every store promises about subscriptions and the delivery rows they keep."""

from typing import Any

import pytest
from rows_looked_at import rows_looked_at

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow
from headwater.delivery.retry import RetryPolicy
from headwater.delivery.window import WindowState
from headwater.message import make_draft
from headwater.ports.records import (
    DeliveryCounts,
    DeliveryRow,
    Gap,
    Order,
    SubscriptionRecord,
    SubscriptionSpec,
)
from headwater.ports.store import Store
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
LATER = NOW + 1_000


def subscribe(store: Store, *ids: str) -> None:
    with store.write() as writer:
        for id in ids:
            writer.save_subscription(SubscriptionRecord(id, SubscriptionSpec(">"), NOW, NOW))


def publish(store: Store, count: int) -> None:
    with store.write() as writer:
        writer.append([make_draft("a", n + 1, {}, NOW) for n in range(count)], NOW, DedupeWindow())


def put(store: Store, *rows: DeliveryRow, subscription: str = "s") -> None:
    with store.write() as writer:
        writer.put_deliveries(subscription, rows)


def waiting(seq: int, due_ms: int = NOW, **fields: Any) -> DeliveryRow:
    return DeliveryRow(seq, 0, due_ms, **fields)


def leased(seq: int, until_ms: int = LATER, **fields: Any) -> DeliveryRow:
    return DeliveryRow(seq, 1, until_ms, token=7, **fields)


def due_seqs(store: Store, now_ms: int = NOW, limit: int = 100, order: Order = "seq") -> list[int]:
    with store.read() as reader:
        return [due.row.seq for due in reader.due("s", now_ms, limit, order)]


def next_due_ms(store: Store) -> int | None:
    with store.read() as reader:
        return reader.next_due_ms("s")


# --- subscriptions ------------------------------------------------------------------------------------------

FULL_RECORD = SubscriptionRecord(
    id="shop/ü 🎈",
    spec=SubscriptionSpec(
        pattern="orders.#",
        dialect="amqp",
        entities={"from": ["/^a/", "b"], "broadcast": True},
        where="data.n > 1 and type == 'T'",
        mode="shared",
        order="priority",
        order_key="data.customer",
        ack_wait_ms=1,
        extension_ms_max=2,
        lease_ms=3,
        max_in_flight=4,
        inactive_ms=5,
        dead_letter_expired=False,
        retry=RetryPolicy(max_attempts=9, base_ms=10, factor=1.5, cap_ms=20, jitter=0.0),
    ),
    created_ms=NOW,
    active_ms=NOW + 1,
    window=WindowState(floor=10, delivered=2**48, settled=((12, 14), (20, 20))),
    lease=Lease("holder", 6, NOW + 2),
    acked=3,
    redelivered=2,
    dead_lettered=1,
)
PLAIN_RECORD = SubscriptionRecord("plain", SubscriptionSpec(">"), NOW, NOW)


def test_no_subscriptions(store: Store) -> None:
    with store.read() as reader:
        assert reader.subscription("s") is None
        assert reader.subscriptions() == []


def test_a_subscription_comes_back_as_it_was_saved(store: Store) -> None:
    with store.write() as writer:
        writer.save_subscription(FULL_RECORD)
        writer.save_subscription(PLAIN_RECORD)

    with store.read() as reader:
        assert reader.subscription(FULL_RECORD.id) == FULL_RECORD
        assert reader.subscription("plain") == PLAIN_RECORD
        assert reader.subscription("Plain") is None


def test_subscriptions_come_by_id(store: Store) -> None:
    subscribe(store, "b", "ä", "a", "B", "a.b")

    with store.read() as reader:
        assert [record.id for record in reader.subscriptions()] == ["B", "a", "a.b", "b", "ä"]


def test_subscriptions_are_counted_by_their_owner(store: Store) -> None:
    owners = [None, "label:a", "label:a", "label:A", 'it\'s "b" ä', "label:a*"]
    with store.write() as writer:
        for number, owner in enumerate(owners):
            spec = SubscriptionSpec(">", owner=owner)
            writer.save_subscription(SubscriptionRecord(f"s{number}", spec, NOW, NOW))
        assert writer.owned_subscriptions("label:a") == 2

    with store.read() as reader:
        assert {owner: reader.owned_subscriptions(owner) for owner in owners if owner} == {
            "label:a": 2,
            "label:A": 1,
            'it\'s "b" ä': 1,
            "label:a*": 1,
        }
        assert reader.owned_subscriptions("label:none") == 0


def test_saving_a_subscription_again_replaces_it_and_keeps_its_rows(store: Store) -> None:
    subscribe(store, "s")
    put(store, waiting(1))
    changed = SubscriptionRecord("s", SubscriptionSpec("other.*"), NOW, LATER, acked=5)
    with store.write() as writer:
        writer.save_subscription(changed)

    with store.read() as reader:
        assert reader.subscriptions() == [changed]
    assert due_seqs(store) == [1]


def test_a_deleted_subscription_takes_its_rows_and_gaps_along(store: Store) -> None:
    subscribe(store, "s", "other")
    for id in ("s", "other"):
        put(store, waiting(1), leased(2), subscription=id)
        with store.write() as writer:
            writer.add_gap(Gap(id, 1, 2, 2, "retention", NOW))
    with store.write() as writer:
        writer.delete_subscription("s")
        writer.delete_subscription("never was")
    subscribe(store, "s")

    with store.read() as reader:
        assert reader.delivery_counts("s") == DeliveryCounts(0, 0, None)
        assert (reader.gaps("s"), reader.gap_total("s")) == ([], 0)
        assert reader.delivery_counts("other") == DeliveryCounts(1, 1, 1)
        assert reader.gap_total("other") == 2


# --- due ----------------------------------------------------------------------------------------------------


def test_nothing_is_due_without_rows(store: Store) -> None:
    subscribe(store, "s")

    assert due_seqs(store) == []
    assert next_due_ms(store) is None


def test_waiting_rows_are_due_when_their_delay_is_over(store: Store) -> None:
    subscribe(store, "s")
    put(store, waiting(1, NOW + 1), waiting(2, NOW), waiting(3, NOW - 1))

    assert due_seqs(store, NOW) == [2, 3]
    assert due_seqs(store, NOW + 1) == [1, 2, 3]


def test_leased_rows_are_due_when_their_lease_has_run_out(store: Store) -> None:
    subscribe(store, "s")
    put(store, leased(1, NOW + 10), leased(2, NOW + 5))

    assert due_seqs(store, NOW + 4) == []
    assert due_seqs(store, NOW + 5) == [2]
    assert due_seqs(store, NOW + 10) == [1, 2]


def test_due_comes_with_row_and_message(store: Store) -> None:
    publish(store, 2)
    subscribe(store, "s")
    row = DeliveryRow(2, 3, NOW, token=4, priority=5, key="k", dead_letter=6)
    put(store, row)

    with store.read() as reader:
        (due,) = reader.due("s", NOW, 10, "seq")
    assert due.row == row
    assert due.message is not None
    assert (due.message.seq, due.message.data) == (2, 2)


def test_due_without_message_if_that_is_deleted(store: Store) -> None:
    publish(store, 2)
    subscribe(store, "s")
    put(store, waiting(1), waiting(2))
    with store.write() as writer:
        writer.delete_messages(writer.oldest(parse_pattern("a"), 0, 1))

    with store.read() as reader:
        gone, there = reader.due("s", NOW, 10, "seq")
    assert (gone.row, gone.message) == (waiting(1), None)
    assert there.message is not None


def test_due_by_seq_and_by_priority(store: Store) -> None:
    subscribe(store, "s")
    put(
        store,
        waiting(4, priority=1),
        waiting(1, priority=-1),
        waiting(3, priority=1),
        waiting(2),
        waiting(5, LATER, priority=9),
    )

    assert due_seqs(store, order="seq") == [1, 2, 3, 4]
    assert due_seqs(store, order="priority") == [3, 4, 2, 1]
    assert due_seqs(store, order="seq", limit=2) == [1, 2]
    assert due_seqs(store, order="priority", limit=2) == [3, 4]


@pytest.mark.parametrize("order", ["seq", "priority"])
def test_of_one_key_only_the_lowest_seq_is_due(store: Store, order: Order) -> None:
    subscribe(store, "s")
    put(store, *(waiting(seq, key=key) for seq, key in enumerate(["k", "k", "l", None, None, "l"], 1)))

    assert due_seqs(store, order=order) == [1, 3, 4, 5]


@pytest.mark.parametrize("first", [waiting(1, LATER, key="k"), leased(1, LATER, key="k")], ids=["waiting", "leased"])
def test_a_row_that_is_not_due_holds_back_the_others_of_its_key(store: Store, first: DeliveryRow) -> None:
    subscribe(store, "s", "other")
    put(store, first, waiting(2, key="k", priority=9))
    put(store, leased(1, key="j"), subscription="other")
    put(store, waiting(3, key="j"))

    assert due_seqs(store, NOW) == [3]
    assert due_seqs(store, LATER, order="priority") == [1, 3]
    with store.write() as writer:
        writer.remove_deliveries("s", [1])
    assert due_seqs(store, NOW, order="priority") == [2, 3]


def test_a_former_dead_letter_waits_for_what_is_in_flight_of_its_key(store: Store) -> None:
    """And for that alone: once its lease has run out, the row in flight is due, and not both or none."""
    subscribe(store, "s")
    put(store, DeliveryRow(1, 0, NOW, 0, 0, "k", 7), leased(2, NOW + 20, key="k"), waiting(3, key="k"))

    assert due_seqs(store, NOW) == []
    assert next_due_ms(store) == NOW + 20
    assert due_seqs(store, NOW + 20) == [2]
    with store.write() as writer:
        writer.remove_deliveries("s", [2])
    assert due_seqs(store, NOW) == [1]
    assert next_due_ms(store) == NOW


@pytest.mark.parametrize("dead_letter", [None, 7], ids=["new", "redriven"])
def test_rows_of_other_keys_are_not_looked_at(store: Store, dead_letter: int | None) -> None:
    """Else each claim would take a time that grows with the square of what waits."""
    subscribe(store, "s")

    def steps(count: int) -> int:
        rows = (waiting if seq % 2 else leased for seq in range(count))
        put(store, *(row(seq, key=f"k{seq}", dead_letter=dead_letter) for seq, row in enumerate(rows, 1)))
        return rows_looked_at(store, lambda reader: reader.due("s", NOW, 10, "priority"))

    few = steps(50)
    assert steps(400) <= 10 * few


def test_next_due_is_the_earliest_of_all_rows(store: Store) -> None:
    subscribe(store, "s", "other")
    put(store, waiting(1, NOW + 30), leased(2, NOW + 20), waiting(3, NOW + 40))
    put(store, waiting(1, NOW), subscription="other")

    assert next_due_ms(store) == NOW + 20


def test_next_due_passes_over_rows_that_their_key_holds_back(store: Store) -> None:
    """Otherwise a waiter that sleeps until then finds nothing, and spins."""
    subscribe(store, "s")
    put(store, leased(1, NOW + 20, key="k"), waiting(2, NOW, key="k"))

    assert next_due_ms(store) == NOW + 20


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_put(store: Store) -> None:
    subscribe(store, "s", "other")
    rows = [
        DeliveryRow(1, 2, NOW, 3, -4, "ключ", 5),
        DeliveryRow(2**48, 0, 0),
        DeliveryRow(3, 1_000, NOW, 2**62, 1_000_000, "", None),
    ]
    put(store, *rows)
    put(store, waiting(4), subscription="other")

    with store.read() as reader:
        assert reader.deliveries("s", [3, 1, 2**48, 4, 1]) == {row.seq: row for row in rows}
        assert reader.deliveries("s", []) == {}
        assert len(reader.deliveries("s", range(3_000))) == 2


def test_putting_a_row_again_replaces_it(store: Store) -> None:
    subscribe(store, "s")
    put(store, waiting(1, key="old", priority=3, dead_letter=9), waiting(2))
    put(store, leased(1, key="new"))

    with store.read() as reader:
        assert reader.deliveries("s", [1, 2]) == {1: leased(1, key="new"), 2: waiting(2)}
        assert reader.deliveries("s", [1])[1].key == "new"


def test_rows_are_removed_one_by_one_or_all(store: Store) -> None:
    subscribe(store, "s", "other")
    put(store, *(waiting(seq) for seq in range(1, 6)))
    put(store, waiting(1), waiting(2), subscription="other")
    with store.write() as writer:
        writer.remove_deliveries("s", [2, 4, 99])
    assert due_seqs(store) == [1, 3, 5]
    with store.write() as writer:
        writer.remove_deliveries("s", [])
        writer.clear_deliveries("s")

    assert due_seqs(store) == []
    with store.read() as reader:
        assert set(reader.deliveries("other", [1, 2])) == {1, 2}


def test_many_rows_are_put_and_removed_at_once(store: Store) -> None:
    subscribe(store, "s")
    put(store, *(waiting(seq) for seq in range(1, 3_001)))
    with store.write() as writer:
        writer.remove_deliveries("s", range(1, 3_001, 2))

    assert due_seqs(store, limit=5_000) == list(range(2, 3_001, 2))


def test_ended_leases_are_due_at_once_and_keep_their_token(store: Store) -> None:
    subscribe(store, "s", "other")
    put(store, leased(1, key="k"), leased(2, NOW - 5), waiting(3, LATER))
    put(store, leased(1), subscription="other")
    with store.write() as writer:
        writer.end_leases("s", NOW)
        writer.end_leases("none", NOW)

    with store.read() as reader:
        assert reader.deliveries("s", [1, 2, 3]) == {
            1: leased(1, NOW, key="k"),
            2: leased(2, NOW - 5),
            3: waiting(3, LATER),
        }
        assert reader.deliveries("other", [1]) == {1: leased(1)}
    assert due_seqs(store) == [1, 2]


def test_delivery_counts(store: Store) -> None:
    subscribe(store, "s")
    with store.read() as reader:
        assert reader.delivery_counts("s") == DeliveryCounts(0, 0, None)
    put(store, leased(5), leased(6, NOW - 1), waiting(4), waiting(8, LATER), waiting(9))

    with store.read() as reader:
        assert reader.delivery_counts("s") == DeliveryCounts(in_flight=2, waiting=3, first_seq=4)


def test_leased_seqs_are_those_under_a_live_lease_of_any_subscription(store: Store) -> None:
    subscribe(store, "s", "other")
    put(store, leased(1), leased(2), waiting(3, LATER), leased(4, NOW), leased(6))
    put(store, leased(2), leased(5), subscription="other")

    with store.read() as reader:
        assert reader.leased_seqs(1, 100, NOW) == {1, 2, 5, 6}
        assert reader.leased_seqs(2, 5, NOW) == {2, 5}
        assert reader.leased_seqs(1, 100, NOW - 1) == {1, 2, 4, 5, 6}
        assert reader.leased_seqs(1, 100, LATER) == set()


# --- gaps ---------------------------------------------------------------------------------------------------


def test_gaps_are_reported_once_and_counted_for_ever(store: Store) -> None:
    subscribe(store, "s", "other")
    first, second = Gap("s", 1, 5, 3, "retention", NOW), Gap("s", 9, 9, 1, "purge ü", NOW + 1)
    third = Gap("s", 10, 20, 11, "retention", NOW + 2)
    with store.write() as writer:
        writer.add_gap(first)
        writer.add_gap(second)
        writer.add_gap(Gap("other", 1, 1, 100, "retention", NOW))

    with store.read() as reader:
        assert (reader.gaps("s"), reader.gap_total("s")) == ([first, second], 4)
        assert (reader.gaps("none"), reader.gap_total("none")) == ([], 0)
    with store.write() as writer:
        writer.mark_gaps_reported("s")
        assert (writer.gaps("s"), writer.gap_total("s")) == ([], 4)
        writer.add_gap(third)
    with store.read() as reader:
        assert (reader.gaps("s"), reader.gap_total("s")) == ([third], 15)
        assert reader.gap_total("other") == 100
        assert len(reader.gaps("other")) == 1
