"""Payloads: JSON text, encoded once at publish and decoded on first access."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidDataError, TooLargeError

DATA_BYTES_MAX = 1024 * 1024


def _foreign(value: object) -> object:
    if isinstance(value, msgspec.Raw):  # JSON as it is; reached only in the search for NaN
        return None
    dump = getattr(value, "model_dump", None)  # a pydantic model, without depending on pydantic
    if callable(dump):
        return dump(mode="json")
    name = type(value).__name__
    raise TypeError(f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name} is not JSON")


_JSON_VALUES = "Send dicts, lists, text, numbers, True, False and None; of an object its fields, or a headwater.Event"
_encode = msgspec.json.Encoder(enc_hook=_foreign).encode
_decoder = msgspec.json.Decoder()


def encode(data: Any, where: str) -> tuple[bytes, str]:
    """`data` as JSON, in bytes and as text, or InvalidDataError/TooLargeError that says where it stood."""
    try:
        encoded = _encode(data)
        text = encoded.decode()  # which is also searched in half the time
    except RecursionError as exc:
        raise InvalidDataError(
            "it holds itself, or is nested too deeply for JSON", where=where, next="Send its parts by value"
        ) from exc
    except UnicodeEncodeError as exc:
        raise InvalidDataError(
            f"text with half a surrogate pair at {exc.start} is not JSON",
            where=where,
            next="Replace the lone surrogates; what is not text is sent as base64",
        ) from exc
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidDataError(str(exc) or type(exc).__name__, where=where, next=_JSON_VALUES) from exc
    size = len(encoded)
    if size > DATA_BYTES_MAX:
        raise TooLargeError(
            f"{size} bytes of JSON, the limit is {DATA_BYTES_MAX}",
            where=where,
            next="Store it elsewhere and publish a reference",
        )
    # The encoder writes NaN and infinities as null; refusing them beats changing them silently.
    if "null" in text:
        _refuse_non_finite(msgspec.to_builtins(data, enc_hook=_foreign), where)
    if type(data) in _BYTES:
        raise InvalidDataError("bytes are not JSON", where=where, next="Decode them, or send base64 text")
    # It writes sets as arrays, in any order.
    if "[" in text and _has_set(data):
        raise InvalidDataError("a set is not JSON: it has no order", where=where, next="Send a list, like sorted(…)")
    return encoded, text


def encode_all(payloads: Sequence[Any]) -> list[bytes] | None:
    """The same for many at once, or None if `encode` has to find out what is wrong with one."""
    try:
        encoded = list(map(_encode, payloads))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None
    is_large = max(map(len, encoded)) > DATA_BYTES_MAX
    suspicious = is_large or b"null" in b"".join(encoded) or not _BYTES.isdisjoint(map(type, payloads))
    # A look at each would add a third to the cost of a large batch; its messages are alike as a rule.
    looked_at = zip(payloads[:LOOKED_AT_MAX], encoded, strict=False)
    suspicious = suspicious or any(b"[" in each and _has_set(data) for data, each in looked_at)
    return None if suspicious else encoded


_BYTES = frozenset({bytes, bytearray, memoryview})


_SETS = frozenset({set, frozenset})
_WITHOUT_PARTS = frozenset({str, int, float, bool, type(None)})
LOOKED_AT_MAX = 4  # messages of a batch that are looked through for sets


def _has_set(value: Any) -> bool:
    """Whether a set is anywhere inside. On the way of every message with an array, so written for speed: types are
    compared before they are asked."""
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not list:
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return kind in _SETS
    for part in value:  # noqa: SIM110
        if type(part) not in _WITHOUT_PARTS and _has_set(part):
            return True
    return False


def _refuse_non_finite(value: object, where: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidDataError(f"{value} is not JSON", where=where, next="Send null or text instead")
    elif isinstance(value, Mapping):
        for part in value.values():
            _refuse_non_finite(part, where)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            _refuse_non_finite(part, where)


def decode(raw: msgspec.Raw, where: str) -> Any:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidDataError(f"the stored payload is not JSON ({exc})", where=where) from exc


def readable(raw: msgspec.Raw) -> bool:
    try:
        _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
