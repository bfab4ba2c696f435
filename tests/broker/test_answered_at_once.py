"""An ack that is answered before the handler's thread has turned around: as a quick server can."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

import headwater
from headwater.broker.claims import Claimed
from headwater.broker.flow import Ticket
from headwater.broker.subscriber import Subscriber


def test_the_handler_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    submit_ack = Subscriber.submit_ack

    def answered_at_once(self: Subscriber, settled: Sequence[Claimed]) -> Ticket[list[int]]:
        ticket = submit_ack(self, settled)
        ticket.wait(30)
        return ticket

    monkeypatch.setattr(Subscriber, "submit_ack", answered_at_once)
    handled: list[Any] = []
    done = threading.Event()
    with headwater.open("memory:") as log:

        @log.on("a", id="s")
        def handle(message: headwater.ReceivedMessage) -> None:
            handled.append(message.data)
            if len(handled) == 20:
                done.set()

        log.publish_many([("a", number) for number in range(20)])
        log.start()
        assert done.wait(10), f"stuck after {handled}"
        log.stop()
        assert log.subscription("s").lag == 0
    assert handled == list(range(20))
