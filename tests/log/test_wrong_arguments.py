"""Mistakes with received messages and clocks: each is refused at the call, with what to do next."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

import headwater
from headwater.errors import InvalidOptionError, InvalidStateError
from headwater.testing import open_log


def test_an_ack_after_a_nack_is_refused() -> None:
    with open_log() as log, log.subscribe("billing", "orders.>") as billing:
        log.publish("orders.new", 1)
        [message] = billing.fetch()
        message.nack()
        with pytest.raises(InvalidStateError, match="nacked or rejected already; ack has no effect"):
            message.ack()


def test_an_ephemeral_subscription_settles_nothing_so_no_order_is_wrong() -> None:
    with open_log() as log:
        log.publish("orders.new", 1)
        with log.subscribe("view", "orders.>", mode="ephemeral", start="first") as view:
            [message] = view.fetch()
            message.nack()
            message.ack()


@pytest.mark.parametrize("confirm", [True, False])
def test_ack_many_takes_received_messages_only(confirm: bool) -> None:
    with open_log() as log, log.subscribe("billing", "orders.>") as billing:
        log.publish("orders.new", 1)
        [message] = billing.fetch()
        for wrong in ([message.seq], message):
            with pytest.raises(InvalidOptionError, match=r"list of received messages.*message.ack\(\)"):
                billing.ack_many(cast(Any, wrong), confirm=confirm)
        billing.ack_many([message], confirm=confirm)


def test_a_manual_clock_begins_at_a_datetime_and_takes_durations() -> None:
    clock = headwater.ManualClock(datetime(2026, 3, 29, tzinfo=UTC))
    clock.advance("1h30m")
    assert clock.now_ms() == datetime(2026, 3, 29, 1, 30, tzinfo=UTC).timestamp() * 1000
    with pytest.raises(InvalidOptionError, match="no time zone"):
        headwater.ManualClock(datetime(2026, 3, 29))
    with pytest.raises(InvalidOptionError, match="begins at an aware datetime"):
        headwater.ManualClock(cast(Any, "2026-03-29"))
    with pytest.raises(InvalidOptionError, match="seconds must be a duration"):
        clock.advance("5 minutes")


def test_a_decorator_without_its_pattern(log: headwater.Log) -> None:
    with pytest.raises(InvalidOptionError, match="without its pattern") as refused:
        log.on(print)  # type: ignore[arg-type]
    assert "@log.on(" in refused.value.next
