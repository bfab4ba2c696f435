"""A bus: a log, and transports that get copies of its events.

The log decides: when it has the message, the publish has succeeded. A transport that fails is logged and counted, and
its copy is lost; for copies that must arrive use a forwarder, which waits and tries again. A class with `log=False`
goes to its transports alone, and fails only if all of them do.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import msgspec

from headwater.api._async import AsyncLog
from headwater.api._sync import Log
from headwater.broker.flow import Blocking, Flow, run_async, run_blocking, wait
from headwater.broker.verbs import LogVerbs
from headwater.errors import (
    AllTransportsFailedError,
    HeadwaterError,
    InvalidOptionError,
    InvalidStateError,
    UnsentError,
)
from headwater.formats import redact_url
from headwater.message import Message
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.transport import Transport
from headwater.settings import Settings, TransportSettings
from headwater.topics.topic import quoted
from headwater.transports.base import make_message, new_id
from headwater.typed.codec import Prepared

if TYPE_CHECKING:
    from headwater.typed.event import Event

logger = logging.getLogger("headwater.typed")

T = TypeVar("T")
AnyLog = TypeVar("AnyLog", Log, AsyncLog)


class _BaseBus(Generic[AnyLog]):
    """The transports of a bus, and which class goes to which."""

    def __init__(
        self,
        log: AnyLog,
        transports: Mapping[str, Transport],
        *,
        routes: Mapping[str, Sequence[str]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.log: AnyLog = log
        self.transports = dict(transports)
        self._failures: Counter[str] = Counter()
        self._routes = {type_: tuple(names) for type_, names in (routes or {}).items()}
        self._clock = clock or SystemClock()
        self._failing: set[str] = set()
        self._lock = threading.Lock()
        for type_, names in self._routes.items():
            self._check_known(names, type_)

    @property
    def failures(self) -> Mapping[str, int]:
        """How many copies failed, by the name of the transport."""
        return dict(self._failures)

    def _route(self, event: Event) -> tuple[str, ...]:
        """The names of its transports: configured for its type, or else declared by its class."""
        declared = type(event).__headwater__
        names = self._routes.get(declared.type, declared.transports)
        self._check_known(names, declared.type)
        return names

    def _check_known(self, names: Iterable[str], where: str) -> None:
        unknown = next((name for name in names if name not in self.transports), None)
        if unknown is not None:
            known = ", ".join(self.transports) or "none"
            raise InvalidOptionError(
                f"the bus has no transport {unknown!r}",
                where=where,
                next=f"Configure [transports.{unknown}]; it has {known}",
            )

    def _send(self, messages: Mapping[str, Sequence[Message]]) -> dict[str, Exception]:
        """Send each transport its messages; returns the errors of those that failed. Blocks."""
        causes: dict[str, Exception] = {}
        for name, batch in messages.items():
            try:
                transport = self.transports[name]
                transport.publish(batch[0]) if len(batch) == 1 else transport.publish_many(batch)
            except Exception as exc:
                causes[name] = exc
                self._record_failure(name, len(batch), exc)
            else:
                self._record_success(name)
        return causes

    def _record_failure(self, name: str, messages: int, exc: Exception) -> None:
        with self._lock:
            self._failures[name] += messages
            first = name not in self._failing
            self._failing.add(name)
        if first:  # one line when it begins, not one a message while it lasts
            logger.warning(
                "copies for transport %s are lost while it fails: %s. Use a forwarder for what must arrive",
                name,
                exc,
                exc_info=None if isinstance(exc, HeadwaterError) else exc,
            )

    def _record_success(self, name: str) -> None:
        with self._lock:
            again = name in self._failing
            self._failing.discard(name)
        if again:
            logger.info("transport %s works again; %d copies did not reach it so far", name, self._failures[name])

    def _close(self) -> None:
        """Closes every transport, then raises UnsentError or the first error."""
        unsent: list[object] = []
        first: Exception | None = None
        for name, transport in self.transports.items():
            try:
                transport.close()
            except Exception as exc:
                first = first or exc
                if isinstance(exc, UnsentError):
                    unsent += exc.messages
                else:
                    logger.warning("transport %s could not be closed: %s", name, exc)
        if unsent:
            why = f"{len(unsent)} messages were in buffers of transports and did not get out"
            raise UnsentError(why, where="bus", next="They are in .messages", messages=unsent) from first
        if first is not None:
            raise first


class Bus(_BaseBus[Log]):
    """A log with named transports, for `order.publish(bus)`. `routes` names the transports of a type, in place of those
    that its class declares."""

    def close(self) -> None:
        """Closes its transports; the log stays open."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncBus(_BaseBus[AsyncLog]):
    """`Bus` for an AsyncLog: `await order.publish(bus)`. Transports run on threads."""

    async def close(self) -> None:
        """Closes its transports; the log stays open."""
        await run_async(_on_thread(self._close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _on_thread(work: Callable[[], T]) -> Flow[T]:
    pool: Any = None  # the event loop's own
    result: T = yield Blocking(work, pool)
    return result


def make_bus(
    settings: Settings, log: Log | AsyncLog, open_transport: Callable[..., Transport], clock: Clock | None = None
) -> Any:
    """The bus that `[transports.…]` and `[messages.…]` describe, a Bus or an AsyncBus as the log is. `open_transport`
    gets a url and the options `breaker` and `batch`. Blocks while transports open; if one fails, the others are
    closed."""
    opened: dict[str, Transport] = {}
    try:
        for name, configured in settings.transports.items():
            opened[name] = open_transport(configured.url, **_options(configured))
        routes = {  # an empty table leaves it to the class, an empty list does not
            type_: message.transports
            for type_, message in settings.messages.items()
            if "transports" in message.model_fields_set
        }
        if isinstance(log, AsyncLog):
            return AsyncBus(log, opened, routes=routes, clock=clock)
        return Bus(log, opened, routes=routes, clock=clock)
    except BaseException:
        for transport in opened.values():
            try:
                transport.close()
            except Exception as exc:
                logger.warning("transport %s could not be closed: %s", transport.name, exc)
        raise


def _options(configured: TransportSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if configured.breaker_failures:
        options["breaker"] = {
            "failures": configured.breaker_failures,
            "within": configured.breaker_window,
            "open": configured.breaker_reset,
        }
    if configured.batch_size > 1:
        options["batch"] = {"size": configured.batch_size, "wait": configured.batch_wait}
    return options


# --- publishing -------------------------------------------------------------------------------------------------


def publish_prepared(
    verbs: LogVerbs, bus: Bus | AsyncBus | None, batch: Sequence[tuple[Event, Prepared]], *, together: bool = False
) -> Flow[list[int]]:
    """The log first, then the copies. Events with log=False have seq 0. Checks all of the batch before it publishes."""
    routes = [bus._route(event) if bus is not None else () for event, _ in batch]
    for (event, prepared), names in zip(batch, routes, strict=True):
        _check_possible(type(event).__headwater__.type, type(event).__headwater__.log, names, prepared)
    parts = [prepared for _, prepared in batch]
    if bus is not None and any(routes):
        now_ms = bus._clock.now_ms()
        parts = [_with_id(part, now_ms) if names else part for part, names in zip(parts, routes, strict=True)]
    logged = [at for at, (event, _) in enumerate(batch) if type(event).__headwater__.log]
    if together:
        stored = yield from wait(verbs.publish_many([tuple(parts[at]) for at in logged]))
    else:
        stored = []
        for at in logged:
            topic, data, options = parts[at]
            stored.append((yield from wait(verbs.publish(topic, data, options))))  # type: ignore[arg-type]
    seqs = [0] * len(batch)
    for at, seq in zip(logged, stored, strict=True):
        seqs[at] = seq
    if bus is not None and any(routes):
        copies: dict[str, list[Message]] = {}
        for part, seq, names in zip(parts, seqs, routes, strict=True):
            for name in names:
                copies.setdefault(name, []).append(copy_of(part, seq, bus._clock.now_ms()))
        causes = yield from _on_thread(partial(bus._send, copies))
        for (event, _), names in zip(batch, routes, strict=True):
            if not type(event).__headwater__.log and all(name in causes for name in names):
                failed = {name: causes[name] for name in names}
                reasons = "; ".join(f"{name}: {cause}" for name, cause in failed.items())
                raise AllTransportsFailedError(
                    f"no transport took it: {reasons}", where=type(event).__headwater__.type, causes=failed
                )
    return seqs


def _check_possible(type_: str, log: bool, names: tuple[str, ...], prepared: Prepared) -> None:
    if not log and not names:
        raise InvalidOptionError(
            "its class has log=False, and no transport is named for it",
            where=type_,
            next="Publish it to a bus, and set transports=(…) on the class or in [messages]",
        )
    if "tx" in prepared.options:
        raise InvalidOptionError(
            "a bus sends no copies of what may yet be rolled back",
            where=type_,
            next="Publish to bus.log in your transaction, and let a forwarder feed the transport",
        )


def _with_id(prepared: Prepared, now_ms: int) -> Prepared:
    """The message and its copies have the same id."""
    if "id" in prepared.options:
        return prepared
    return prepared._replace(options={**prepared.options, "id": new_id(now_ms)})


def copy_of(prepared: Prepared, seq: int, now_ms: int) -> Message:
    """The message as the log has it, or would have it; `seq` is 0 if no log does."""
    options: Any = prepared.options
    return msgspec.structs.replace(make_message(prepared.topic, prepared.data, now_ms, **options), seq=seq)


# --- targets ----------------------------------------------------------------------------------------------------


def log_of(target: Any, where: str) -> Log | AsyncLog:
    log = target.log if isinstance(target, Bus | AsyncBus) else target
    if not isinstance(log, Log | AsyncLog):
        raise InvalidOptionError(
            f"{quoted(redact_url(target) if isinstance(target, str) else target)} is no log",
            where=where,
            next="Pass what headwater.open() or headwater.open_async() gave, or a bus",
        )
    return log


def check_publishable(target: Any, where: str) -> None:
    if not callable(getattr(target, "publish", None)) and not isinstance(target, Bus | AsyncBus):
        # repr(target) may hold a password.
        raise InvalidOptionError(
            f"a {type(target).__name__} cannot be published to",
            where=where,
            next=(
                "Pass an open log: what headwater.open() or headwater.open_async() gave, a transaction in it, or a bus"
            ),
        )


def run(log: Log | AsyncLog, flow: Flow[T]) -> Any:
    """The outcome of the flow, or for asyncio an awaitable of it."""
    return run_async(flow) if isinstance(log, AsyncLog) else run_blocking(flow)


class Binding:
    """Made by `OrderPlaced.bind(log)`: ends with `undo()`, or with its `with` block. The newest one is used."""

    def __init__(self, cls: type[Event], target: Any) -> None:
        self.target = target
        self._bindings = cls.__headwater__.bindings
        self._bindings.append(self)

    def undo(self) -> None:
        """Remove the binding. May be repeated."""
        if self in self._bindings:
            self._bindings.remove(self)

    def __enter__(self) -> Any:
        return self.target

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def target_of(cls: type[Event], given: Any) -> Any:
    """The given target, or else the one that the class or its nearest base is bound to."""
    if given is not None:
        return given
    for base in cls.__mro__:
        declared = base.__dict__.get("__headwater__")
        for binding in () if declared is None else reversed(list(declared.bindings)):
            return binding.target
    raise InvalidStateError(
        "it is not bound to a log",
        where=f"class {cls.__name__}",
        next=f"Pass the log, or bind the class once: {cls.__name__}.bind(log)",
    )
