"""Publishing to a bus: the log first, then copies to the transports of each class.

The log is what counts: when it has the message, the publish has succeeded. A transport that fails is logged and
counted, and its copy is lost; what must arrive goes through a forwarder, which waits and tries again. A class that says
`log=False` goes to its transports alone, and fails only if all of them do.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.broker.flow import Blocking, Flow
from headwater.broker.verbs import LogVerbs
from headwater.errors import AllTransportsFailed, HeadwaterError, InvalidOption, Unsent
from headwater.message import SALT_BITS, Message, derived_id
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.transport import Transport
from headwater.transports.lines import make_message
from headwater.typed.preparing import Prepared

if TYPE_CHECKING:
    from headwater.typed.event import Event

logger = logging.getLogger("headwater.typed")

POOL: Any = None  # the event loop's own
RANDOM_BITS = 48  # of an id, where that of a message in a log has its seq


class Copies:
    """The transports of a bus, and which class goes to which."""

    def __init__(
        self, transports: Mapping[str, Transport], routes: Mapping[str, Sequence[str]], clock: Clock | None
    ) -> None:
        self.transports = dict(transports)
        self.failures: Counter[str] = Counter()
        self._routes = {type_: tuple(names) for type_, names in routes.items()}
        self._clock = clock or SystemClock()
        self._failing: set[str] = set()
        self._lock = threading.Lock()
        for type_, names in self._routes.items():
            self._refuse_unknown(names, type_)

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def names_for(self, event: Event) -> tuple[str, ...]:
        """What configuration says of its type, or else what its class says."""
        declared = type(event).__headwater__
        names = self._routes.get(declared.type, declared.transports)
        self._refuse_unknown(names, declared.type)
        return names

    def _refuse_unknown(self, names: Iterable[str], where: str) -> None:
        unknown = next((name for name in names if name not in self.transports), None)
        if unknown is not None:
            known = ", ".join(self.transports) or "none"
            raise InvalidOption(
                f"the bus has no transport {unknown!r}",
                where=where,
                next=f"Configure [transports.{unknown}]; it has {known}",
            )

    def send(self, messages: Mapping[str, Sequence[Message]]) -> dict[str, Exception]:
        """To each transport its messages; the errors of those that failed. Blocks."""
        causes: dict[str, Exception] = {}
        for name, batch in messages.items():
            try:
                transport = self.transports[name]
                transport.publish(batch[0]) if len(batch) == 1 else transport.publish_many(batch)
            except Exception as exc:
                causes[name] = exc
                self._note_failure(name, len(batch), exc)
            else:
                self._note_success(name)
        return causes

    def _note_failure(self, name: str, messages: int, exc: Exception) -> None:
        with self._lock:
            self.failures[name] += messages
            first = name not in self._failing
            self._failing.add(name)
        if first:  # one line when it begins, not one a message while it lasts
            logger.warning(
                "copies for transport %s are lost while it fails: %s. Use a forwarder for what must arrive",
                name,
                exc,
                exc_info=None if isinstance(exc, HeadwaterError) else exc,
            )

    def _note_success(self, name: str) -> None:
        with self._lock:
            again = name in self._failing
            self._failing.discard(name)
        if again:
            logger.info("transport %s works again; %d copies did not reach it so far", name, self.failures[name])

    def close(self) -> None:
        """All of them, whatever one says; then what one said."""
        unsent: list[object] = []
        first: Exception | None = None
        for name, transport in self.transports.items():
            try:
                transport.close()
            except Unsent as exc:
                unsent += exc.messages
                first = first or exc
            except Exception as exc:
                logger.warning("transport %s could not be closed: %s", name, exc)
                first = first or exc
        if unsent:
            why = f"{len(unsent)} messages were in buffers of transports and did not get out"
            raise Unsent(why, where="bus", next="They are in .messages", messages=unsent) from first
        if first is not None:
            raise first


def publish_prepared(
    verbs: LogVerbs, copies: Copies | None, batch: Sequence[tuple[Event, Prepared]], *, together: bool = False
) -> Flow[list[int]]:
    """The log first, then the copies. Events with log=False have seq 0. Refused as a whole before anything is done."""
    routes: dict[int, tuple[str, ...]] = {}
    for at, (event, prepared) in enumerate(batch):
        declared = type(event).__headwater__
        routes[at] = copies.names_for(event) if copies is not None else ()
        _refuse_what_cannot_be(declared.type, declared.log, routes[at], prepared)
    parts = [prepared for _, prepared in batch]
    if copies is not None and any(routes.values()):
        parts = [_with_id(part, copies.now_ms()) if routes[at] else part for at, part in enumerate(parts)]
    logged = [at for at, (event, _) in enumerate(batch) if type(event).__headwater__.log]
    seqs = [0] * len(batch)
    if together:
        stored = yield from verbs.publish_many([tuple(parts[at]) for at in logged])
    else:
        stored = []
        for at in logged:
            topic, data, options = parts[at]
            stored.append((yield from verbs.publish(topic, data, options)))  # type: ignore[arg-type]
    for at, seq in zip(logged, stored, strict=True):
        seqs[at] = seq
    if copies is not None and any(routes.values()):
        yield from _send_copies(copies, batch, parts, seqs, routes)
    return seqs


def _send_copies(
    copies: Copies,
    batch: Sequence[tuple[Event, Prepared]],
    parts: Sequence[Prepared],
    seqs: Sequence[int],
    routes: Mapping[int, tuple[str, ...]],
) -> Flow[None]:
    by_name: dict[str, list[Message]] = {}
    for at, part in enumerate(parts):
        for name in routes[at]:
            by_name.setdefault(name, []).append(copy_of(part, seqs[at], copies.now_ms()))
    causes: dict[str, Exception] = yield Blocking(partial(copies.send, by_name), POOL)
    for at, (event, _) in enumerate(batch):
        if not type(event).__headwater__.log and all(name in causes for name in routes[at]):
            mine = {name: causes[name] for name in routes[at]}
            told = "; ".join(f"{name}: {cause}" for name, cause in mine.items())
            raise AllTransportsFailed(
                f"no transport took it: {told}", where=type(event).__headwater__.type, causes=mine
            )


def _refuse_what_cannot_be(type_: str, log: bool, names: tuple[str, ...], prepared: Prepared) -> None:
    if not log and not names:
        raise InvalidOption(
            "its class says log=False, and no transport is named for it",
            where=type_,
            next="Publish it to a bus, and say transports=(…) on the class or in [messages]",
        )
    if "tx" in prepared.options:
        raise InvalidOption(
            "a bus sends no copies of what may yet be rolled back",
            where=type_,
            next="Publish to bus.log in your transaction, and let a forwarder feed the transport",
        )


def _with_id(prepared: Prepared, now_ms: int) -> Prepared:
    """So that the message and its copies have the same one."""
    if "id" in prepared.options:
        return prepared
    new = derived_id(now_ms, secrets.randbits(SALT_BITS), secrets.randbits(RANDOM_BITS))
    return prepared._replace(options={**prepared.options, "id": new})


def copy_of(prepared: Prepared, seq: int, now_ms: int) -> Message:
    """As the log has it, or would have it; `seq` is 0 if no log does."""
    options: Any = prepared.options
    return msgspec.structs.replace(make_message(prepared.topic, prepared.data, now_ms, **options), seq=seq)
