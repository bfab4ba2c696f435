"""A call on its way to the server, and what has to be taken up again on a new connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headwater.broker.flow import Ticket


class Request:
    """A call on its way. `again`: whether it may be sent again after the connection broke. `count`: how many messages
    it publishes. `gathers`: it may travel together with others like it, its `parts`. `decode` turns the raw result into
    what the ticket gets."""

    __slots__ = (
        "again",
        "alone",
        "consumer",
        "count",
        "deadline_s",
        "decode",
        "gathers",
        "method",
        "number",
        "params",
        "parts",
        "ticket",
    )

    def __init__(
        self,
        method: str,
        params: Any,
        decode: Callable[[Any], Any],
        *,
        again: bool = True,
        alone: bool = False,
        count: int = 0,
        gathers: bool = False,
        consumer: Resuming | None = None,
    ) -> None:
        self.method = method
        self.params = params
        self.decode = decode
        self.again = again
        self.alone = alone
        self.count = count
        self.gathers = gathers
        self.number = 0
        self.parts: list[Request] = []
        self.consumer = consumer
        self.deadline_s: float | None = None
        self.ticket: Ticket[Any] = Ticket()


class Resuming(Protocol):
    """What has to be taken up again on a new connection, before its own calls are sent."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_leaving(self) -> bool:
        """Without a connection its calls need not wait for one any longer."""

    def resume(self) -> Request | None: ...

    def lost_connection(self) -> None: ...
