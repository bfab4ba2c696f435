"""Arrow columns of messages from the columns of the log, a whole batch at a time. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.message import derived_id
from headwater.message.times import TIME_MS_MAX
from headwater.pipeline.schema import ARROW_HEADERS, ARROW_TIME

_ID_CHARS = 36
_BITS_48 = 1 << 48  # what the twelve hex digits of an id hold

# The two hex digits of each byte, as they lie in memory.
_HEX_OF_BYTE = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)


def derived_ids(published_ms: pa.Int64Array, seqs: pa.Int64Array, salt: int) -> pa.StringArray:
    """What `message.derived_id` says for each row: six times as fast as SQLite's printf in the view `history`."""
    times, numbers = published_ms.to_numpy(), seqs.to_numpy()
    if len(times) == 0:
        return pa.array([], pa.string())
    least_ms, most_ms, least, most = int(times.min()), int(times.max()), int(numbers.min()), int(numbers.max())
    if min(least_ms, least) < 0 or max(most_ms, most) >= _BITS_48:  # put in by hand, and by force
        return pa.array(
            [derived_id(at, salt, seq) for at, seq in zip(times.tolist(), numbers.tolist(), strict=True)], pa.string()
        )
    chars = np.empty((len(times), _ID_CHARS), dtype=np.uint8)
    chars[:] = np.frombuffer(derived_id(least_ms, salt, least).encode(), dtype=np.uint8)
    # The first six digits of time and seq are mostly the same in a whole batch.
    if least_ms >> 24 != most_ms >> 24:
        chars[:, 0:6] = _hex_digits(times, 2, 5)
    low_digits = _hex_digits(times, 5, 8)
    chars[:, 6:8] = low_digits[:, :2]
    chars[:, 9:13] = low_digits[:, 2:]
    if least >> 24 != most >> 24:
        chars[:, 24:30] = _hex_digits(numbers, 2, 5)
    chars[:, 30:36] = _hex_digits(numbers, 5, 8)
    offsets = np.arange(0, (len(times) + 1) * _ID_CHARS, _ID_CHARS, dtype=np.int32)
    return pa.StringArray.from_buffers(len(times), pa.py_buffer(offsets), pa.py_buffer(chars))


def _hex_digits(
    numbers: np.ndarray[Any, np.dtype[np.int64]], first: int, end: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The hex digits of some of the eight bytes of each number, as ASCII."""
    big_endian = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, first:end]
    return _HEX_OF_BYTE[big_endian].view(np.uint8)


def times(ms: pa.Int64Array) -> pa.TimestampArray:
    """Milliseconds as timestamps. What a row inserted by hand says beyond the years 1970 to 9999 becomes the nearest
    time within them, as in `message.times.datetime_of`."""
    if ms.null_count < len(ms):
        found = pc.min_max(ms)
        if found["min"].as_py() < 0 or found["max"].as_py() > TIME_MS_MAX:
            ms = pc.min_element_wise(pc.max_element_wise(ms, 0, skip_nulls=False), TIME_MS_MAX, skip_nulls=False)
    return pc.multiply(ms, 1000).cast(ARROW_TIME)


def headers(texts: pa.StringArray) -> pa.MapArray:
    """JSON objects as maps of text; what is no text is its JSON. One that cannot be read is a map with its text under
    the empty name, so that a row put in by force is still seen."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), ARROW_HEADERS)
    return pa.array([None if text is None else _header_items(text) for text in texts.to_pylist()], ARROW_HEADERS)


def _header_items(text: str) -> list[tuple[str, str]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return [(name, _header_text(value)) for name, value in found.items()]
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return [("", text)]


def _header_text(raw: msgspec.Raw) -> str:
    json = bytes(raw)
    return msgspec.json.decode(json, type=str) if json[:1] == b'"' else json.decode()


def byte_sizes(texts: pa.StringArray) -> pa.Int64Array:
    return pc.binary_length(texts).cast(pa.int64())


def readable(texts: pa.StringArray) -> pa.StringArray:
    """The texts themselves if they are UTF-8, as a rule; else with U+FFFD for what is not."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raw = texts.cast(pa.binary()).to_pylist()
        return pa.array([None if each is None else each.decode(errors="replace") for each in raw], pa.string())
    return texts
