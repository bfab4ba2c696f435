"""One holder of one subscription, with the log behind a connection. The verbs of `broker.subscriber`, as flows."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from functools import partial
from typing import Any

import msgspec

from headwater.broker.claims import Claimed, Failure, taken_over
from headwater.broker.flow import Flow, Ticket, Within, finish
from headwater.broker.options import SubscribeOptions
from headwater.broker.reading import FETCH_MAX
from headwater.client.link import Link, Request
from headwater.errors import Closed, HeadwaterError, LeaseLost, SubscriptionActive, SubscriptionError, Unreachable
from headwater.message import Message, Span, check_whole, span_ms
from headwater.ports.records import Gap, SubscriptionSpec
from headwater.protocol import wire

POLL_S = 20.0  # how long one fetch waits at the server; below what most proxies put up with
PREFETCH_REMOTE = 500  # a round trip costs more than a look at a file
HEARTBEATS_PER_WAIT = 3
LATE_MAX_S = 365 * 86_400.0  # a wait without end

_subscribed = msgspec.json.Decoder(wire.Subscribed)
_acknowledged = msgspec.json.Decoder(wire.Acknowledged)
_claimed = msgspec.json.Decoder(list[Claimed])
_fetched = msgspec.json.Decoder(wire.Fetched)


class Acks(msgspec.Struct):
    """Seqs on their way to be acked. What a resumed connection reports as settled is taken off."""

    seqs: list[int]
    strict: bool


class RemoteConsumer:
    """In flight is what was fetched and not settled; after a broken connection it is what `resume` claims again."""

    def __init__(self, link: Link, id: str, spec: SubscriptionSpec, params: wire.Subscribe) -> None:
        self.id = id
        self.spec = spec
        self.resumed_from = 0
        self.lost = False
        self.prefetch = PREFETCH_REMOTE
        self.on_gap: Callable[[Gap], None] | None = None
        self._link = link
        self._params = params
        self._ready = False
        self._subscribing: Request | None = None
        self._lease: tuple[str, int] | None = None
        self._in_flight: dict[int, Claimed] = {}
        self._arrived: deque[Claimed] = deque()  # fetched, and nobody was there any more to take it
        self._running: dict[int, float] = {}
        self._acks: list[Acks] = []
        self._news: Ticket[None] = Ticket()
        self._error: HeadwaterError | None = None
        self._closed = False
        self._interrupted = False
        self._last_seq = 0

    # --- beginning, and beginning again -------------------------------------------------------------------------

    def begin(self) -> Flow[None]:
        """The first time. From then on the link resumes it by itself."""
        until = time.monotonic() + (self._params.wait or 0.0)  # UNSET is falsy
        while True:
            left_s = max(0.0, until - time.monotonic())
            self._params.wait = min(left_s, POLL_S)
            self._subscribing = self._request()
            try:
                done: wire.Subscribed = yield self._link.enqueue(self._subscribing)
                break
            except SubscriptionActive:
                if left_s <= 0:
                    raise
        self.resumed_from = self._last_seq = done.resumed_from_seq

    def _request(self) -> Request:
        return Request("rpc.subscribe.persistent", self._params_now, self._take_up, alone=True)

    def _params_now(self) -> wire.Subscribe:
        if self.spec.mode == "ephemeral":
            if not self._last_seq:
                return self._params
            return msgspec.structs.replace(self._params, start=self._last_seq)
        if self._lease is None:
            return self._params
        held = [(seq, claimed.attempt) for seq, claimed in self._in_flight.copy().items()]
        resume = wire.ResumeFrom(*self._lease, held)
        return msgspec.structs.replace(self._params, resume=resume, wait=0.0, takeover=msgspec.UNSET)

    def _take_up(self, raw: Any) -> wire.Subscribed:
        done = _subscribed.decode(raw)
        resumed = self._lease is not None
        self._lease = (done.holder, done.fence)
        if self.spec.mode == "ephemeral":
            self._last_seq = max(self._last_seq, done.resumed_from_seq)
        elif resumed:
            self._keep_only(set(done.held), set(done.settled))
        self._ready = True
        self._subscribing = None
        self._link.loop.call_soon(self._link.send_waiting)
        return done

    def _keep_only(self, held: set[int], settled: set[int]) -> None:
        """After a resume: what is not ours any more is settled, or has been passed on."""
        for acks in self._acks:
            acks.seqs = [seq for seq in acks.seqs if seq not in settled]
        for seq in [seq for seq in self._in_flight.copy() if seq not in held]:
            self._in_flight.pop(seq, None)
        self._arrived = deque(claimed for claimed in self._arrived if claimed.message.seq in held)

    @property
    def is_ready(self) -> bool:
        return self._ready

    def lost_connection(self) -> None:
        self._ready = False

    def resume(self) -> Request | None:
        if self._closed or self.lost or self._subscribing is not None:  # one not answered is sent again by itself
            return None
        request = self._subscribing = self._request()
        request.again = False
        request.ticket.then(self._link.loop, self._resumed)
        return request

    def _resumed(self, ticket: Ticket[Any]) -> None:
        if ticket.error is None:
            return
        self._subscribing = None
        if isinstance(ticket.error, Unreachable):
            return  # the connection broke again; the next one resumes
        self.lose(ticket.error)

    def lose(self, error: BaseException | None) -> None:
        """It is somebody else's now, or gone."""
        self.lost = True
        self._error = error if isinstance(error, SubscriptionError) else taken_over(self.id)
        self._ready = True  # so that what waits gets its refusal from the server
        self._link.loop.call_soon(self._link.send_waiting)
        self._wake()

    # --- fetching -----------------------------------------------------------------------------------------------

    def fetch(self, limit: int, wait_s: float | None) -> Flow[list[Claimed]]:
        check_whole("the number to fetch", limit, 1, FETCH_MAX)
        until = None if wait_s is None else time.monotonic() + wait_s
        has_asked = False
        while True:
            news = self._arm()
            if self._closed:
                raise Closed(f"subscription '{self.id}' is closed", where=self.id, next="Subscribe again")
            if self._error is not None:
                raise self._take_error()
            if self._arrived:
                return self._take(limit)
            if self._interrupted:
                return []
            left_s = None if until is None else until - time.monotonic()
            if has_asked and left_s is not None and left_s <= 0:
                return []
            self._ask(limit, POLL_S if left_s is None else max(0.0, min(left_s, POLL_S)))
            has_asked = True
            yield Within(news, None)

    def _ask(self, limit: int, wait_s: float) -> None:
        params = wire.Fetch(self.id, limit, wait_s)
        request = Request("rpc.fetch", params, self._arrive, alone=True, consumer=self)
        request.ticket.watch(self._fetched)
        # While there is no connection a wait goes on; a quick look does not.
        self._link.enqueue(request, LATE_MAX_S if wait_s else None)

    def _arrive(self, raw: Any) -> None:
        """On the link's loop, in the order of the answers: from here on they are ours, whoever waits for them."""
        fetched = _fetched.decode(raw)
        found = _claimed.decode(fetched.messages)
        for at in fetched.unreadable:
            found[at] = _unpacked(found[at])
        if self._closed:
            return
        self._in_flight.update((claimed.message.seq, claimed) for claimed in found)
        self._arrived.extend(found)
        if found:
            self._last_seq = max(self._last_seq, found[-1].message.seq)

    def _fetched(self, ticket: Ticket[Any]) -> None:
        if ticket.error is not None and self._error is None and not self._closed:
            error = ticket.error
            self.lost = self.lost or isinstance(error, LeaseLost)
            self._error = error if isinstance(error, HeadwaterError) else Unreachable(str(error), where=self.id)
        self._wake()

    def _take_error(self) -> HeadwaterError:
        error = self._error
        assert error is not None
        if not self.lost:
            self._error = None
        return error

    def _take(self, limit: int) -> list[Claimed]:
        taken: list[Claimed] = []
        try:
            while len(taken) < limit:
                taken.append(self._arrived.popleft())
        except IndexError:
            pass
        return taken

    def _arm(self) -> Ticket[None]:
        if self._news.done:
            self._news = Ticket()
        return self._news

    def _wake(self) -> None:
        finish([(self._news, None, None)])

    def interrupt(self) -> None:
        self._interrupted = True
        self._wake()

    # --- settling -----------------------------------------------------------------------------------------------

    def ack(self, settled: Sequence[Claimed]) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        self._refuse_strangers(settled)
        yield self._send_acks(Acks([claimed.message.seq for claimed in settled], strict=True))
        self._forget(settled)

    def submit_ack(self, settled: Sequence[Claimed], then: Callable[[], None]) -> Ticket[list[int]]:
        if self.spec.mode == "ephemeral":
            nothing: Ticket[list[int]] = Ticket()
            finish([(nothing, [], None)])
            return nothing
        ticket: Ticket[list[int]] = self._send_acks(Acks([claimed.message.seq for claimed in settled], strict=False))

        def done(_: Ticket[list[int]]) -> None:
            self._forget(settled)
            then()

        ticket.watch(done)
        return ticket

    def _send_acks(self, acks: Acks) -> Ticket[Any]:
        self._acks.append(acks)
        request = Request("rpc.acknowledge.persistent", partial(self._ack_params, acks), _late, consumer=self)
        request.ticket.watch(lambda _: self._acks.remove(acks))
        return self._link.enqueue(request)

    def _ack_params(self, acks: Acks) -> wire.Acknowledge:
        return wire.Acknowledge(self.id, sequence_ids=acks.seqs, lenient=not acks.strict)

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        delay_s = None if delay_ms is None else delay_ms / 1000
        yield from self._settle("rpc.nack", claimed, failure, delay_s)

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        yield from self._settle("rpc.reject", claimed, failure, None)

    def _settle(self, method: str, claimed: Claimed, failure: Failure, delay_s: float | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        self._refuse_strangers([claimed])
        params = wire.Settle(
            self.id,
            claimed.message.seq,
            delay=delay_s,
            reason=failure.error,
            stack=failure.stack,
            handler=failure.handler,
        )
        yield self._link.enqueue(Request(method, params, _nothing, consumer=self))
        self._forget([claimed])

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        self._refuse_strangers(extended)
        seqs = [claimed.message.seq for claimed in extended]
        params = wire.Settle(self.id, sequence_ids=seqs, by=None if by_ms is None else by_ms / 1000)
        yield self._link.enqueue(Request("rpc.extend", params, _nothing, consumer=self))

    def _refuse_strangers(self, settled: Sequence[Claimed]) -> None:
        if self._closed:
            raise Closed(f"subscription '{self.id}' is closed", where=self.id, next="Subscribe again")
        for claimed in settled:
            if self._in_flight.get(claimed.message.seq, claimed) is not claimed:
                raise LeaseLost(
                    f"message {claimed.message.seq} has been delivered again since",
                    where=self.id,
                    next="Drop it; if handlers take long, raise ack_wait or call extend()",
                )

    def _forget(self, settled: Sequence[Claimed]) -> None:
        for claimed in settled:
            self._in_flight.pop(claimed.message.seq, None)

    # --- living and ending --------------------------------------------------------------------------------------

    def began(self, claimed: Claimed) -> None:
        self._running[claimed.message.seq] = time.monotonic()

    def ended(self, claimed: Claimed) -> None:
        self._running.pop(claimed.message.seq, None)

    @property
    def heartbeat_s(self) -> float:
        return self.spec.ack_wait_ms / 1000 / HEARTBEATS_PER_WAIT

    def heartbeat(self) -> Request | None:
        """More time for what is being handled, or waits here to be, unless it has taken too long."""
        if self.spec.mode == "ephemeral" or self._closed or self.lost:
            return None
        now_s, most_s = time.monotonic(), self.spec.extension_ms_max / 1000
        seqs = [seq for seq, began_s in self._running.copy().items() if now_s - began_s < most_s]
        seqs += [claimed.message.seq for claimed in self._arrived.copy()]
        if not seqs:
            return None
        params = wire.Settle(self.id, sequence_ids=seqs, lenient=True)
        return Request("rpc.extend", params, _nothing, again=False, consumer=self)

    def take_gap(self, notice: wire.GapNotice, now_ms: int) -> None:
        if self.on_gap is not None:
            self.on_gap(Gap(self.id, notice.from_, notice.to, notice.count, notice.why, now_ms))

    def close(self, unseen: Iterable[int] = ()) -> Flow[None]:
        if self._closed:
            return
        never_seen = [*unseen, *(claimed.message.seq for claimed in self._arrived)]
        self._closed = True
        self._wake()
        if self in self._link.resuming:
            self._link.resuming.remove(self)
        if self.lost:
            return
        params = wire.Release(self.id, never_seen)
        request = Request("rpc.unsubscribe.persistent", params, _nothing, again=False)
        if not self._ready:
            return  # the server let go of it when the connection broke
        with contextlib.suppress(Unreachable, SubscriptionError, Closed):  # then it has been given back already
            yield self._link.enqueue(request)


def _late(raw: Any) -> list[int]:
    return _acknowledged.decode(raw).late


def _nothing(raw: Any) -> None:
    return None


def _unpacked(claimed: Claimed) -> Claimed:
    """A payload that is not JSON came as text."""
    message: Message = claimed.message
    raw = msgspec.Raw(str(msgspec.json.decode(message.raw)).encode())
    return msgspec.structs.replace(claimed, message=msgspec.structs.replace(message, raw=raw))


_SPANS = ("ack_wait", "extension_max", "lease", "backoff", "backoff_max", "inactive_timeout")


def subscribe_params(id: str, pattern: str, options: SubscribeOptions) -> wire.Subscribe:
    given: dict[str, Any] = dict(options)
    for name in _SPANS:
        span: Span | None = given.get(name)
        if span is not None:
            given[name] = span_ms(span, name) / 1000
    start = given.get("start")
    if start is not None and not isinstance(start, str | int):
        given["start"] = start.astimezone(UTC).isoformat()
    if "wait" in given and given["wait"] is None:
        given["wait"] = LATE_MAX_S
    return wire.Subscribe(id, pattern, deliver="fetch", **given)
