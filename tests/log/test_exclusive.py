"""One holder: the second is refused, a dead one is replaced, and a late one is refused."""

import os
import socket
from typing import Any

import pytest
from fetched import drain, seqs

import headwater
from headwater import Log, ManualClock
from headwater.errors import LeaseLostError, SubscriptionActiveError

LEASE_MS = 10_000


def test_a_second_holder_is_refused_in_the_words_of_the_seed(open_log: Any) -> None:
    open_log().subscribe("billing", "orders.>")
    with pytest.raises(SubscriptionActiveError) as refused:
        open_log().subscribe("billing", "orders.>")
    assert refused.value.why == "Subscription 'billing' is already active on another connection"
    holder = "a client of the server" if open_log.is_served else "this process"
    assert str(refused.value) == (
        f"held by {holder}: Subscription 'billing' is already active on another connection. Close it, wait for it "
        "with the option timeout (the lease of a dead consumer ends in 15 s), or set the option mode to shared to "
        "share the work"
    )


@pytest.mark.parametrize(
    ("owner", "holder"),
    [
        ("web-1:4711:0a1b2c3d:1", "process 4711 on web-1"),
        ("web-1:4711:server-17:1", "a client of the server in process 4711 on web-1"),
        ("web-1:4711:served-0a1b2c3d:1", "a client of the server in process 4711 on web-1"),
        (f"{socket.gethostname()}:{os.getpid()}:server-17:1", "a client of this server"),
        ("0a1b2c3d-0a1b2c3d", "a client of the server"),
    ],
    ids=["another process", "a server", "a server without an announcement", "this server", "a client's own name"],
)
def test_the_refusal_says_where_the_holder_is(owner: str, holder: str) -> None:
    with headwater.open("memory:") as log:
        log._core.engine.owner = owner.removesuffix(":1")
        log._core.engine.new_owner = lambda: owner
        log.subscribe("billing", "orders.>")
        for refused in (lambda: log.seek("billing", "first"), lambda: log.delete_subscription("billing")):
            with pytest.raises(SubscriptionActiveError) as raised:
                refused()
            assert raised.value.where == f"held by {holder}"
            assert raised.value.next.startswith("Close it")


def test_a_server_without_an_announcement_is_recognized_too() -> None:
    with headwater.open("memory:") as log:
        log._core.engine.announce()
        log.subscribe("billing", "orders.>")
        with pytest.raises(SubscriptionActiveError, match=r"^held by a client of this server: "):
            log.delete_subscription("billing")


def test_a_refused_holder_takes_nothing_away(open_log: Any) -> None:
    holder, other = open_log(), open_log()
    holder.publish_many([("a", n) for n in range(3)])
    subscription = holder.subscribe("s", "a")
    first, *_ = subscription.fetch(2)
    with pytest.raises(SubscriptionActiveError):
        other.subscribe("s", "a")
    first.ack()
    assert seqs(subscription.fetch()) == [3]


def test_closing_frees_it_at_once_and_gives_back_what_is_in_flight(open_log: Any) -> None:
    holder, other = open_log(), open_log()
    holder.publish_many([("a", n) for n in range(3)])
    with holder.subscribe("s", "a") as subscription:
        subscription.fetch(2)[0].ack()
    successor = other.subscribe("s", "a")
    assert [(message.seq, message.attempt) for message in successor.fetch()] == [(2, 2), (3, 1)]


def test_a_vanished_holder_is_replaced_when_its_lease_runs_out(open_log: Any, clock: ManualClock) -> None:
    vanished, successor = open_log(), open_log()
    vanished.publish_many([("a", n) for n in range(4)])
    before = vanished.subscribe("s", "a", lease=10, ack_wait=3_600)
    messages = before.fetch(3)
    messages[1].ack()
    clock.advance((LEASE_MS - 1) / 1000)
    with pytest.raises(SubscriptionActiveError):
        successor.subscribe("s", "a", lease=10)
    clock.advance(0.001)
    after = successor.subscribe("s", "a", lease=10)
    assert drain(after) == [(4, 1), (1, 2), (3, 2)], "what was acked stays acked, what was in flight comes again"


def test_the_late_holder_is_refused_in_everything(open_log: Any, clock: ManualClock) -> None:
    late_log, new_log = open_log(), open_log()
    late_log.publish_many([("a", n) for n in range(4)])
    late = late_log.subscribe("s", "a", lease=10, ack_wait=3_600)
    messages = late.fetch(3)
    clock.advance(LEASE_MS / 1000)
    present = new_log.subscribe("s", "a", lease=10)
    for settle in (messages[0].ack, messages[1].nack, messages[2].reject, messages[0].extend, late.fetch):
        with pytest.raises(LeaseLostError):
            settle()
    with pytest.raises(LeaseLostError):
        late.ack_many(messages)
    late.close()
    assert [message.seq for message in present.fetch()] == [4, 1], "nothing the late one did has moved anything"
    assert new_log.subscription("s").holder is not None


def test_one_log_is_no_exception(log: Log, clock: ManualClock) -> None:
    """Two holders of one process are two: the second waits for the lease like any other."""
    log.publish_many([("a", 1), ("a", 2)])
    first = log.subscribe("s", "a")
    [message] = first.fetch(1)
    with pytest.raises(SubscriptionActiveError):
        log.subscribe("s", "a")
    clock.advance(15.001)
    second = log.subscribe("s", "a")
    with pytest.raises(LeaseLostError):
        message.ack()
    with pytest.raises(LeaseLostError):
        first.fetch()
    assert [(each.seq, each.attempt) for each in second.fetch()] == [(2, 1), (1, 2)]


def test_using_it_renews_the_lease(open_log: Any, clock: ManualClock) -> None:
    holder, other = open_log(), open_log()
    subscription = holder.subscribe("s", "a", lease=10)
    for _ in range(5):
        holder.publish("a", 1)
        clock.advance((LEASE_MS - 1) / 1000)
        [message] = subscription.fetch()
        clock.advance((LEASE_MS - 1) / 1000)
        message.ack()
        with pytest.raises(SubscriptionActiveError):
            other.subscribe("s", "a", lease=10)


def test_a_heartbeat_renews_the_lease_of_an_idle_holder(open_log: Any, clock: ManualClock) -> None:
    holder, other = open_log(), open_log()
    holder.subscribe("s", "a", lease=10)
    for _ in range(5):
        clock.advance((LEASE_MS - 1) / 1000)
        holder._core.heartbeat()
        with pytest.raises(SubscriptionActiveError):
            other.subscribe("s", "a", lease=10)
    clock.advance(LEASE_MS / 1000)
    other.subscribe("s", "a", lease=10)


def test_a_holder_that_ran_out_unnoticed_goes_on(log: Log, clock: ManualClock) -> None:
    """No other consumer took it meanwhile, so its deliveries are still its own."""
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", lease=10, ack_wait=3_600)
    [message] = subscription.fetch(1)
    clock.advance(10 * LEASE_MS / 1000)
    message.ack()
    assert seqs(subscription.fetch()) == [2]


def test_info_names_the_holder_while_it_lives(log: Log, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", lease=10)
    assert log.subscription("s").holder
    clock.advance(LEASE_MS / 1000)
    assert log.subscription("s").holder is None
    subscription.close()
    assert log.subscription("s").holder is None


def test_hundreds_left_in_flight_come_again_each_once(open_log: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", n) for n in range(300)])
    before = vanished.subscribe("s", "a", lease=10)
    before.ack_many([message for message in before.fetch(250) if message.seq % 3])
    clock.advance(LEASE_MS / 1000)
    log = open_log()
    subscription = log.subscribe("s", "a", lease=10)
    assert sorted(drain(subscription)) == [(seq, 2) for seq in range(3, 251, 3)] + [(seq, 1) for seq in range(251, 301)]
    assert log.subscription("s").lag == 0
