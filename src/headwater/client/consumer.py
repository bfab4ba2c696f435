"""A consumer of a subscription of a server. The interface is that of `broker.durable_consumer`."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from itertools import compress
from operator import is_, is_not
from typing import Any

import msgspec

from headwater.broker.consumer import Consumer
from headwater.broker.deliveries import Claimed, Failure, taken_over
from headwater.broker.flow import Completion, Flow, WaitFor, complete
from headwater.broker.subscribe import Start, SubscribeOptions, check_start
from headwater.broker.wakeups import Waiter
from headwater.client.connection import Connection
from headwater.client.outbox import Request
from headwater.errors import (
    ClosedError,
    LeaseLostError,
    SubscriptionActiveError,
    SubscriptionError,
    UnreachableError,
)
from headwater.formats import iso, ms_of_iso, span_ms, time_ms
from headwater.message import Message
from headwater.ports.records import Gap, SubscriptionSpec, selection_of
from headwater.protocol import methods as rpc

POLL_S = 20.0  # one fetch at the server; below the idle timeout of most proxies
PREFETCH_REMOTE = 500  # a round trip costs more than reading a file
ANSWER_S = 1.0  # so much longer than its timeout a fetch waits for the answer
HEARTBEATS_PER_WAIT = 3
WAIT_S_MAX = 365 * 86_400.0  # a wait without end
_SPANS = ("ack_wait", "extension_max", "lease", "backoff", "backoff_max", "inactive_timeout")
LEAVE_S = 1.0  # after a stop, for a connection to send the last acks


# --- params and results ---------------------------------------------------------------------------------------------


def subscribe_params(id: str, pattern: str, options: SubscribeOptions) -> rpc.Subscribe:
    given: dict[str, Any] = dict(options)
    for name in _SPANS:
        if given.get(name) is not None:
            given[name] = span_ms(given[name], name) / 1000
    if "start" in given:
        given["start"] = start_on_the_wire(given["start"])
    if "timeout" in given:
        timeout = given.pop("timeout")
        given["wait"] = WAIT_S_MAX if timeout is None else timeout
    return rpc.Subscribe(id, pattern, deliver="fetch", **given)


def start_on_the_wire(start: Start) -> str | int:
    check_start(start)
    return iso(time_ms(start, "start")) if isinstance(start, datetime) else start


_acknowledged = msgspec.json.Decoder(rpc.Acknowledged)


class Fetched(msgspec.Struct, gc=False):
    """`rpc.Fetched`, with its messages."""

    messages: list[Claimed]
    unreadable: list[int] = []


class Delivered(Fetched, gc=False, kw_only=True):
    """`rpc.Delivered`, with its messages."""

    subscription_id: str


_fetched = msgspec.json.Decoder(Fetched)

read_subscribed = msgspec.json.Decoder(rpc.Subscribed).decode
read_delivered = msgspec.json.Decoder(Delivered).decode


def claimed_of(fetched: Fetched) -> list[Claimed]:
    found = fetched.messages
    for at in fetched.unreadable:
        found[at] = _unpacked(found[at])
    return found


def _unpacked(claimed: Claimed) -> Claimed:
    """A payload that is not JSON is sent as text."""
    message: Message = claimed.message
    raw = msgspec.Raw(str(msgspec.json.decode(message.raw)).encode())
    return msgspec.structs.replace(claimed, message=msgspec.structs.replace(message, raw=raw))


def read_late(raw: Any) -> list[int]:
    """The seqs that were not in flight any more."""
    return _acknowledged.decode(raw).late


# --- the consumer ---------------------------------------------------------------------------------------------------


class Acks(msgspec.Struct):
    """Seqs of an ack under way. Those that a resumed subscription reports as settled are removed."""

    seqs: list[int]
    strict: bool


class RemoteConsumer(Consumer):
    """In flight are messages that were fetched and not settled; after a broken connection `resume` claims them again.
    `wire_id` is the id, with a number if one log holds a subscription more than once."""

    def __init__(self, connection: Connection, id: str, spec: SubscriptionSpec, params: rpc.Subscribe) -> None:
        super().__init__(id, spec, Waiter(selection_of(spec).pattern, id), _now_ms, PREFETCH_REMOTE)
        self.wire_id = id
        self._connection = connection
        self._params = params
        self._ready = False
        self._subscribing: Request | None = None
        self._begun: Completion[rpc.Subscribed] = Completion()
        self._holder = new_holder()
        self._has_begun = False
        self._acks_sent: list[Acks] = []
        self._settling: dict[int, Completion[Any]] = {}  # nacks and rejects without an answer, by seq
        self._leaves_s = 0.0
        self._last_seq = 0
        self._delivered = 0  # messages that came unasked on this connection
        self._credit_upto = 0  # how many of them may come in all
        self._credit_wanted = 0  # how many more, after a refill
        self._granting: Completion[Any] | None = None

    # --- beginning, and beginning again -------------------------------------------------------------------------

    def begin(self) -> Flow[None]:
        """Subscribe for the first time. Afterwards the connection resumes it."""
        self._params.subscription_id = self.wire_id
        until = time.monotonic() + (self._params.wait or 0.0)  # UNSET is falsy
        while True:
            left_s = max(0.0, until - time.monotonic())
            self._params.wait = min(left_s, POLL_S)
            request = self._subscribing = self._request()
            self._begun = request.completion
            try:
                done: rpc.Subscribed = yield self._connection.enqueue(request)
                break
            except SubscriptionActiveError:
                if left_s <= 0:
                    raise
        self.resumed_from = self._last_seq = done.resumed_from_seq

    def abandon(self) -> None:
        """Its subscribe was refused or cancelled; if it succeeds all the same, the subscription is released."""
        self._closing = True
        self._begun.watch(partial(self._unsubscribe, ()))

    def _request(self) -> Request:
        return Request("rpc.subscribe.persistent", self._params_now, self._on_subscribed, alone=True)

    def _params_now(self) -> rpc.Subscribe:
        if self.spec.mode == "ephemeral":
            start = self._last_seq + 1 if self._has_begun else self._params.start
            return msgspec.structs.replace(self._params, start=start)
        resume = rpc.ResumeFrom(self._holder, self._held())
        if not self._has_begun:
            return msgspec.structs.replace(self._params, resume=resume)
        return msgspec.structs.replace(self._params, resume=resume, wait=0.0, takeover=msgspec.UNSET)

    def _held(self) -> list[tuple[int, int]]:
        """The last ones, if there are more than may be in flight: the leases of the others have expired."""
        return [(seq, claimed.attempt) for seq, claimed in self._in_flight.copy().items()][-rpc.SEQS_MAX :]

    def _on_subscribed(self, raw: Any) -> rpc.Subscribed:
        done = read_subscribed(raw)
        resumed, self._has_begun = self._has_begun, True
        if self.spec.mode == "ephemeral":
            self._last_seq = max(self._last_seq, done.resumed_from_seq)
        elif resumed:
            self._keep_only(set(done.held), set(done.settled))
        self._ready = True
        self._subscribing = None
        self._connection.loop.call_soon(self._connection.send_waiting)
        return done

    def _keep_only(self, held: set[int], settled: set[int]) -> None:
        """Forget all deliveries but these, after a resume: the others are settled, or delivered to another consumer."""
        for acks in self._acks_sent:
            acks.seqs = [seq for seq in acks.seqs if seq not in settled]
        for seq in [seq for seq in self._in_flight.copy() if seq not in held]:
            self._in_flight.pop(seq, None)
        self._drop(lambda claimed: claimed.message.seq not in held)
        complete([(completion, None, None) for seq, completion in self._settling.copy().items() if seq in settled])

    @property
    def is_ready(self) -> bool:
        return self._ready

    @property
    def is_leaving(self) -> bool:
        return (self._interrupted or self.closed) and time.monotonic() > self._leaves_s

    def lost_connection(self) -> None:
        self._ready = False
        self._delivered = self._credit_upto = 0
        self._waiter.wake()  # those that wait give credit again

    def resume(self) -> Request | None:
        if self.closed or self.lost or self._subscribing is not None:  # an unanswered one is sent again
            return None
        request = self._subscribing = self._request()
        request.again = False
        request.completion.then(self._connection.loop, self._resumed)
        return request

    def _resumed(self, completion: Completion[Any]) -> None:
        if completion.error is None:
            return
        self._subscribing = None
        if isinstance(completion.error, UnreachableError):
            return  # the connection broke again; the next one resumes
        self.lose(completion.error)

    def lose(self, error: BaseException | None = None) -> None:
        """Another consumer has it, or it is deleted."""
        has_other_holder = error is None or isinstance(error, SubscriptionActiveError)
        why = error if isinstance(error, SubscriptionError) and not has_other_holder else taken_over(self.id)
        super().lose(why)
        self._connection.refuse_waiting(self, why)
        self._ready = True  # later calls are refused by the server

    # --- fetching -----------------------------------------------------------------------------------------------

    def claim(self, limit: int) -> Flow[None]:
        asked = self._ask(limit, 0.0)
        try:
            yield asked
        finally:
            if not self._ready:
                self._end_wait(asked)

    def _fill(self, limit: int, until_s: float | None, *, ahead: bool) -> Flow[None]:
        """Iterators and handlers give credit, and messages come unasked. For a fetch, one call waits at the server. The
        timeout holds with or without a connection."""
        return self._fill_by_credit(limit, until_s) if ahead else self._fill_by_fetch(limit, until_s)

    def _fill_by_credit(self, limit: int, until_s: float | None) -> Flow[None]:
        while not (self._buffer or self._has_ended):
            news = self._waiter.arm()
            self._connection.refuse_closed()
            self._raise_refusal()
            self._refill_credit(limit)
            left_s = POLL_S if until_s is None else until_s - time.monotonic()
            if self._buffer or self._has_ended or left_s <= 0:
                return
            if not (yield WaitFor(news, min(left_s, POLL_S))) and left_s > POLL_S:
                self._send_credit()  # once more: it is a total

    def _refill_credit(self, limit: int) -> None:
        """Give the server new credit when half of it is used."""
        with self._lock:
            self._credit_wanted = limit
            wanted = limit - len(self._buffer)
            if 2 * (self._credit_upto - self._delivered) > limit or self._delivered + wanted <= self._credit_upto:
                return
            self._credit_upto = self._delivered + wanted
            self._send_credit()

    def _end_credit(self) -> None:
        with self._lock:
            if self._credit_upto <= self._delivered:
                return
            self._credit_upto = self._delivered
            if self._ready:  # else a new connection begins without credit
                self._send_credit()

    def _send_credit(self) -> None:
        """A call that was not answered when the connection broke is sent again, with what it is then."""
        request = Request("rpc.credit", lambda: rpc.Credit(self.wire_id, max(0, self._credit_upto)), consumer=self)
        self._granting = granting = self._connection.enqueue(request, WAIT_S_MAX)
        granting.watch(self._fetched)

    def _raise_refusal(self) -> None:
        with self._lock:
            granting = self._granting
            if granting is None or granting.error is None:
                return
            self._granting, self._credit_upto = None, self._delivered
        granting.result()

    def take_messages(self, delivered: Delivered) -> None:
        """Take what the server sent on credit, on the loop of the connection."""
        found = claimed_of(delivered)
        self._delivered += len(found)
        self._take_found(found)
        if self._takers and not self._has_ended:
            self._refill_credit(self._credit_wanted)
        self._waiter.wake()

    def _fill_by_fetch(self, limit: int, until_s: float | None) -> Flow[None]:
        asked: Completion[Any] | None = None
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
                yield WaitFor(news, left_s + ANSWER_S)
        finally:
            if asked is not None:
                self._end_wait(asked)

    def _ask(self, limit: int, wait_s: float) -> Completion[Any]:
        self._connection.refuse_closed()
        request = Request(
            "rpc.fetch", rpc.Fetch(self.wire_id, limit, wait_s), self._on_fetched, alone=True, consumer=self
        )
        with self._lock:  # so that it is enqueued before another thread closes, or not at all
            self._refuse_ended()
            request.completion.watch(self._fetched)
            # Without a connection a waiting fetch goes on; one without a timeout fails.
            return self._connection.enqueue(request, WAIT_S_MAX if wait_s else None)

    def _end_wait(self, asked: Completion[Any]) -> None:
        """End a fetch whose taker is gone: the server must not deliver messages for it."""
        if asked.done:
            return
        if self._ready:
            self._connection.enqueue(Request("rpc.fetch.end", rpc.SubscriptionId(self.wire_id), again=False))
        else:
            complete([(asked, None, None)])  # so that it is not sent again

    def _on_fetched(self, raw: Any) -> None:
        """Take an answer to a fetch, on the loop of the connection, in the order of the answers."""
        self._take_found(claimed_of(_fetched.decode(raw)))

    def _take_found(self, found: list[Claimed]) -> None:
        if self.spec.mode != "ephemeral":
            self._in_flight.update(zip([claimed.message.seq for claimed in found], found, strict=True))
        if found:
            self._last_seq = max(self._last_seq, found[-1].message.seq)
            self.deliver(found)

    def _fetched(self, completion: Completion[Any]) -> None:
        if isinstance(completion.error, LeaseLostError):
            self.lose(completion.error)
        self._waiter.wake()

    def interrupt(self) -> None:
        self._leaves_s = time.monotonic() + LEAVE_S
        super().interrupt()

    def _drop(self, unwanted: Callable[[Claimed], bool]) -> None:
        for claimed in filter(unwanted, self._buffer.copy()):
            with contextlib.suppress(ValueError, IndexError):  # then another thread has taken it
                self._buffer.remove(claimed)

    # --- settling -----------------------------------------------------------------------------------------------

    def ack(self, settled: Sequence[Claimed]) -> Completion[Any]:
        if self.spec.mode == "ephemeral":
            return self.submit_ack(settled)
        with self._lock:  # as for a fetch
            self._refuse_stale(settled)
            completion = self._send_acks(Acks([claimed.message.seq for claimed in settled], strict=True))
        completion.watch(lambda _: self._forget(settled) if completion.error is None else None)
        return completion

    def submit_ack(self, settled: Sequence[Claimed], *, lazy: bool = False) -> Completion[list[int]]:
        if self.spec.mode == "ephemeral" or self.closed:
            # After close an ack is too late. Acks that wait to be sent are still sent.
            done_already: Completion[list[int]] = Completion()
            late = [] if self.spec.mode == "ephemeral" else sorted(claimed.message.seq for claimed in settled)
            complete([(done_already, late, None)])
            return done_already
        mine, acks = settled, Acks([claimed.message.seq for claimed in settled], strict=False)
        stale: Collection[int] = ()
        if not all(map(is_, map(self._in_flight.get, acks.seqs, settled), settled)):
            mine = [claimed for claimed in settled if self._was_handed_out_last(claimed)]
            acks.seqs = [claimed.message.seq for claimed in mine]
            stale = {claimed.message.seq for claimed in settled}.difference(acks.seqs)
        completion: Completion[list[int]] = self._send_acks(acks, lambda raw: sorted({*read_late(raw), *stale}))

        completion.watch(lambda _: self._forget(mine) if completion.error is None else None)
        return completion

    def _send_acks(self, acks: Acks, decode: Callable[[Any], list[int]] = read_late) -> Completion[Any]:
        self._acks_sent.append(acks)
        request = Request("rpc.acknowledge.persistent", partial(self._ack_params, acks), decode, consumer=self)
        request.completion.watch(lambda _: self._acks_sent.remove(acks))
        return self._connection.enqueue(request)

    def _ack_params(self, acks: Acks) -> rpc.Acknowledge:
        return rpc.Acknowledge(self.wire_id, sequence_ids=acks.seqs, lenient=not acks.strict, strict=acks.strict)

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        delay_s = None if delay_ms is None else delay_ms / 1000
        yield from self._settle("rpc.nack", claimed, failure, delay_s)

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        yield from self._settle("rpc.reject", claimed, failure, None)

    def _settle(self, method: str, claimed: Claimed, failure: Failure, delay_s: float | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        params = rpc.Settle(
            self.wire_id,
            claimed.message.seq,
            claimed.attempt,
            delay=delay_s,
            reason=failure.error,
            stack=failure.stack,
            handler=failure.handler,
            failed=method == "rpc.reject" and failure.reason == "processing_error",
        )
        request = Request(method, params, consumer=self)
        with self._lock:  # as for a fetch
            self._refuse_stale([claimed])
            completion = self._settling[claimed.message.seq] = self._connection.enqueue(request)
        try:
            yield completion
        finally:
            self._settling.pop(claimed.message.seq, None)
        if self._in_flight.get(claimed.message.seq) is claimed:  # else it has come again by now
            del self._in_flight[claimed.message.seq]

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        if self.spec.mode == "ephemeral":
            return
        seqs = [claimed.message.seq for claimed in extended]
        params = rpc.Settle(self.wire_id, sequence_ids=seqs, by=None if by_ms is None else by_ms / 1000)
        with self._lock:  # as for a fetch
            self._refuse_stale(extended)
            completion = self._connection.enqueue(Request("rpc.extend", params, consumer=self))
        yield completion

    def _refuse_stale(self, settled: Sequence[Claimed]) -> None:
        """Deliveries that the server cannot distinguish, because it knows messages by their seqs."""
        self._connection.refuse_closed()
        if (self.closed or self.lost) and self.spec.mode == "exclusive":
            raise taken_over(self.id)
        for claimed in settled:
            seq = claimed.message.seq
            if self.closed or not self._was_handed_out_last(claimed):
                raise LeaseLostError(
                    f"message {seq} is not in flight for '{self.id}' any more: it was settled already, or its time ran "
                    "out and it was passed on",
                    where=self.id,
                    next="Drop it; if handling takes long, set a longer ack_wait, or extend it in time",
                )

    def _was_handed_out_last(self, claimed: Claimed) -> bool:
        return self._in_flight.get(claimed.message.seq, claimed) is claimed

    def _forget(self, settled: Sequence[Claimed]) -> None:
        """Remove settled deliveries. The server settles by seq: a redelivery just before is settled, too."""
        removed = list(map(self._in_flight.pop, [claimed.message.seq for claimed in settled], settled))
        for again in compress(removed, map(is_not, removed, settled)):
            self._drop(partial(is_, again))

    def release(self, untouched: Sequence[Claimed]) -> Completion[None]:
        self._forget(untouched)
        seqs = [claimed.message.seq for claimed in untouched]
        request = Request("rpc.release", rpc.Release(self.wire_id, seqs), again=False, consumer=self)
        if self.spec.mode == "ephemeral" or not self._ready:  # the server released them when the connection broke
            complete([(request.completion, None, None)])
            return request.completion
        return self._connection.enqueue(request)

    # --- living and ending --------------------------------------------------------------------------------------

    @property
    def heartbeat_s(self) -> float:
        return self.spec.ack_wait_ms / 1000 / HEARTBEATS_PER_WAIT

    def heartbeat(self) -> Request | None:
        """Extends messages in handlers and in the buffer."""
        if self.spec.mode == "ephemeral" or self.closed or self.lost:
            return None
        seqs = [claimed.message.seq for claimed in self._to_extend()]
        if not seqs:
            return None
        params = rpc.Settle(self.wire_id, sequence_ids=seqs, lenient=True)
        return Request("rpc.extend", params, again=False, consumer=self)

    def take_gap(self, notice: rpc.GapNotice) -> None:
        at_ms = ms_of_iso(notice.timestamp)
        self.deliver([], [Gap(self.id, notice.from_, notice.to, notice.count, notice.why, at_ms)])
        self._wake()

    def release_buffer(self) -> None:
        """Release what was sent ahead: no code gets messages of a paused subscription."""
        with self._lock:
            untouched = [] if self._closing else self._pop(len(self._buffer))
        if untouched:
            self._releasing = self.release(untouched)

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        self._leaves_s = time.monotonic() + LEAVE_S

        def acked(_: Completion[Any]) -> None:
            if self in self._connection.resumables:
                self._connection.resumables.remove(self)
            if self._ready or self._subscribing is None:
                self._unsubscribe(seen)
            else:  # a resume may be under way
                self._subscribing.completion.watch(partial(self._unsubscribe, seen))

        if self._acking is None:
            acked(self.gone)
        else:
            self._acking.watch(acked)

    def _unsubscribe(self, seen: Collection[tuple[int, int]] | None, subscribed: Completion[Any] | None = None) -> None:
        """Messages that were sent and did not arrive are not among the seen, so they count as no attempt."""

        def params() -> rpc.Unsubscribe:
            """Made when it is sent, on the loop of the connection, where no message arrives meanwhile."""
            unseen = set(self._unseen())
            looked_at = self._held() if seen is None else seen
            return rpc.Unsubscribe(self.wire_id, [(seq, attempt) for seq, attempt in looked_at if seq not in unseen])

        def done(answer: Completion[Any]) -> None:
            # Without a connection, or if another consumer has it, it is released already.
            is_over = isinstance(answer.error, UnreachableError | SubscriptionError | ClosedError)
            complete([(self.gone, None, None if is_over else answer.error)])

        if not self._ready or (subscribed is not None and subscribed.error is not None):
            complete([(self.gone, None, None)])  # the server released it when the connection broke
            return
        self._connection.enqueue(Request("rpc.unsubscribe.persistent", params, again=False)).watch(done)


def _now_ms() -> int:
    return round(time.monotonic() * 1000)


def new_holder() -> str:
    """A unique name that shows where the holder runs."""
    host = re.sub("[^A-Za-z0-9]+", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
