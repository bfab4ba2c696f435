"""Plain callbacks for messages as they come, from a server. The same verbs as `broker.live`."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.broker.flow import Ticket
from headwater.broker.live import Listener, Listeners
from headwater.broker.logger import logger
from headwater.client.link import Link
from headwater.client.request import Request
from headwater.message import NAMED_HEADERS, NO_HEADERS, Message, ms_of_iso
from headwater.protocol import wire

_notification = msgspec.json.Decoder(wire.Notification)


class RemoteLive(Listeners):
    """The server is asked for each pattern once, however many callbacks there are for it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.settings.url)
        self._link = link

    # --- for the link: see `link.Resuming` ------------------------------------------------------------------------

    is_ready = True
    is_leaving = False

    def lost_connection(self) -> None:
        """Nothing is kept; `resume` asks anew."""

    def resume(self) -> Request | None:
        with self._lock:
            patterns = self._patterns()
        if not patterns:
            return None
        for at in range(wire.NAMES_MAX, len(patterns), wire.NAMES_MAX):
            self._link.enqueue(_begin_all(patterns[at : at + wire.NAMES_MAX]))
        return _begin_all(patterns[: wire.NAMES_MAX])

    # --- for `Listeners` --------------------------------------------------------------------------------------------

    def _begin(self, listener: Listener) -> None:
        request = Request("rpc.subscribe", wire.Topic(listener.pattern.text), _nothing)
        request.ticket.watch(_complain)
        self._link.enqueue(request)

    def _end(self, listener: Listener) -> None:
        pattern = listener.pattern.text
        if pattern not in self._patterns() and not self._closed:
            self._link.enqueue(Request("rpc.unsubscribe", wire.Topic(pattern), _nothing))

    def _stop_source(self) -> None:
        """The link ends by itself."""

    def _patterns(self) -> list[str]:
        return sorted({pattern for _, pattern in self._listeners})

    def take_notification(self, raw: msgspec.Raw) -> None:
        found = _notification.decode(raw)
        message = _message_of(found)
        with self._lock:
            for listener in self._listeners.values():
                if listener.pattern.text == found.pattern:
                    self._offer(listener, message)


def _begin_all(patterns: list[str]) -> Request:
    request = Request("rpc.subscribe.batch", wire.Topics(patterns), _nothing, again=False)
    request.ticket.watch(_complain)
    return request


def _nothing(raw: Any) -> None:
    return None


def _complain(ticket: Ticket[Any]) -> None:
    if ticket.error is not None:
        logger.warning("a live subscription failed: %s", ticket.error)


def _message_of(found: wire.Notification) -> Message:
    headers = {name: value for name, value in found.headers.items() if name not in NAMED_HEADERS}
    named = {
        ("from_" if name == "from" else name): found.headers[name] for name in NAMED_HEADERS if name in found.headers
    }
    return Message(
        found.sequence_id,
        found.topic,
        msgspec.Raw(bytes(found.data)),
        ms_of_iso(found.timestamp),
        len(memoryview(found.data)),
        found.id,
        raw_headers=msgspec.Raw(msgspec.json.encode(headers)) if headers else NO_HEADERS,
        **named,
    )
