"""JSON-RPC 2.0 without I/O: reading frames, binding params, writing answers, and errors as both ends know them.

A frame is read in one typed pass over its bytes. Ids and params stay raw: an id goes back byte for byte, and params are
decoded once, into the type that their method takes. Only a frame that breaks a rule, or mixes calls with answers, is
read again, member by member, to find the invalid ones.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

import headwater.errors as errors
from headwater.errors import HeadwaterError

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


class NoExchange:
    """Drops the answer to a notification; `session.Exchange` collects all other answers."""

    __slots__ = ()


NO_EXCHANGE = NoExchange()


class _Versioned(msgspec.Struct, kw_only=True):
    jsonrpc: Literal["2.0"]


class Call(_Versioned, eq=False):
    """A request, or a notification if it has no id. `exchange` collects its answer, and is NO_EXCHANGE once it has one.

    Tracked by the garbage collector, unlike other small structs: exchange and calls refer to each other until all are
    answered, and an exchange that is abandoned half-way must be collected.
    """

    method: Annotated[str, msgspec.Meta(max_length=METHOD_CHARS_MAX)]
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    exchange: NoExchange = NO_EXCHANGE  # no JSON decodes to it: a frame with such a member is read again, without it

    @property
    def wants_answer(self) -> bool:
        return self.id is not UNSET


class ErrorObject(msgspec.Struct, gc=False):
    code: int
    message: str
    data: Raw | UnsetType = UNSET


class Answer(_Versioned):
    """The answer to a call of ours: either result or error. A raw result keeps its whole frame in memory."""

    id: int | str | float | None
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


class _AnswerOnly(Answer):
    method: NoExchange = NO_EXCHANGE  # as above: a member with a method is an invalid call, not an answer


class Frame(msgspec.Struct):
    """A decoded frame. `members` are its calls in order, with the error answers to invalid members among them; without
    invalid members it is the list `calls` itself."""

    is_batch: bool
    calls: list[Call]
    answers: Sequence[Answer]
    members: Sequence[Call | bytes]


# --- reading --------------------------------------------------------------------------------------------------------


def read_frame(data: bytes, batch_max: int = BATCH_CALLS_MAX) -> Frame:
    """Decode a frame of valid UTF-8; raises Fault if it has no members that could be answered one by one."""
    is_batch = data[:1] == b"[" or data.lstrip(WHITESPACE)[:1] == b"["
    try:
        likely_answers = data.find(b'"result"', 0, 32) > 0  # as our own servers write them: saves the pass for calls
        calls = None if likely_answers else _valid_calls(data, is_batch)
        if calls is not None:
            frame = Frame(is_batch, calls, [], calls)
        else:
            answers = _valid_answers(data, is_batch)
            frame = Frame(is_batch, [], answers, []) if answers is not None else _read_again(data, is_batch)
    except RecursionError as exc:
        failed = _nested_too_deeply(data, is_batch)
        if failed is None:
            raise Fault(PARSE_ERROR, "Parse error", _explained(str(exc))) from exc
        frame = failed
    except msgspec.DecodeError as exc:
        raise Fault(PARSE_ERROR, "Parse error", _explained(str(exc))) from exc
    if is_batch:
        _check_count(len(frame.members) + len(frame.answers), batch_max)
    return frame


def _nested_too_deeply(data: bytes, is_batch: bool) -> Frame | None:
    """A call or an answer as our own ends write it (a deep one alone in its frame) fails by the id at its end; else its
    caller would wait for the timeout. In a batch of calls it is not known which one is deep."""
    kind, last_id = _KIND.match(data), _LAST_ID.search(data, max(0, len(data) - _LAST_ID_BYTES_MAX))
    if kind is None or last_id is None:
        return None
    if kind[1] == b"method":
        fault = Fault(
            INVALID_PARAMS,
            "Invalid params: nested too deeply",
            _explained("nested too deeply", "params", "Send it in parts"),
        )
        return Frame(is_batch, [], [], [error_text(Raw(last_id[1]), fault)])
    error = ErrorObject(INTERNAL_ERROR, "the answer is nested too deeply")
    return Frame(is_batch, [], [Answer(int(last_id[1]), error=error, jsonrpc="2.0")], [])


_KIND = re.compile(rb'{"jsonrpc":"2.0","(method)":|\[?{"jsonrpc":"2.0","(?:result|error)":')
_LAST_ID = re.compile(rb',"id":(0|[1-9][0-9]{0,15})}]?$')
_LAST_ID_BYTES_MAX = 32


def _check_count(count: int, batch_max: int) -> None:
    if not count:
        raise Fault(INVALID_REQUEST, "Invalid Request", _explained("the batch is empty"))
    if count > batch_max:
        why = f"the batch has {count} members, the limit is {batch_max}"
        raise Fault(INVALID_REQUEST, "Invalid Request", _explained(why, next="Send it in parts"))


def _valid_calls(data: bytes, is_batch: bool) -> list[Call] | None:
    try:
        if not is_batch:
            call = _call.decode(data)
            if call.params is not UNSET and memoryview(call.params)[0] not in _PARAMS_STARTS:
                return None
            return [call] if call.id is UNSET or _is_id(call.id) else None
        calls = _call_batch.decode(data)
    except msgspec.ValidationError:
        return None
    params = [call.params for call in calls if call.params is not UNSET]
    ids = [call.id for call in calls if call.id is not UNSET]
    return calls if _starts(params) <= _PARAMS_STARTS and _are_ids(ids) else None


def _is_id(raw: Raw) -> bool:
    id = memoryview(raw)
    return id[0] in _ID_STARTS and len(id) <= ID_BYTES_MAX


def _valid_answers(data: bytes, is_batch: bool) -> Sequence[Answer] | None:
    try:
        answers = _answer_batch.decode(data) if is_batch else [_answer.decode(data)]
    except msgspec.ValidationError:
        return None
    for answer in answers:
        if (answer.result is UNSET) is (answer.error is UNSET):
            return None
    return answers


def _are_ids(raws: Sequence[Raw]) -> bool:
    return _starts(raws) <= _ID_STARTS and max(map(len, map(bytes, raws)), default=0) <= ID_BYTES_MAX


def _starts(raws: Sequence[Raw]) -> set[int]:
    """The first bytes of JSON values, which give their types: the decoder has already checked the syntax."""
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
    """A call, an answer, or the error text for a member that is neither."""
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
    """An answer is never answered, or two ends could go on for ever: an invalid one fails its call, if it has an id."""
    valid = _valid_answers(raw, is_batch=False)
    if valid is not None:
        return valid[0]
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
_any_params: msgspec.json.Decoder[list[Any] | dict[str, Any]] = msgspec.json.Decoder(list[Any] | dict[str, Any])
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


def bind_params(call: Call, signature: inspect.Signature, *first: Any) -> inspect.BoundArguments:
    """The params as arguments of a function, by name or by position, after `first`. Raises Fault if they do not fit."""
    try:
        given = [] if call.params is msgspec.UNSET else _any_params.decode(call.params)
        return signature.bind(*first, **given) if isinstance(given, dict) else signature.bind(*first, *given)
    except (TypeError, msgspec.DecodeError, RecursionError) as exc:
        why = str(exc)
        raise Fault(INVALID_PARAMS, f"Invalid params: {why}", {"where": call.method, "why": why}) from exc


# --- writing --------------------------------------------------------------------------------------------------------

encode = msgspec.json.Encoder().encode
NOT_JSON = (TypeError, ValueError, RecursionError, OverflowError)  # what it raises


class Result(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    result: Any
    id: Raw


class Notice(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    """A notification. Some clients take any JSON value as params, so none is refused here."""

    method: str
    params: Any


class _Refusal(msgspec.Struct, tag_field="jsonrpc", tag="2.0", gc=False):
    error: ErrorObject
    id: Raw


def error_text(id: Raw, fault: Fault) -> bytes:
    """The error answer to a call. It never fails: an error that cannot be encoded goes without its data."""
    try:
        data = Raw(encode(fault.data)) if fault.data is not None else UNSET
        return encode(_Refusal(ErrorObject(fault.code, fault.message, data), id))
    except NOT_JSON:
        message = fault.message.encode(errors="replace").decode()
        return encode(_Refusal(ErrorObject(fault.code, message), id))


# --- errors -----------------------------------------------------------------------------------------------------------

# The first of these classes in an error's MRO gives its code.
CODES: dict[type[HeadwaterError], int] = {
    errors.UnauthorizedError: UNAUTHORIZED,
    errors.SubscriptionActiveError: SUBSCRIPTION_ACTIVE,
    errors.UnknownSubscriptionError: UNKNOWN_SUBSCRIPTION,
    errors.UnknownDeadLetterError: UNKNOWN_SUBSCRIPTION,
    errors.NotDeliveredError: NOT_DELIVERED,
    errors.LeaseLostError: NOT_DELIVERED,
    errors.InvalidTopicError: INVALID_TOPIC,
    errors.InvalidPatternError: INVALID_TOPIC,
    errors.TooLargeError: TOO_LARGE,
    errors.OverloadedError: OVERLOADED,
    errors.RequestTimeoutError: OVERLOADED,
    errors.SubscriptionMismatchError: CONFLICT,
    errors.InvalidInputError: INVALID_PARAMS,
    errors.InvalidStateError: INVALID_PARAMS,
    errors.HeadwaterError: INTERNAL_ERROR,
}

# The class of a code when the other end names no class. Any other code is a CallError.
KINDS_OF_CODES: dict[int, type[HeadwaterError]] = {
    UNAUTHORIZED: errors.UnauthorizedError,
    SUBSCRIPTION_ACTIVE: errors.SubscriptionActiveError,
    UNKNOWN_SUBSCRIPTION: errors.UnknownSubscriptionError,
    NOT_DELIVERED: errors.NotDeliveredError,
    INVALID_TOPIC: errors.InvalidTopicError,
    TOO_LARGE: errors.TooLargeError,
    OVERLOADED: errors.OverloadedError,
    CONFLICT: errors.SubscriptionMismatchError,
    INVALID_PARAMS: errors.InvalidInputError,
}

# A closed table: no other class is ever made from a name in a frame.
KINDS_BY_NAME: dict[str, type[HeadwaterError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HeadwaterError)
}

# Directories of this machine are not disclosed to the other end; the file name is enough to identify a file.
_FOLDERS = re.compile(r"(?<![\w/.:])/(?:[^\s/'\"]+/)+")

ERROR_TEXT_CHARS_MAX = 4_000  # of each text; an error that quotes its input does not send it back whole
RETRY_AFTER = "retry_after"  # seconds, on an Overloaded that knows


def fault_of(exc: Exception) -> Fault:
    """The error that the caller gets. A foreign exception becomes "internal error": its text may hold secrets."""
    if isinstance(exc, Fault):
        return exc
    if not isinstance(exc, HeadwaterError):
        return Fault(INTERNAL_ERROR, "internal error")
    mro = type(exc).__mro__
    kind = next(each.__name__ for each in mro if each.__name__ in KINDS_BY_NAME)
    details = {"kind": kind, "where": exc.where, "why": exc.why, "next": exc.next}
    data: dict[str, Any] = {
        name: _FOLDERS.sub("", text)[:ERROR_TEXT_CHARS_MAX] for name, text in details.items() if text
    }
    retry_after = getattr(exc, RETRY_AFTER, None)
    if retry_after is not None:
        data[RETRY_AFTER] = retry_after
    if isinstance(exc, errors.CallError):  # passed on with the code of its origin
        return Fault(exc.code, exc.why[:ERROR_TEXT_CHARS_MAX], data if exc.data is None else {**data, "data": exc.data})
    return Fault(next(CODES[each] for each in mro if each in CODES), data.get("why", ""), data)


def error_of(error: ErrorObject, where: str) -> HeadwaterError:
    """The error of the other end as an exception: of the class that it names, else of the class of its code."""
    data = _error_data(error)
    details: dict[str, Any] = data if isinstance(data, dict) else {}
    why, next = _text(details, "why") or error.message, _text(details, "next")
    where = _text(details, "where") or where
    kind = KINDS_BY_NAME.get(_text(details, "kind"))
    if kind is errors.CallError:
        return errors.CallError(why, where=where, next=next, code=error.code, data=details.get("data"))
    kind = kind or KINDS_OF_CODES.get(error.code)
    if kind is None:
        return errors.CallError(why, where=where, next=next, code=error.code, data=data)
    rebuilt = kind(why, where=where, next=next)
    retry_after = details.get(RETRY_AFTER)
    if isinstance(retry_after, (int, float)) and not isinstance(retry_after, bool):
        setattr(rebuilt, RETRY_AFTER, retry_after)
    return rebuilt


def _error_data(error: ErrorObject) -> Any:
    if error.data is msgspec.UNSET:
        return None
    try:
        return msgspec.json.decode(error.data)
    except (msgspec.DecodeError, RecursionError):  # such as a number out of any range
        return None


def _text(details: dict[str, Any], name: str) -> str:
    text = details.get(name)
    return text if isinstance(text, str) else ""
