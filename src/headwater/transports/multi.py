"""Several transports as one: each gets everything, and one that fails does not stop the others."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from headwater.errors import (
    AllTransportsFailedError,
    InvalidOptionError,
    PublishOnlyError,
    TransportFailedError,
    UnsentError,
)
from headwater.message import Message
from headwater.ports.transport import (
    Handle,
    Subscribable,
    Transport,
    TransportSubscription,
    buffers,
    check_transport,
    logs_fed_by,
)
from headwater.transports.base import BaseTransport, publish_only

logger = logging.getLogger("headwater")

TRANSPORTS_MAX = 64


class MultiTransport(BaseTransport):
    """Publishes to all transports at the same time and returns when the slowest is done.

    A transport that fails misses the copy. The failure is logged, and `last_errors` has the error under the name of the
    transport until it succeeds again. If every target must have every message, feed each by a forwarder of its own."""

    def __init__(self, transports: Iterable[Transport], *, name: str = "multi") -> None:
        transports = [check_transport(each, name) for each in transports]
        if not 1 <= len(transports) <= TRANSPORTS_MAX:
            raise InvalidOptionError(f"1 to {TRANSPORTS_MAX} transports, not {len(transports)}", where=name)
        if len(set(map(id, transports))) < len(transports):
            raise InvalidOptionError("the same transport is given twice", where=name)
        self.name = name
        self.recognises_ids = all(transport.recognises_ids for transport in transports)
        self.buffers = any(map(buffers, transports))
        self.feeds = tuple(log for transport in transports for log in logs_fed_by(transport))
        self.last_errors: dict[str, Exception] = {}
        self._workers = {_own_name(at, transports): _Worker(transport) for at, transport in enumerate(transports)}
        self._lock = threading.Lock()

    @property
    def connected(self) -> bool:
        """Whether any of the transports is connected."""
        return any(worker.transport.connected for worker in self._workers.values())

    def _publish(self, messages: Sequence[Message]) -> None:
        """Raises AllTransportsFailedError if none took it."""
        with self._lock:  # so that all of them get what several threads publish in the same order
            self._check_open()
            outcomes = {
                name: worker.call(worker.transport.publish_many, messages) for name, worker in self._workers.items()
            }
        errors = _errors(outcomes)
        first = messages[0].id if messages else None
        for name, exc in errors.items():
            logger.warning("%s did not take %d message(s), first %s: %s", name, len(messages), first, exc)
        for name in outcomes.keys() - errors.keys():
            self.last_errors.pop(name, None)
        self.last_errors.update(errors)
        if len(errors) == len(self._workers):
            raise AllTransportsFailedError(f"All transports failed: {_reasons(errors)}", causes=errors)

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> TransportSubscription:
        """Subscribe at the first transport that carries messages back."""
        for worker in self._workers.values():
            if isinstance(worker.transport, Subscribable):
                try:
                    return worker.transport.subscribe(pattern, handle, group=group, consumer=consumer)
                except PublishOnlyError:
                    continue
        raise publish_only("each of its transports", self.name, "Add one that carries messages back, first")

    def close(self) -> None:
        """Close all transports, also if one fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outcomes = {name: worker.call(worker.transport.close) for name, worker in self._workers.items()}
            for worker in self._workers.values():
                worker.stop()
        errors = _errors(outcomes)
        unsent = {
            message.scoped_id: message
            for error in errors.values()
            if isinstance(error, UnsentError)
            for message in error.messages
            if isinstance(message, Message)
        }
        if unsent:
            raise UnsentError(_reasons(errors), where=self.name, messages=list(unsent.values()))
        if errors:
            raise TransportFailedError(f"not closed well: {_reasons(errors)}", where=self.name)


def _errors(outcomes: Mapping[str, Future[None]]) -> dict[str, Exception]:
    """What failed, when all are done."""
    errors: dict[str, Exception] = {}
    for name, outcome in outcomes.items():
        try:
            outcome.result()
        except Exception as exc:
            errors[name] = exc
    return errors


def _reasons(errors: dict[str, Exception]) -> str:
    return "; ".join(f"{name}: {_reason(name, error)}" for name, error in errors.items())


def _reason(name: str, error: Exception) -> str:
    """What went wrong, without saying twice where."""
    return str(error).removeprefix(f"{name}: ") or type(error).__name__


def _own_name(at: int, transports: Sequence[Transport]) -> str:
    """The name of a transport; of two with the same name, the second gets a number."""
    name = transports[at].name
    same_before = sum(other.name == name for other in transports[:at])
    return f"{name} ({same_before + 1})" if same_before else name


_Work = tuple[Future[None], Callable[..., None], tuple[object, ...]]


class _Worker:
    """One transport and the thread that calls it, so that all of them get everything in the same order. Not an
    executor: those take nothing more once the interpreter ends, when a buffer may still want to be emptied."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # bounded: callers wait for outcomes
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
            except BaseException as exc:  # for the caller of `result`
                outcome.set_exception(exc)
            else:
                outcome.set_result(None)
            del work, outcome, function, arguments  # not to hold on to messages until the next come
