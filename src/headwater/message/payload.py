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
    raise TypeError(f"a {type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_foreign).encode
_decoder = msgspec.json.Decoder()


def encode(data: Any, where: str) -> tuple[str, int]:
    """JSON text of `data` and its size in bytes, or InvalidDataError/TooLargeError that says where it stood."""
    try:
        encoded = _encode(data)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        raise InvalidDataError(str(exc) or type(exc).__name__, where=where, next="Send JSON values only") from exc
    size = len(encoded)
    if size > DATA_BYTES_MAX:
        raise TooLargeError(
            f"{size} bytes of JSON, the limit is {DATA_BYTES_MAX}",
            where=where,
            next="Store it elsewhere and publish a reference",
        )
    text = encoded.decode()
    # The encoder writes NaN and infinities as null; refusing them beats changing them silently.
    if "null" in text:
        _refuse_non_finite(msgspec.to_builtins(data, enc_hook=_foreign), where)
    if type(data) in _BYTES:
        raise InvalidDataError("bytes are not JSON", where=where, next="Decode them, or send base64 text")
    return text, size


def encode_all(payloads: Sequence[Any]) -> tuple[list[str], list[int]] | None:
    """The same for many at once: texts and sizes, or None if `encode` has to find out what is wrong with one."""
    try:
        encoded = list(map(_encode, payloads))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None
    texts, sizes = [each.decode() for each in encoded], list(map(len, encoded))
    suspicious = max(sizes) > DATA_BYTES_MAX or "null" in "".join(texts) or not _BYTES.isdisjoint(map(type, payloads))
    return None if suspicious else (texts, sizes)


_BYTES = frozenset({bytes, bytearray, memoryview})


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
