"""Live subscriptions of a server: callbacks without acks. The interface is that of `broker.live`."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.broker.flow import Completion
from headwater.broker.live import Listener, Listeners
from headwater.broker.logger import logger
from headwater.client.connection import Connection
from headwater.client.outbox import Request
from headwater.formats import ms_of_iso
from headwater.message import HEADER_FIELDS, NAMED_HEADERS, NO_HEADERS, Message
from headwater.protocol import methods as rpc

_notification = msgspec.json.Decoder(rpc.Notification)


class RemoteLive(Listeners):
    """Subscribes to each pattern once, for all of its callbacks."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.settings.url)
        self._connection = connection

    # --- for the connection: see `outbox.Resumable` -------------------------------------------------------------------

    is_ready = True
    is_leaving = False

    def lost_connection(self) -> None:
        """Keep nothing; `resume` subscribes again."""

    def resume(self) -> Request | None:
        with self._lock:
            patterns = self._patterns()
        if not patterns:
            return None
        for at in range(rpc.NAMES_MAX, len(patterns), rpc.NAMES_MAX):
            self._connection.enqueue(_begin_all(patterns[at : at + rpc.NAMES_MAX]))
        return _begin_all(patterns[: rpc.NAMES_MAX])

    # --- for `Listeners` --------------------------------------------------------------------------------------------

    def _begin(self, listener: Listener) -> None:
        request = Request("rpc.subscribe", rpc.Topic(listener.pattern.text))
        request.completion.watch(_log_error)
        self._connection.enqueue(request)

    def _end(self, listener: Listener) -> None:
        pattern = listener.pattern.text
        if pattern not in self._patterns() and not self._closed:
            self._connection.enqueue(Request("rpc.unsubscribe", rpc.Topic(pattern)))

    def _stop_source(self) -> None:
        """The connection closes itself."""

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
    request = Request("rpc.subscribe.batch", rpc.Topics(patterns), again=False)
    request.completion.watch(_log_error)
    return request


def _log_error(completion: Completion[Any]) -> None:
    if completion.error is not None:
        logger.warning("a live subscription failed: %s", completion.error)


def _message_of(found: rpc.Notification) -> Message:
    headers = {name: value for name, value in found.headers.items() if name not in NAMED_HEADERS}
    named = {field.attribute: found.headers[field.name] for field in HEADER_FIELDS if field.name in found.headers}
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
