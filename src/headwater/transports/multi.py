"""Several transports as one: each gets everything, and one that fails does not stop the others."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from headwater.errors import AllTransportsFailed, Closed, InvalidOption, PublishOnly, TransportFailed, Unsent
from headwater.message import Message
from headwater.ports.transport import Following, Handle, Subscribable, Transport, buffers, check_transport, logs_fed_by
from headwater.transports.base import BaseTransport
from headwater.transports.lines import publish_only

logger = logging.getLogger("headwater")

TRANSPORTS_MAX = 64


class MultiTransport(BaseTransport):
    """Publishes to all at the same time and returns when the slowest is done. A copy that one of them did not take is
    lost there: it is logged, and the error kept in `last_errors` under that one's name until it takes one again. Where
    every target must have every message, feed each with a forwarder of its own."""

    def __init__(self, transports: Iterable[Transport], *, name: str = "multi") -> None:
        transports = [check_transport(each, name) for each in transports]
        if not 1 <= len(transports) <= TRANSPORTS_MAX:
            raise InvalidOption(f"1 to {TRANSPORTS_MAX} transports, not {len(transports)}", where=name)
        if len(set(map(id, transports))) < len(transports):
            raise InvalidOption("the same transport is given twice", where=name)
        self.name = name
        self.recognises_ids = all(transport.recognises_ids for transport in transports)
        self.buffers = any(map(buffers, transports))
        self.feeds = tuple(log for transport in transports for log in logs_fed_by(transport))
        self.last_errors: dict[str, Exception] = {}
        self._lanes = {_own_name(at, transports): _Lane(transport) for at, transport in enumerate(transports)}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether any of them is."""
        return any(lane.transport.connected for lane in self._lanes.values())

    def _publish(self, messages: Sequence[Message]) -> None:
        """Raises AllTransportsFailed if none took it."""
        with self._lock:  # so that all of them get what several threads publish in the same order
            if self._closed:
                raise Closed("this transport is closed", where=self.name)
            outcomes = {name: lane.call(lane.transport.publish_many, messages) for name, lane in self._lanes.items()}
        errors: dict[str, Exception] = {}
        for name, outcome in outcomes.items():
            try:
                outcome.result()
            except Exception as exc:
                errors[name] = exc
                first = messages[0].id if messages else None
                logger.warning("%s did not take %d message(s), first %s: %s", name, len(messages), first, exc)
            else:
                self.last_errors.pop(name, None)
        self.last_errors.update(errors)
        if len(errors) == len(self._lanes):
            raise AllTransportsFailed(f"All transports failed: {_told(errors)}", causes=errors)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> Following:
        """At the first of them that carries messages back."""
        for lane in self._lanes.values():
            if isinstance(lane.transport, Subscribable):
                try:
                    return lane.transport.subscribe(pattern, handle, group=group, consumer=consumer)
                except PublishOnly:
                    continue
        raise publish_only("each of its transports", self.name, "Add one that carries messages back, first")

    def close(self) -> None:
        """Closes all of them, whatever the others say."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outcomes = {name: lane.call(lane.transport.close) for name, lane in self._lanes.items()}
            for lane in self._lanes.values():
                lane.stop()
        errors: dict[str, Exception] = {}
        for name, outcome in outcomes.items():
            try:
                outcome.result()
            except Exception as exc:
                errors[name] = exc
        unsent = {
            message.scoped_id: message
            for error in errors.values()
            if isinstance(error, Unsent)
            for message in error.messages
            if isinstance(message, Message)
        }
        if unsent:
            raise Unsent(_told(errors), where=self.name, messages=list(unsent.values()))
        if errors:
            raise TransportFailed(f"not closed well: {_told(errors)}", where=self.name)


def _told(errors: dict[str, Exception]) -> str:
    return "; ".join(f"{name}: {_reason(name, error)}" for name, error in errors.items())


def _reason(name: str, error: Exception) -> str:
    """What went wrong, without saying twice where."""
    return str(error).removeprefix(f"{name}: ") or type(error).__name__


def _own_name(at: int, transports: Sequence[Transport]) -> str:
    """Names are only for people, so two may have the same; here they are told apart."""
    name = transports[at].name
    same_before = sum(other.name == name for other in transports[:at])
    return f"{name} ({same_before + 1})" if same_before else name


_Work = tuple[Future[None], Callable[..., None], tuple[object, ...]]


class _Lane:
    """One transport and the thread that calls it, so that all of them get everything in the same order. Not an
    executor: those take nothing more once the interpreter ends, when a buffer may still want to be emptied."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # bounded by those who wait for outcomes
        threading.Thread(target=self._run, name=f"transport {transport.name}", daemon=True).start()

    def call(self, function: Callable[..., None], *arguments: object) -> Future[None]:
        outcome: Future[None] = Future()
        self._work.put((outcome, function, arguments))
        return outcome

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            outcome, function, arguments = work
            try:
                function(*arguments)
            except BaseException as exc:  # it belongs to the one who waits
                outcome.set_exception(exc)
            else:
                outcome.set_result(None)
            del work, outcome, function, arguments  # not to hold on to messages until the next come
