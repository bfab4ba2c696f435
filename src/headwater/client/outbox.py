"""Calls on their way to the server: requests, the numbers of published messages, and the outcome of each request.

The server keeps a receipt for a number until the client confirms all numbers below a later one. Confirmed is more than
answered: the first copy of a message that was sent again after the connection broke may still be under way in the
network. Its receipt is needed until no copy can arrive any more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from headwater.broker.flow import Completion
from headwater.errors import InvalidInputError, RequestTimeoutError, UnauthorizedError, UnreachableError
from headwater.protocol.jsonrpc import Answer, error_of
from headwater.protocol.methods import PlainBatch, PlainMessage, PublishedBatch

CONFIRM_EVERY = 1_000  # messages; the server then deletes their receipts
LATE_COPY_S = 300.0  # servers close a connection after less silence than this, so no copy arrives later

Decode = Callable[[Any], Any]
Outcome = tuple[Completion[Any], Any, BaseException | None]


def read_nothing(raw: Any) -> None:
    return None


class Request(msgspec.Struct, eq=False):
    """A call to the server. `again`: it may be sent again after the connection broke. `count`: how many messages it
    publishes. `gathers`: it may be sent as part of a batch, which then has `parts`. `decode` makes the value of the
    completion from the raw result. `params` may be a function that makes them when the call is sent."""

    method: str
    params: Any
    decode: Decode = read_nothing
    again: bool = True
    alone: bool = False
    count: int = 0
    gathers: bool = False
    consumer: Resumable | None = None
    number: int = 0
    parts: Sequence[Request] = ()
    deadline_s: float | None = None
    completion: Completion[Any] = msgspec.field(default_factory=Completion)


class Resumable(Protocol):
    """Resumes on a new connection before its own calls are sent."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_leaving(self) -> bool:
        """Its calls do not wait for a new connection any longer."""

    def resume(self) -> Request | None: ...

    def lost_connection(self) -> None: ...


class Numbering:
    def __init__(self) -> None:
        self._next = 1
        # The first number of each request that is not confirmed. To find the first of a dict that loses its first ones,
        # all that it has lost are passed over.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._confirmed = 0
        self._may_come_twice: set[int] = set()
        self._settled_late: deque[tuple[float, int]] = deque()  # when a number is confirmed after all

    def assign(self, request: Request) -> None:
        """Number the messages of a request, once; now and then it confirms earlier ones to the server."""
        if not request.number:
            request.number = self._next
            self._next += request.count
            self._open[request.number] = None
            request.params.number = request.number
        confirmed = next(iter(self._open))
        if confirmed - self._confirmed >= CONFIRM_EVERY:
            self._confirmed = request.params.confirmed = confirmed

    def broken(self, unanswered: Iterable[Request]) -> None:
        """Note that the connection of these requests broke: their messages may come twice."""
        self._may_come_twice.update(request.number for request in unanswered if request.number)

    def settle(self, request: Request, now_s: float, *, given_up: bool = False) -> None:
        """End a request, which was answered, never sent, or timed out."""
        number = request.number
        if number and (given_up or number in self._may_come_twice):
            self._may_come_twice.discard(number)
            self._settled_late.append((now_s + LATE_COPY_S, number))
        else:
            self._open.pop(number, None)

    def confirm_late(self, now_s: float) -> None:
        while self._settled_late and self._settled_late[0][0] <= now_s:
            self._open.pop(self._settled_late.popleft()[1], None)


_gathered = msgspec.json.Decoder(PublishedBatch)


def gather(publishes: Sequence[Request]) -> Request:
    """Plain publishes with consecutive numbers as one batch: a third of the bytes, a fifth of the work."""
    messages = [PlainMessage(each.params.topic, each.params.data) for each in publishes]
    first = publishes[0]
    params = PlainBatch(messages, first.number, max(each.params.confirmed for each in publishes))
    batch = Request("rpc.publish.batch", params, _gathered.decode)
    batch.deadline_s = first.deadline_s
    batch.parts = publishes
    return batch


def outcome_of(request: Request, answer: Answer) -> Outcome:
    if answer.error is not UNSET:
        return request.completion, None, error_of(answer.error, request.method)
    try:
        return request.completion, request.decode(answer.result), None
    except Exception as exc:  # of any kind: its caller waits
        error = UnreachableError(f"the server's answer cannot be read ({exc})", where=request.method)
        return request.completion, None, error


def outcomes_of(batch: Request, answer: Answer) -> list[Outcome] | None:
    """The outcome of each part of a batch; None if a part may be invalid: then they are sent one by one."""
    _, found, error = outcome_of(batch, answer)
    if isinstance(error, InvalidInputError | UnauthorizedError):
        return None
    if error is None and len(found.sequence_ids) != len(batch.parts):
        error = UnreachableError("the server's answer has not one seq for each message", where=batch.method)
    if error is not None:
        return [(part.completion, None, error) for part in batch.parts]
    return [(part.completion, seq, None) for part, seq in zip(batch.parts, found.sequence_ids, strict=True)]


def too_late(request: Request) -> RequestTimeoutError:
    advice = "give the message an id before you publish it again" if request.count else "call again"
    return RequestTimeoutError(
        "no answer in time; the call may have been done", where=request.method, next=f"To be safe, {advice}"
    )
