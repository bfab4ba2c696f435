"""JSON-RPC 2.0 in values: what a frame says, how params are read, how answers are written.

A frame is read in one typed pass over its bytes. Ids and params stay raw: an id goes back byte for byte, and params are
decoded once, by whoever knows their type. Only a frame that breaks a rule, or mixes calls with answers, is read again,
member by member, to find out which of them is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

FRAME_BYTES_MAX = 4 * 1024 * 1024
FRAME_BYTES_MIN = 4 * 1024  # so that the refusal of a call always fits, with the longest id and a long message
BATCH_CALLS_MAX = 1_000
METHOD_CHARS_MAX = 128
ID_BYTES_MAX = 1_024

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

UNAUTHORIZED = -32000
SUBSCRIPTION_ACTIVE = -32001
UNKNOWN_SUBSCRIPTION = -32002
NOT_DELIVERED = -32003
INVALID_TOPIC = -32004
TOO_LARGE = -32005
OVERLOADED = -32006
CONFLICT = -32007

SPECIFICATION = "See https://www.jsonrpc.org/specification"
NULL_ID = Raw(b"null")
WHITESPACE = b" \t\r\n"  # JSON's own; bytes.strip() would also take what JSON does not allow

T = TypeVar("T")


class Fault(Exception):
    """What a handler raises to answer a call with an error; `data` is any JSON value."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class AnswerSink:
    """Where the answer to a call goes. This one drops it, for notifications; `session.Exchange` collects."""

    __slots__ = ()

    @property
    def calls(self) -> Sequence[Call]:
        return ()

    @property
    def open(self) -> int:
        return 0

    def answer(self, call: Call, result: Any) -> None:
        pass

    def refuse(self, call: Call, fault: Fault) -> None:
        pass

    def answer_all(self, calls: Sequence[Call], results: Sequence[Any]) -> None:
        pass


NOBODY = AnswerSink()


class _Versioned(msgspec.Struct, kw_only=True):
    jsonrpc: Literal["2.0"]


class Call(_Versioned, eq=False):
    """A request, or a notification if it has no id. `exchange` takes the answer.

    Seen by the garbage collector, unlike other small structs: exchange and calls point at each other until all are
    answered, and one that is given up half-way must not stay for good.
    """

    method: Annotated[str, msgspec.Meta(max_length=METHOD_CHARS_MAX)]
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    exchange: AnswerSink = NOBODY  # no JSON becomes one: a frame with such a member is read again, and it is ignored

    @property
    def wants_answer(self) -> bool:
        return self.id is not UNSET


class ErrorObject(msgspec.Struct, gc=False):
    code: int
    message: str
    data: Raw | UnsetType = UNSET


class Answer(_Versioned):
    """The answer to a call of ours: either result or error. What is raw keeps its whole frame in memory."""

    id: int | str | float | None
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


class _AnswerOnly(Answer):
    method: AnswerSink = NOBODY  # as above: with a method it is a call, and a broken one, or it would have been read


class Frame(msgspec.Struct):
    """One frame, read. `members` are the calls in their order, and among them the refusals of what was no call; when
    there are none, it is the very list `calls`."""

    is_batch: bool
    calls: list[Call]
    answers: Sequence[Answer]
    members: Sequence[Call | bytes]


# --- reading --------------------------------------------------------------------------------------------------------


def read_frame(data: bytes, batch_max: int = BATCH_CALLS_MAX) -> Frame:
    """What a frame of valid UTF-8 says; raises Fault if there is nothing in it to answer one by one."""
    is_batch = data.lstrip(WHITESPACE)[:1] == b"["
    try:
        likely_answers = data.find(b'"result"', 0, 32) > 0  # as our own servers write them: spares a vain first pass
        calls = None if likely_answers else _calls_if_sound(data, is_batch)
        if calls is not None:
            frame = Frame(is_batch, calls, [], calls)
        else:
            answers = _answers_if_sound(data, is_batch)
            frame = Frame(is_batch, [], answers, []) if answers is not None else _read_again(data, is_batch)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise Fault(PARSE_ERROR, "Parse error", _explained(str(exc))) from exc
    if is_batch:
        _check_count(len(frame.members) + len(frame.answers), batch_max)
    return frame


def _check_count(count: int, batch_max: int) -> None:
    if not count:
        raise Fault(INVALID_REQUEST, "Invalid Request", _explained("the batch is empty"))
    if count > batch_max:
        why = f"the batch has {count} members, the limit is {batch_max}"
        raise Fault(INVALID_REQUEST, "Invalid Request", _explained(why, next="Send it in parts"))


def _calls_if_sound(data: bytes, is_batch: bool) -> list[Call] | None:
    try:
        calls = _call_batch.decode(data) if is_batch else [_call.decode(data)]
    except msgspec.ValidationError:
        return None
    params = [call.params for call in calls if call.params is not UNSET]
    ids = [call.id for call in calls if call.id is not UNSET]
    return calls if _starts(params) <= _PARAMS_STARTS and _are_ids(ids) else None


def _answers_if_sound(data: bytes, is_batch: bool) -> Sequence[Answer] | None:
    try:
        answers = _answer_batch.decode(data) if is_batch else [_answer.decode(data)]
    except msgspec.ValidationError:
        return None
    return None if any((each.result is UNSET) is (each.error is UNSET) for each in answers) else answers


def _are_ids(raws: Sequence[Raw]) -> bool:
    return _starts(raws) <= _ID_STARTS and max(map(len, map(bytes, raws)), default=0) <= ID_BYTES_MAX


def _starts(raws: Sequence[Raw]) -> set[int]:
    """The first bytes of JSON values: they tell the kind, since the decoder has already checked the syntax."""
    return {*map(itemgetter(0), map(_view, raws))}


_view: Callable[[Raw], memoryview] = memoryview
_ID_STARTS = frozenset(b'"-0123456789n')
_PARAMS_STARTS = frozenset(b"{[")


class _Anything(msgspec.Struct):
    jsonrpc: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_call = msgspec.json.Decoder(Call)
_call_batch = msgspec.json.Decoder(list[Call])
_answer = msgspec.json.Decoder(_AnswerOnly)
_answer_batch = msgspec.json.Decoder(list[_AnswerOnly])
_raw = msgspec.json.Decoder(Raw)
_raw_batch = msgspec.json.Decoder(list[Raw])
_anything = msgspec.json.Decoder(_Anything)
_method: msgspec.json.Decoder[str] = msgspec.json.Decoder(Annotated[str, msgspec.Meta(max_length=METHOD_CHARS_MAX)])
_version: msgspec.json.Decoder[str] = msgspec.json.Decoder(Literal["2.0"])
_answer_id: msgspec.json.Decoder[int | str | float | None] = msgspec.json.Decoder(int | str | float | None)


def _read_again(data: bytes, is_batch: bool) -> Frame:
    members = list(map(_read_member, _raw_batch.decode(data) if is_batch else [_raw.decode(data)]))
    return Frame(
        is_batch,
        calls=[member for member in members if isinstance(member, Call)],
        answers=[member for member in members if isinstance(member, Answer)],
        members=[member for member in members if not isinstance(member, Answer)],
    )


def _read_member(raw: Raw) -> Call | Answer | bytes:
    """A call, an answer, or the text that refuses what is neither."""
    try:
        found = _anything.decode(raw)
    except msgspec.ValidationError:
        return _invalid_request(NULL_ID, "a call is a JSON object")
    if found.method is UNSET and not (found.result is UNSET and found.error is UNSET):
        return _read_answer(raw, found)
    id = found.id if found.id is not UNSET else NULL_ID
    if not _are_ids([id]):
        return _invalid_request(NULL_ID, f"an id is text, a number or null, of up to {ID_BYTES_MAX} bytes")
    if _decoded(_version, found.jsonrpc) is None:
        return _invalid_request(id, 'the member jsonrpc must be "2.0"')
    method = _decoded(_method, found.method)
    if method is None:
        return _invalid_request(id, f"the member method must be text of up to {METHOD_CHARS_MAX} characters")
    if found.params is not UNSET and not _starts([found.params]) <= _PARAMS_STARTS:
        return _invalid_request(id, "params are an object or an array")
    return Call(method, found.params, found.id, jsonrpc="2.0")


def _read_answer(raw: Raw, found: _Anything) -> Answer:
    """Answers are not answered, or two ends could go on for ever: a broken one fails its call, if that can be told."""
    sound = _answers_if_sound(raw, is_batch=False)
    if sound is not None:
        return sound[0]
    broken = ErrorObject(INTERNAL_ERROR, "the answer breaks the rules of JSON-RPC 2.0")
    return Answer(_decoded(_answer_id, found.id), error=broken, jsonrpc="2.0")


def _decoded(decoder: msgspec.json.Decoder[T], raw: Raw | UnsetType) -> T | None:
    try:
        return None if raw is UNSET else decoder.decode(raw)
    except msgspec.ValidationError:
        return None


def frame_too_long(bytes_max: int) -> Fault:
    why = f"the frame is longer than {bytes_max} bytes"
    return Fault(INVALID_REQUEST, "Invalid Request", _explained(why, next="Send it in parts"))


def _invalid_request(id: Raw, why: str) -> bytes:
    return error_text(id, Fault(INVALID_REQUEST, "Invalid Request", _explained(why)))


def _explained(why: str, where: str = "frame", next: str = SPECIFICATION) -> dict[str, str]:
    return {"where": where, "why": why, "next": next}


# --- params ---------------------------------------------------------------------------------------------------------


def params_of(call: Call, type: type[T]) -> T:
    """The params as `type`. Given by position, they become the fields of a Struct in their order. Raises Fault."""
    raw = call.params if call.params is not UNSET else _NO_PARAMS
    decoder: msgspec.json.Decoder[T] | None = _decoders.get(type)
    if decoder is None:
        decoder = _decoders[type] = msgspec.json.Decoder(type)
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError:
            if not _is_positional(raw, type):
                raise
        return decoder.decode(_named(raw, type))
    except (msgspec.DecodeError, RecursionError) as exc:
        why, _, path = str(exc).partition(" - at `$")
        data = _explained(why, f"{call.method} params{path.rstrip('`')}", _usage(type))
        raise Fault(INVALID_PARAMS, f"Invalid params: {why}", data) from exc


_NO_PARAMS = Raw(b"{}")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}  # as many as there are types of params in the program


def _is_positional(raw: Raw, type: Any) -> bool:
    return _is_struct(type) and _starts([raw]) == {ord("[")}


def _is_struct(type: Any) -> bool:
    return isinstance(type, msgspec.StructMeta) and not type.__struct_config__.array_like


def _named(raw: Raw, type: Any) -> bytes:
    values = _raw_batch.decode(raw)
    names = [field.encode_name for field in msgspec.structs.fields(type)]
    if len(values) > len(names):
        raise msgspec.ValidationError(f"{len(values)} positions, but there are only {len(names)} params")
    return encode(dict(zip(names, values, strict=False)))


def _usage(type: Any) -> str:
    if not _is_struct(type):
        return "See the description of the method"
    fields = msgspec.structs.fields(type)
    needed = ", ".join(field.encode_name for field in fields if field.required)
    optional = ", ".join(field.encode_name for field in fields if not field.required)
    return f"It takes {needed or 'nothing'}" + (f" and optionally {optional}" if optional else "")


# --- writing --------------------------------------------------------------------------------------------------------

encode = msgspec.json.Encoder().encode


class Result(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    """An answer on its way out."""

    result: Any
    id: Raw


class Notice(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    """A notification on its way out. Some clients take any JSON value as params, so none is refused here."""

    method: str
    params: Any


class _Refusal(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    error: ErrorObject
    id: Raw


def error_text(id: Raw, fault: Fault) -> bytes:
    """The answer that refuses a call. It never fails: an error that cannot be written is written without its data."""
    try:
        data = Raw(encode(fault.data)) if fault.data is not None else UNSET
        return encode(_Refusal(ErrorObject(fault.code, fault.message, data), id))
    except (TypeError, ValueError, RecursionError, OverflowError):
        message = fault.message.encode(errors="replace").decode()
        return encode(_Refusal(ErrorObject(fault.code, message), id))
