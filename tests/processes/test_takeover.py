"""A holder dies or freezes: another takes over what it left, and the late one is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from process_child import PATIENCE_S, Child, drain
from process_roles import hold

import headwater
from headwater.errors import SubscriptionActiveError

LEASE_S = 2.0  # a holder on a busy machine must not lose it by being slow
OPTIONS: dict[str, Any] = {"lease": LEASE_S, "ack_wait": LEASE_S, "max_attempts": 100}


@pytest.fixture
def holder(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> Child:
    log.publish_many([("a", number) for number in range(1, 5)])
    child = spawn(hold, path, "exclusive", OPTIONS)
    assert child.hear() == [(1, 1), (2, 1), (3, 1), (4, 1)]
    return child


def test_a_killed_holder(log: headwater.Log, holder: Child) -> None:
    assert holder.hears_of(("ack", 1)) == "ok"
    with pytest.raises(SubscriptionActiveError):
        log.subscribe("s", ">", **OPTIONS)
    killed = time.monotonic()
    holder.kill()
    subscription = log.subscribe("s", ">", timeout=PATIENCE_S, **OPTIONS)
    assert time.monotonic() - killed > LEASE_S / 2, "taken over while the lease was alive"
    log.publish("a", 5)
    assert drain(subscription) == [(5, 1, 5), (1, 2, 1), (3, 2, 3), (4, 2, 4)]


def test_a_living_holder_keeps_its_lease(log: headwater.Log, holder: Child) -> None:
    """Heartbeats go on while it does nothing, for longer than its lease; and it can still ack."""
    until = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until:
        with pytest.raises(SubscriptionActiveError):
            log.subscribe("s", ">", **OPTIONS)
        holder.process.join(0.05)
    assert holder.hears_of(("fetch", 0)) == "ok"


def test_a_frozen_holder_comes_too_late(log: headwater.Log, holder: Child) -> None:
    holder.freeze()
    subscription = log.subscribe("s", ">", timeout=PATIENCE_S, **OPTIONS)
    (message,) = subscription.fetch(1)
    assert (message.seq, message.attempt) == (1, 2)
    holder.thaw()
    for verb in ("ack", "nack", "reject", "extend", "fetch"):
        assert holder.hears_of((verb, 0)) == "LeaseLostError", verb
    message.ack()
    assert drain(subscription) == [(2, 2, 2), (3, 2, 3), (4, 2, 4)]
    assert log.dead_letters.list() == []
    assert holder.hears_of(("ack", 3)) == "LeaseLostError"
    assert log.subscription("s").acked == 4


def test_a_frozen_shared_consumer_comes_too_late(log: headwater.Log, path: str, spawn: Callable[..., Child]) -> None:
    log.publish("a", 1)
    child = spawn(hold, path, "shared", OPTIONS)
    assert child.hear() == [(1, 1)]
    subscription = log.subscribe("s", ">", mode="shared", **OPTIONS)
    assert subscription.fetch(1) == []
    child.freeze()
    (message,) = subscription.fetch(1, timeout=30)
    assert message.attempt == 2
    child.thaw()
    for verb in ("ack", "nack", "reject", "extend"):
        assert child.hears_of((verb, 0)) == "LeaseLostError", verb
    message.ack()
    assert child.hears_of(("ack", 0)) == "LeaseLostError"
    assert log.subscription("s").lag == 0


def test_a_holder_that_closes_is_followed_at_once(log: headwater.Log, holder: Child) -> None:
    holder.say(None)
    holder.end()
    began = time.monotonic()
    assert [seq for seq, _, _ in drain(log.subscribe("s", ">", **OPTIONS))] == [1, 2, 3, 4]
    assert time.monotonic() - began < 20
