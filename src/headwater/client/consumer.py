"""One holder of one subscription, with the log behind a connection. The verbs of `broker.subscriber`, as flows."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import is_
from typing import Any

import msgspec

from headwater.broker.claims import Claimed, Failure, taken_over
from headwater.broker.consumer import Consumer
from headwater.broker.flow import Flow, Ticket, Within, finish
from headwater.broker.wakeups import Waiter
from headwater.client.answers import read_fetched, read_late, read_nothing, read_subscribed
from headwater.client.link import Link
from headwater.client.params import WAIT_S_MAX
from headwater.client.request import Request
from headwater.errors import Closed, LeaseLost, SubscriptionActive, SubscriptionError, Unreachable
from headwater.message import ms_of_iso
from headwater.ports.records import Gap, SubscriptionSpec, selection_of
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


class RemoteConsumer(Consumer):
    """In flight is what was fetched and not settled; after a broken connection it is what `resume` claims again.
    `wire_id` is the id, with a number behind it where one log holds a subscription more than once."""

    def __init__(self, link: Link, id: str, spec: SubscriptionSpec, params: wire.Subscribe) -> None:
        super().__init__(id, spec, Waiter(selection_of(spec).pattern, id), PREFETCH_REMOTE)
        self.wire_id = id
        self._link = link
        self._params = params
        self._ready = False
        self._subscribing: Request | None = None
        self._begun: Ticket[wire.Subscribed] = Ticket()
        self._holder = new_holder()
        self._has_begun = False
        self._in_flight: dict[int, Claimed] = {}
        self._acks_sent: list[Acks] = []
        self._settling: dict[int, Ticket[Any]] = {}  # nacks and rejects without an answer, by seq
        self._leaves_s = 0.0
        self._last_seq = 0

    def _now_ms(self) -> int:
        return round(time.monotonic() * 1000)

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

    def abandon(self) -> None:
        """Its subscribe was refused or cancelled; should it begin all the same, it is given back."""
        self._closing = True
        self._begun.watch(partial(self._give_back, ()))

    def _request(self) -> Request:
        return Request("rpc.subscribe.persistent", self._params_now, self._take_up, alone=True)

    def _params_now(self) -> wire.Subscribe:
        if self.spec.mode == "ephemeral":
            start = self._last_seq if self._has_begun else self._params.start
            return msgspec.structs.replace(self._params, start=start)
        resume = wire.ResumeFrom(self._holder, self._held())
        if not self._has_begun:
            return msgspec.structs.replace(self._params, resume=resume)
        return msgspec.structs.replace(self._params, resume=resume, wait=0.0, takeover=msgspec.UNSET)

    def _held(self) -> list[tuple[int, int]]:
        """The last ones, if there are more than may be in flight: the time of others has run out."""
        return [(seq, claimed.attempt) for seq, claimed in self._in_flight.copy().items()][-wire.SEQS_MAX :]

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
        for acks in self._acks_sent:
            acks.seqs = [seq for seq in acks.seqs if seq not in settled]
        for seq in [seq for seq in self._in_flight.copy() if seq not in held]:
            self._in_flight.pop(seq, None)
        self._drop(lambda claimed: claimed.message.seq not in held)
        finish([(ticket, None, None) for seq, ticket in self._settling.copy().items() if seq in settled])

    @property
    def is_ready(self) -> bool:
        return self._ready

    @property
    def is_leaving(self) -> bool:
        return (self._interrupted or self.closed) and time.monotonic() > self._leaves_s

    def lost_connection(self) -> None:
        self._ready = False

    def resume(self) -> Request | None:
        if self.closed or self.lost or self._subscribing is not None:  # one not answered is sent again by itself
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

    def lose(self, error: BaseException | None = None) -> None:
        """It is somebody else's now, or gone."""
        has_other_holder = error is None or isinstance(error, SubscriptionActive)
        why = error if isinstance(error, SubscriptionError) and not has_other_holder else taken_over(self.id)
        super().lose(why)
        self._link.refuse_waiting(self, why)
        self._ready = True  # what is still asked for gets its refusal from the server

    # --- fetching -----------------------------------------------------------------------------------------------

    def _look(self, limit: int) -> Flow[None]:
        asked = self._ask(limit, 0.0)
        try:
            yield asked
        except LeaseLost as exc:
            self.lose(exc)
            raise self._error or exc from exc
        finally:
            if not self._ready:
                self._end_wait(asked)

    def _fill(self, limit: int, until_s: float | None) -> Flow[None]:
        """One fetch waits at the server; a wait is over when it is over, be the server there or not."""
        asked: Ticket[Any] | None = None
        try:
            while not (self._buffer or self._has_ended):
                news = self._waiter.arm()
                left_s = POLL_S if until_s is None else until_s - time.monotonic()
                if asked is None or asked.done:
                    if asked is not None and asked.error is not None:
                        raise asked.error
                    if self._buffer or left_s <= 0:
                        return
                    asked = self._ask(limit, min(left_s, POLL_S))
                elif left_s <= -ANSWER_S:
                    return
                yield Within(news, left_s + ANSWER_S)
        finally:
            if asked is not None:
                self._end_wait(asked)

    def _ask(self, limit: int, wait_s: float) -> Ticket[Any]:
        self._link.refuse_closed()
        request = Request("rpc.fetch", wire.Fetch(self.wire_id, limit, wait_s), self._arrive, alone=True, consumer=self)
        with self._lock:  # so that it is asked before another thread closes, or not at all
            self._refuse_ended()
            request.ticket.watch(self._fetched)
            # While there is no connection a wait goes on; a quick look does not.
            return self._link.enqueue(request, WAIT_S_MAX if wait_s else None)

    def _end_wait(self, asked: Ticket[Any]) -> None:
        """The taker is gone: what the server would find from now on would lie about here."""
        if asked.done:
            return
        if self._ready:
            self._link.enqueue(Request("rpc.fetch.end", wire.SubscriptionId(self.wire_id), read_nothing, again=False))
        else:
            finish([(asked, None, None)])  # so that it is not sent again

    def _arrive(self, raw: Any) -> None:
        """On the link's loop, in the order of the answers."""
        found = read_fetched(raw)
        if self.spec.mode != "ephemeral":
            self._in_flight.update((claimed.message.seq, claimed) for claimed in found)
        if found:
            self._last_seq = max(self._last_seq, found[-1].message.seq)
            self.deliver(found)

    def _fetched(self, ticket: Ticket[Any]) -> None:
        if isinstance(ticket.error, LeaseLost):
            self.lose(ticket.error)
        self._waiter.wake()

    def interrupt(self) -> None:
        self._leaves_s = time.monotonic() + LEAVE_S
        super().interrupt()

    def _drop(self, unwanted: Callable[[Claimed], bool]) -> None:
        for claimed in filter(unwanted, self._buffer.copy()):
            with contextlib.suppress(ValueError, IndexError):  # then another thread has taken it
                self._buffer.remove(claimed)

    # --- settling -----------------------------------------------------------------------------------------------

    def ack(self, settled: Sequence[Claimed]) -> Ticket[Any]:
        if self.spec.mode == "ephemeral":
            return self.submit_ack(settled)
        with self._lock:  # as for a fetch
            self._refuse_strangers(settled)
            ticket = self._send_acks(Acks([claimed.message.seq for claimed in settled], strict=True))
        ticket.watch(lambda _: self._forget(settled) if ticket.error is None else None)
        return ticket

    def submit_ack(self, settled: Sequence[Claimed]) -> Ticket[list[int]]:
        if self.spec.mode == "ephemeral" or self.closed:
            # Once closed, an ack comes too late. The subscription is not lost: what waits to be sent still goes there.
            done_already: Ticket[list[int]] = Ticket()
            late = [] if self.spec.mode == "ephemeral" else sorted(claimed.message.seq for claimed in settled)
            finish([(done_already, late, None)])
            return done_already
        mine = [claimed for claimed in settled if self._was_handed_out_last(claimed)]
        acks = Acks([claimed.message.seq for claimed in mine], strict=False)
        stale = {claimed.message.seq for claimed in settled}.difference(acks.seqs) if len(mine) < len(settled) else ()
        ticket: Ticket[list[int]] = self._send_acks(acks, lambda raw: sorted({*read_late(raw), *stale}))

        ticket.watch(lambda _: self._forget(mine) if ticket.error is None else None)
        return ticket

    def _send_acks(self, acks: Acks, decode: Callable[[Any], list[int]] = read_late) -> Ticket[Any]:
        self._acks_sent.append(acks)
        request = Request("rpc.acknowledge.persistent", partial(self._ack_params, acks), decode, consumer=self)
        request.ticket.watch(lambda _: self._acks_sent.remove(acks))
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
        params = wire.Settle(
            self.wire_id,
            claimed.message.seq,
            claimed.attempt,
            delay=delay_s,
            reason=failure.error,
            stack=failure.stack,
            handler=failure.handler,
            failed=method == "rpc.reject" and failure.reason == "processing_error",
        )
        request = Request(method, params, read_nothing, consumer=self)
        with self._lock:  # as for a fetch
            self._refuse_strangers([claimed])
            ticket = self._settling[claimed.message.seq] = self._link.enqueue(request)
        try:
            yield ticket
        finally:
            self._settling.pop(claimed.message.seq, None)
        if self._in_flight.get(claimed.message.seq) is claimed:  # else it has come again by now
            del self._in_flight[claimed.message.seq]

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        seqs = [claimed.message.seq for claimed in extended]
        params = wire.Settle(self.wire_id, sequence_ids=seqs, by=None if by_ms is None else by_ms / 1000)
        with self._lock:  # as for a fetch
            self._refuse_strangers(extended)
            ticket = self._link.enqueue(Request("rpc.extend", params, read_nothing, consumer=self))
        yield ticket

    def _refuse_strangers(self, settled: Sequence[Claimed]) -> None:
        """What the server, which knows them by their seqs, cannot tell apart."""
        self._link.refuse_closed()
        if (self.closed or self.lost) and self.spec.mode == "exclusive":
            raise taken_over(self.id)
        for claimed in settled:
            seq = claimed.message.seq
            if self.closed or not self._was_handed_out_last(claimed):
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
                self._drop(partial(is_, again))

    def release(self, untouched: Sequence[Claimed]) -> Ticket[None]:
        self._forget(untouched)
        seqs = [claimed.message.seq for claimed in untouched]
        request = Request("rpc.release", wire.GiveBack(self.wire_id, seqs), read_nothing, again=False, consumer=self)
        if self.spec.mode == "ephemeral" or not self._ready:  # a server that lost us has let go of them
            finish([(request.ticket, None, None)])
            return request.ticket
        return self._link.enqueue(request)

    # --- living and ending --------------------------------------------------------------------------------------

    @property
    def heartbeat_s(self) -> float:
        return self.spec.ack_wait_ms / 1000 / HEARTBEATS_PER_WAIT

    def heartbeat(self) -> Request | None:
        """More time for what is being handled, or waits here to be."""
        if self.spec.mode == "ephemeral" or self.closed or self.lost:
            return None
        seqs = [claimed.message.seq for claimed in self._to_extend()]
        if not seqs:
            return None
        params = wire.Settle(self.wire_id, sequence_ids=seqs, lenient=True)
        return Request("rpc.extend", params, read_nothing, again=False, consumer=self)

    def take_gap(self, notice: wire.GapNotice) -> None:
        at_ms = ms_of_iso(notice.timestamp)
        self.deliver([], [Gap(self.id, notice.from_, notice.to, notice.count, notice.why, at_ms)])
        self._wake()

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        self._leaves_s = time.monotonic() + LEAVE_S

        def acked(_: Ticket[Any]) -> None:
            if self in self._link.resuming:
                self._link.resuming.remove(self)
            if self._ready or self._subscribing is None:
                self._give_back(seen)
            else:  # it may be taken up again on a new connection just now
                self._subscribing.ticket.watch(partial(self._give_back, seen))

        if self._acking is None:
            acked(self.gone)
        else:
            self._acking.watch(acked)

    def _give_back(self, seen: Collection[tuple[int, int]] | None, taken_up: Ticket[Any] | None = None) -> None:
        """What the server has sent and did not arrive is not among the seen, so it counts as no attempt."""

        def params() -> wire.Release:
            """As it is when it is sent: on the link's loop, where nothing else arrives meanwhile."""
            unseen = set(self._unseen())
            looked_at = self._held() if seen is None else seen
            return wire.Release(self.wire_id, [(seq, attempt) for seq, attempt in looked_at if seq not in unseen])

        def done(answer: Ticket[Any]) -> None:
            # Without a connection, or if it is another's by now, it has been given back already.
            is_over = isinstance(answer.error, Unreachable | SubscriptionError | Closed)
            finish([(self.gone, None, None if is_over else answer.error)])

        if not self._ready or (taken_up is not None and taken_up.error is not None):
            finish([(self.gone, None, None)])  # the server let go of it when the connection broke
            return
        self._link.enqueue(Request("rpc.unsubscribe.persistent", params, read_nothing, again=False)).watch(done)


def new_holder() -> str:
    """A name that nobody else has, and that tells people where the holder is."""
    host = re.sub("[^A-Za-z0-9]+", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
