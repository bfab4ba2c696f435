"""One end of a JSON-RPC connection, server or client: texts in, calls and answers out, and the reverse.

Without I/O and for one thread: the caller feeds received texts to `receive_text` and sends those of `texts_to_send`.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import is_
from typing import Any

from msgspec import UNSET

from headwater.errors import InvalidDataError, InvalidOptionError, TooLargeError
from headwater.protocol.jsonrpc import (
    BATCH_CALLS_MAX,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    METHOD_CHARS_MAX,
    NO_EXCHANGE,
    NOT_JSON,
    NULL_ID,
    PARSE_ERROR,
    TOO_LARGE,
    Answer,
    Call,
    Fault,
    Frame,
    NoExchange,
    Notice,
    Result,
    encode,
    error_text,
    frame_too_long,
    read_frame,
)

DEPTH_MIN = 500  # levels that any end can read
LONG_REFUSAL_CHARS_MAX = 200  # of its message, when an error is too large for a frame and goes without its data


class Exchange(NoExchange):
    """The calls of one inbound frame, and the text that answers them, which is queued with the last answer.

    The first answer to a call counts and later ones are dropped, so a timeout may refuse a call whose handler still
    runs. A result that cannot be encoded raises one of NOT_JSON, and its call stays open.
    """

    __slots__ = ("_answers", "_is_batch", "_members", "_session", "calls", "open")

    def __init__(self, session: Session, frame: Frame) -> None:
        self.calls: Sequence[Call] = frame.calls
        """In the order of the frame, without its invalid members, which are refused already."""
        self.open = 0
        """How many calls have no answer yet."""
        self._session = session
        self._is_batch = frame.is_batch
        self._members = frame.members
        self._answers: dict[Call, bytes] = {}
        for call in frame.calls:
            if call.id is not UNSET:
                call.exchange = self
                self.open += 1
        if not self.open:
            self._finish()

    def kept_bytes(self, call: Call) -> int:
        """The bytes of its answer, which waits for those of the other calls."""
        return len(self._answers.get(call, b""))

    def answer(self, call: Call, result: Any) -> None:
        self._keep(call, self._text(call, result))

    def refuse(self, call: Call, fault: Fault) -> None:
        if call.id is not UNSET:
            text = error_text(call.id, fault)
            if len(text) > self._session.outgoing_bytes_max:
                text = error_text(call.id, Fault(fault.code, fault.message[:LONG_REFUSAL_CHARS_MAX]))
            self._keep(call, text)

    def answer_all(self, calls: Sequence[Call], results: Sequence[Any]) -> None:
        """Answer many calls; in one pass if they are all calls of the frame, in its order."""
        if len(calls) != len(results):
            raise ValueError(f"{len(calls)} calls, but {len(results)} results")
        if self._is_batch and self._is_everything(calls):
            text = encode(list(map(Result, results, [call.id for call in calls if call.id is not UNSET])))
            if len(text) <= self._session.outgoing_bytes_max:
                for call in calls:
                    call.exchange = NO_EXCHANGE
                self.open = 0
                self._session.queue_answers([text])
                return
        texts = [self._text(call, result) for call, result in zip(calls, results, strict=True)]
        for call, text in zip(calls, texts, strict=True):
            self._keep(call, text)

    def _is_everything(self, calls: Sequence[Call]) -> bool:
        untouched = self._members is self.calls and len(calls) == len(self.calls) == self.open
        return untouched and all(map(is_, calls, self.calls))

    def _text(self, call: Call, result: Any) -> bytes:
        if call.id is UNSET:
            return b""
        text, limit = encode(Result(result, call.id)), self._session.outgoing_bytes_max
        if len(text) <= limit:
            return text
        why = f"the answer takes {len(text)} bytes, the limit is {limit}"
        data = {"where": call.method, "why": why, "next": "The call was carried out; ask for less at once"}
        return error_text(call.id, Fault(TOO_LARGE, why, data))

    def _keep(self, call: Call, text: bytes) -> None:
        if call.exchange is not self:
            if call.exchange is not NO_EXCHANGE:
                raise ValueError("this call belongs to another exchange")
            return
        # From here on the call counts as answered. Without this reference the frame is freed at once, and not by the
        # garbage collector.
        call.exchange = NO_EXCHANGE
        self.open -= 1
        if not self._is_batch:
            self._session.queue_answers([text])
            return
        self._answers[call] = text
        if not self.open:
            self._finish()

    def _finish(self) -> None:
        texts = [self._answers.get(member) if isinstance(member, Call) else member for member in self._members]
        given = [text for text in texts if text is not None]
        if self._is_batch:
            # More than one array only if one would be too long or deep: a call that was carried out is always answered.
            packer = Packer(self._session.outgoing_bytes_max, len(given))
            deep = list(map(_is_deep, given)) if len(given) > 1 else []
            if any(deep):
                for text, is_deep in zip(given, deep, strict=True):
                    (packer.add_alone if is_deep else packer.add_all)([text])
            else:
                packer.add_all(given)
            given = [_array(run) for run in packer.take()]
        self._answers = {}
        self._session.queue_answers(given)


class Packer:
    """Gathers texts in order into runs; each run fits into one frame, as an array."""

    __slots__ = ("_run", "_run_bytes", "_run_max", "frame_bytes_max", "runs")

    def __init__(self, frame_bytes_max: int, run_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._run_max = run_max
        self.runs: list[list[bytes]] = []
        self._run: list[bytes] | None = None  # the one that texts are added to
        self._run_bytes = 0

    def set_limits(self, frame_bytes_max: int, run_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._run_max = run_max

    def add_all(self, texts: Sequence[bytes]) -> None:
        if len(texts) > 1 and self._run is None and len(texts) <= self._run_max:  # many at once fit as a rule
            size = 1 + sum(map(len, texts)) + len(texts)
            if size <= self.frame_bytes_max:
                self._run, self._run_bytes = [*texts], size
                self.runs.append(self._run)
                return
        for text in texts:
            size = len(text) + 1  # with its comma; the last one's is the closing bracket
            run = self._run
            if run is None or self._run_bytes + size > self.frame_bytes_max or len(run) >= self._run_max:
                self._run = run = []
                self.runs.append(run)
                self._run_bytes = 1
            run.append(text)
            self._run_bytes += size

    def add_alone(self, texts: Sequence[bytes]) -> None:
        self.runs.extend([text] for text in texts)
        self._run = None

    def take(self) -> list[list[bytes]]:
        runs, self.runs, self._run = self.runs, [], None
        return runs


def _array(run: list[bytes]) -> bytes:
    return b"[%b]" % b",".join(run)


class Session:
    """Reads frames and queues the texts to send."""

    def __init__(
        self,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        batch_max: int = BATCH_CALLS_MAX,
        outgoing_bytes_max: int | None = None,
    ) -> None:
        if frame_bytes_max < FRAME_BYTES_MIN or batch_max < 1:
            raise InvalidOptionError(f"a frame takes at least {FRAME_BYTES_MIN} bytes, a batch at least one call")
        self.frame_bytes_max = frame_bytes_max
        self.batch_max = batch_max
        self.on_outgoing: Callable[[], None] | None = None
        """Called when the first text is queued."""
        self._last_id = 0
        self._answers: list[bytes] = []
        self._own_outgoing_bytes_max = self.outgoing_bytes_max = outgoing_bytes_max or frame_bytes_max
        self._packer = Packer(self.outgoing_bytes_max, batch_max)

    # --- inbound ---

    def receive_text(self, text: str | bytes) -> list[Exchange | Answer]:
        """The calls of a frame as one Exchange, and the answers in it, which may be to no call of ours, or to one that
        was answered before. Never raises: an unreadable frame is answered with an error."""
        try:
            frame = read_frame(self._utf8(text), self.batch_max)
        except Fault as fault:
            self.queue_answers([error_text(NULL_ID, fault)])
            return []
        found: list[Exchange | Answer] = []
        if frame.members:
            exchange = Exchange(self, frame)
            if frame.calls:
                found.append(exchange)
        return [*found, *frame.answers]

    def _utf8(self, text: str | bytes) -> bytes:
        if len(text) <= self.frame_bytes_max:
            try:
                data = text.encode() if isinstance(text, str) else text
                if not data.isascii():
                    str(data, "utf-8")  # the decoder does not check what it skips
            except UnicodeError as exc:
                details = {"where": "frame", "why": "the frame is not UTF-8", "next": "Send JSON in UTF-8"}
                raise Fault(PARSE_ERROR, "Parse error", details) from exc
            if len(data) <= self.frame_bytes_max:
                return data
        raise frame_too_long(self.frame_bytes_max)

    def queue_answers(self, texts: list[bytes]) -> None:
        """Queue the answers of an exchange: whole texts, sent as they are."""
        if texts:
            was_idle = not (self._answers or self._packer.runs)
            self._answers.extend(texts)
            if was_idle and self.on_outgoing is not None:
                self.on_outgoing()

    # --- outbound ---

    def respect(self, *, frame_bytes_max: int, batch_max: int) -> None:
        """Apply the limits of the other end, where they are lower."""
        self.outgoing_bytes_max = max(FRAME_BYTES_MIN, min(frame_bytes_max, self._own_outgoing_bytes_max))
        self._packer.set_limits(self.outgoing_bytes_max, max(1, min(batch_max, self.batch_max)))

    def call(self, method: str, params: Any = None, *, alone: bool = False) -> int:
        """Queue a call and return its id. `alone` keeps it out of batches: its answer may take long, and those of the
        others would wait for it. Raises InvalidDataError or TooLargeError and queues nothing."""
        number = self._last_id + 1
        text = b'%b,"id":%d}' % (_encoded(method, params), number)
        _check_utf8(method, text)
        self._queue(method, [text], batch=not (alone or may_be_deep(text)))
        self._last_id = number
        return number

    def notify(self, method: str, params: Any = None, *, alone: bool = False) -> None:
        text = _encoded(method, params) + b"}"
        self._queue(method, [text], batch=not (alone or may_be_deep(text)))

    def notify_many(self, notices: Sequence[Notice], *, batch: bool) -> None:
        """Many notifications at once: in arrays, or each in a frame of its own for clients that read no batches."""
        if not notices:
            return
        try:
            texts = list(map(encode, notices))
        except NOT_JSON as exc:
            raise InvalidDataError(f"params are not JSON: {exc}", where=notices[0].method) from exc
        self._queue(notices[0].method, texts, batch=batch)

    def _queue(self, method: str, texts: Sequence[bytes], *, batch: bool) -> None:
        longest = max(map(len, texts))
        if longest > self.outgoing_bytes_max:
            why = f"the call takes {longest} bytes, the limit of a frame is {self.outgoing_bytes_max}"
            raise TooLargeError(why, where=method, next="Send it in parts")
        was_idle = not (self._answers or self._packer.runs)
        if batch:
            self._packer.add_all(texts)
        else:
            self._packer.add_alone(texts)
        if was_idle and self.on_outgoing is not None:
            self.on_outgoing()

    @property
    def has_something_to_send(self) -> bool:
        return bool(self._answers or self._packer.runs)

    def texts_to_send(self) -> list[bytes]:
        """Answers first, then calls and notifications in their order, as few frames as the limits allow."""
        texts, self._answers = self._answers, []
        if self._packer.runs:
            for run in self._packer.take():
                texts.append(_array(run) if len(run) > 1 else run[0])
        return texts


def may_be_deep(text: bytes) -> bool:
    """Whether a text may be nested deeply; it goes in a frame of its own: if the other end cannot read it, what is
    beside it would be lost too."""
    return len(text) > 2 * DEPTH_MIN and text.count(b"[") + text.count(b"{") > DEPTH_MIN


def _is_deep(text: bytes) -> bool:
    """Exactly: clients expect one array for a batch, so a long flat answer must not split it."""
    if not may_be_deep(text):
        return False
    steps = array("b", _STRINGS.sub(b"", text).translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0) > DEPTH_MIN


_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed numbers: one level down, one level up
_NO_BRACKETS = bytes({*range(256)} - {*b"[{]}"})


def _encoded(method: str, params: Any) -> bytes:
    """A call up to its id, without its closing brace."""
    head = _head(method)
    if params is None:
        return head
    try:
        encoded = encode(params)
    except NOT_JSON as exc:
        raise InvalidDataError(f"params are not JSON: {exc}", where=method, next="Send JSON values only") from exc
    if encoded[:1] not in (b"{", b"["):
        raise InvalidDataError(
            "params are neither an object nor an array", where=method, next="Pass an object or an array"
        )
    return b'%b,"params":%b' % (head, encoded)


def _check_utf8(method: str, text: bytes) -> None:
    """Raw JSON is sent as it is, and a frame that is no UTF-8 has no answer: its caller would wait for the timeout."""
    if not text.isascii():
        try:
            str(text, "utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidDataError(f"params are not UTF-8: {exc}", where=method, next="Send text in UTF-8") from exc


@functools.lru_cache(maxsize=1024)
def _head(method: str) -> bytes:
    if not isinstance(method, str) or len(method) > METHOD_CHARS_MAX:
        raise TooLargeError(f"a method's name is text of up to {METHOD_CHARS_MAX} characters")
    try:
        return b'{"jsonrpc":"2.0","method":%b' % encode(method)
    except UnicodeEncodeError as exc:
        raise InvalidDataError("the method's name holds half a surrogate pair", next="Send text") from exc
