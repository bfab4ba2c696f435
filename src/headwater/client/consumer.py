"""One holder of one subscription, with the log behind a connection. The verbs of `broker.subscriber`, as flows."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from headwater.broker.claims import Claimed, Failure, taken_over
from headwater.broker.flow import Flow, Ticket, Within, finish
from headwater.broker.reading import FETCH_MAX
from headwater.client.answers import read_fetched, read_late, read_nothing, read_subscribed
from headwater.client.arrivals import Arrivals
from headwater.client.link import Link
from headwater.client.params import WAIT_S_MAX
from headwater.client.request import Request
from headwater.errors import Closed, HeadwaterError, LeaseLost, SubscriptionActive, SubscriptionError, Unreachable
from headwater.message import check_whole, ms_of_iso
from headwater.ports.records import Gap, SubscriptionSpec
from headwater.protocol import wire

POLL_S = 20.0  # how long one fetch waits at the server; below what most proxies put up with
PREFETCH_REMOTE = 500  # a round trip costs more than a look at a file
ANSWER_S = 1.0  # how much longer than asked a fetch waits here for an answer that may be on its way
HEARTBEATS_PER_WAIT = 3
LEAVE_S = 1.0  # how long who was told to stop waits for a connection, to ack what it has done


class Acks(msgspec.Struct):
    """Seqs on their way to be acked. What a resumed connection reports as settled is taken off."""

    seqs: list[int]
    strict: bool


class RemoteConsumer:
    """In flight is what was fetched and not settled; after a broken connection it is what `resume` claims again.
    `wire_id` is the id, with a number behind it where one log holds a subscription more than once."""

    def __init__(self, link: Link, id: str, spec: SubscriptionSpec, params: wire.Subscribe) -> None:
        self.id = self.wire_id = id
        self.spec = spec
        self.resumed_from = 0
        self.lost = False
        self.prefetch = PREFETCH_REMOTE
        self.on_gap: Callable[[Gap], None] | None = None
        self._link = link
        self._params = params
        self._ready = False
        self._subscribing: Request | None = None
        self._begun: Ticket[wire.Subscribed] = Ticket()
        self._holder = new_holder()
        self._has_begun = False
        self._in_flight: dict[int, Claimed] = {}
        self._arrived = Arrivals()
        self._asks: set[Ticket[Any]] = set()  # fetches on their way
        self._waiting_ask: Ticket[Any] | None = None  # the one that waits at the server, for whoever waits here
        self._running: dict[int, float] = {}
        self._acks: list[Acks] = []
        self._settling: dict[int, Ticket[Any]] = {}  # nacks and rejects without an answer, by seq
        self._error: HeadwaterError | None = None
        self._closed = False
        self._interrupted = False
        self._leaves_s = 0.0
        self._last_seq = 0

    # --- beginning, and beginning again -------------------------------------------------------------------------

    def begin(self) -> Flow[None]:
        """The first time. From then on the link resumes it by itself."""
        self._params.subscription_id = self.wire_id
        until = time.monotonic() + (self._params.wait or 0.0)  # UNSET is falsy
        while True:
            left_s = max(0.0, until - time.monotonic())
            self._params.wait = min(left_s, POLL_S)
            request = self._subscribing = self._request()
            self._begun = request.ticket
            try:
                done: wire.Subscribed = yield self._link.enqueue(request)
                break
            except SubscriptionActive:
                if left_s <= 0:
                    raise
        self.resumed_from = self._last_seq = done.resumed_from_seq

    def abandon(self, then: Callable[[], None]) -> None:
        """Nobody waits for it to begin any more; should it do so all the same, it is given back."""

        def begun(ticket: Ticket[Any]) -> None:
            if ticket.error is not None:
                then()
            else:
                self._link.enqueue(self._release([])).watch(lambda _: then())

        self._closed = True
        self._begun.watch(begun)

    def _request(self) -> Request:
        return Request("rpc.subscribe.persistent", self._params_now, self._take_up, alone=True)

    def _params_now(self) -> wire.Subscribe:
        if self.spec.mode == "ephemeral":
            start = self._last_seq if self._has_begun else self._params.start
            return msgspec.structs.replace(self._params, start=start)
        held = [(seq, claimed.attempt) for seq, claimed in self._in_flight.copy().items()]
        resume = wire.ResumeFrom(self._holder, held)
        if not self._has_begun:
            return msgspec.structs.replace(self._params, resume=resume)
        return msgspec.structs.replace(self._params, resume=resume, wait=0.0, takeover=msgspec.UNSET)

    def _take_up(self, raw: Any) -> wire.Subscribed:
        done = read_subscribed(raw)
        resumed, self._has_begun = self._has_begun, True
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
        self._arrived.keep_only(held)
        finish([(ticket, None, None) for seq, ticket in self._settling.copy().items() if seq in settled])

    @property
    def is_ready(self) -> bool:
        return self._ready

    @property
    def is_leaving(self) -> bool:
        return self._interrupted and time.monotonic() > self._leaves_s

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
        has_other_holder = error is None or isinstance(error, SubscriptionActive)
        self._error = error if isinstance(error, SubscriptionError) and not has_other_holder else taken_over(self.id)
        self._ready = True  # what is still asked for gets its refusal from the server
        self._link.refuse_waiting(self, self._error)
        self._arrived.ring()

    # --- fetching -----------------------------------------------------------------------------------------------

    def fetch(self, limit: int, wait_s: float | None) -> Flow[list[Claimed]]:
        check_whole("the number to fetch", limit, 1, FETCH_MAX)
        until = None if wait_s is None else time.monotonic() + wait_s
        asked: Ticket[Any] | None = None
        try:
            while True:
                news = self._arrived.arm()
                if self._closed:
                    raise Closed(f"subscription '{self.id}' is closed", where=self.id, next="Subscribe again")
                self._arrived.tell_gaps(self.on_gap)
                if self._error is not None:
                    raise self._error
                if self._interrupted:
                    return []
                is_answered = asked is None or asked.done  # looked at once: an answer may come between two looks
                if is_answered:
                    if self._arrived:
                        return self._arrived.take(limit)
                    if asked is not None and asked.error is not None:
                        raise asked.error
                left_s = POLL_S if until is None else until - time.monotonic()
                if left_s <= 0 and asked is not None and (is_answered or (wait_s and left_s <= -ANSWER_S)):
                    return []
                if is_answered:
                    asked = self._ask(limit, max(0.0, min(left_s, POLL_S)))
                # A quick look waits for its answer; a wait is over when it is over, be the server there or not.
                yield Within(news, None if wait_s == 0 else left_s + ANSWER_S)
        finally:
            if asked is not None and not asked.done:
                self._end_waits()

    def _ask(self, limit: int, wait_s: float) -> Ticket[Any]:
        """Whoever waits joins the fetch that waits at the server already, if there is one."""
        if wait_s and self._waiting_ask is not None and not self._waiting_ask.done:
            return self._waiting_ask
        request = Request("rpc.fetch", wire.Fetch(self.wire_id, limit, wait_s), self._arrive, alone=True, consumer=self)
        self._asks.add(request.ticket)
        if wait_s:
            self._waiting_ask = request.ticket
        request.ticket.watch(self._fetched)
        # While there is no connection a wait goes on; a quick look does not.
        return self._link.enqueue(request, WAIT_S_MAX if wait_s else None)

    def _end_waits(self) -> None:
        """Nobody waits any more: what the server would find from now on would lie about here."""
        if self._ready:
            self._link.enqueue(Request("rpc.fetch.end", wire.SubscriptionId(self.wire_id), read_nothing, again=False))
        else:
            finish([(asked, None, None) for asked in self._asks.copy()])  # so that they are not sent again

    def _arrive(self, raw: Any) -> None:
        """On the link's loop, in the order of the answers: from here on they are ours, whoever waits for them."""
        found = read_fetched(raw)
        if self.spec.mode != "ephemeral":
            self._in_flight.update((claimed.message.seq, claimed) for claimed in found)
        self._arrived.add(found)
        if found:
            self._last_seq = max(self._last_seq, found[-1].message.seq)

    def _fetched(self, ticket: Ticket[Any]) -> None:
        self._asks.discard(ticket)
        self.lost = self.lost or isinstance(ticket.error, LeaseLost)
        self._arrived.ring()

    def interrupt(self) -> None:
        self._interrupted = True
        self._leaves_s = time.monotonic() + LEAVE_S
        self._arrived.ring()

    # --- settling -----------------------------------------------------------------------------------------------

    def ack(self, settled: Sequence[Claimed]) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        self._refuse_strangers(settled)
        yield self._send_acks(Acks([claimed.message.seq for claimed in settled], strict=True))
        self._forget(settled)

    def submit_ack(self, settled: Sequence[Claimed], then: Callable[[], None]) -> Ticket[list[int]]:
        if self.spec.mode == "ephemeral" or self._closed:
            done_already: Ticket[list[int]] = Ticket()
            finish([(done_already, [], taken_over(self.id) if self.spec.mode != "ephemeral" else None)])
            return done_already
        mine = [claimed for claimed in settled if self._was_handed_out_last(claimed)]
        acks = Acks([claimed.message.seq for claimed in mine], strict=False)
        stale = {claimed.message.seq for claimed in settled}.difference(acks.seqs) if len(mine) < len(settled) else ()
        ticket: Ticket[list[int]] = self._send_acks(acks, lambda raw: sorted({*read_late(raw), *stale}))

        def done(_: Ticket[list[int]]) -> None:
            if ticket.error is None:
                self._forget(mine)
                then()

        ticket.watch(done)
        return ticket

    def _send_acks(self, acks: Acks, decode: Callable[[Any], list[int]] = read_late) -> Ticket[Any]:
        self._acks.append(acks)
        request = Request("rpc.acknowledge.persistent", partial(self._ack_params, acks), decode, consumer=self)
        request.ticket.watch(lambda _: self._acks.remove(acks))
        return self._link.enqueue(request)

    def _ack_params(self, acks: Acks) -> wire.Acknowledge:
        return wire.Acknowledge(self.wire_id, sequence_ids=acks.seqs, lenient=not acks.strict, strict=acks.strict)

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
            self.wire_id,
            claimed.message.seq,
            delay=delay_s,
            reason=failure.error,
            stack=failure.stack,
            handler=failure.handler,
            failed=method == "rpc.reject" and failure.reason == "processing_error",
        )
        ticket = self._settling[claimed.message.seq] = self._link.enqueue(
            Request(method, params, read_nothing, consumer=self)
        )
        try:
            yield ticket
        finally:
            self._settling.pop(claimed.message.seq, None)
        self._forget([claimed])

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        self._refuse_strangers(extended)
        seqs = [claimed.message.seq for claimed in extended]
        params = wire.Settle(self.wire_id, sequence_ids=seqs, by=None if by_ms is None else by_ms / 1000)
        yield self._link.enqueue(Request("rpc.extend", params, read_nothing, consumer=self))

    def _refuse_strangers(self, settled: Sequence[Claimed]) -> None:
        """What the server, which knows them by their seqs, cannot tell apart."""
        self._link.refuse_closed()
        if (self._closed or self.lost) and self.spec.mode == "exclusive":
            raise taken_over(self.id)
        for claimed in settled:
            seq = claimed.message.seq
            if self._closed or not self._was_handed_out_last(claimed):
                raise LeaseLost(
                    f"message {seq} is not in flight for '{self.id}' any more: it was settled already, or its time ran "
                    "out and it was passed on",
                    where=self.id,
                    next="Drop it; if handling takes long, set a longer ack_wait, or extend it in time",
                )

    def _was_handed_out_last(self, claimed: Claimed) -> bool:
        return self._in_flight.get(claimed.message.seq, claimed) is claimed

    def _forget(self, settled: Sequence[Claimed]) -> None:
        """The server settles by seq: should it have handed one out anew just before, that is settled, too."""
        for claimed in settled:
            again = self._in_flight.pop(claimed.message.seq, claimed)
            if again is not claimed:
                self._arrived.drop(again)

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
        seqs += self._arrived.seqs()
        if not seqs:
            return None
        params = wire.Settle(self.wire_id, sequence_ids=seqs, lenient=True)
        return Request("rpc.extend", params, read_nothing, again=False, consumer=self)

    def take_gap(self, notice: wire.GapNotice) -> None:
        at_ms = ms_of_iso(notice.timestamp)
        self._arrived.add_gap(Gap(self.id, notice.from_, notice.to, notice.count, notice.why, at_ms))

    def close(self, unseen: Iterable[int] = ()) -> Flow[None]:
        if self._closed:
            return
        self._closed = True
        self._arrived.ring()
        if self in self._link.resuming:
            self._link.resuming.remove(self)
        if not self._ready:
            return  # the server let go of it when the connection broke
        if self._asks:
            self._end_waits()
        for asked in self._asks.copy():  # what they bring was never seen by anybody
            yield Within(asked, ANSWER_S)
        never_seen = [*unseen, *self._arrived.seqs()]
        with contextlib.suppress(Unreachable, SubscriptionError, Closed):  # then it has been given back already
            yield self._link.enqueue(self._release(never_seen))

    def _release(self, never_seen: list[int]) -> Request:
        params = wire.Release(self.wire_id, never_seen)
        return Request("rpc.unsubscribe.persistent", params, read_nothing, again=False)


def new_holder() -> str:
    """A name that nobody else has, and that tells people where the holder is."""
    host = re.sub("[^A-Za-z0-9]+", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
