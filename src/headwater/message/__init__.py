"""What is published (`Draft`) and what the log holds (`Message`), with the limits on both."""

from headwater.message.document import MessageDocument, from_document, to_document
from headwater.message.draft import (
    BATCH_MESSAGES_MAX,
    HEADERS_BYTES_MAX,
    ID_CHARS_MAX,
    NAME_CHARS_MAX,
    PRIORITY_MAX,
    VERSION_MAX,
    Draft,
    Extras,
    PublishOptions,
    check_limits,
    check_whole,
    make_draft,
)
from headwater.message.model import NAMED_HEADERS, NO_HEADERS, SALT_BITS, Message, derived_id, scoped_id
from headwater.message.payload import DATA_BYTES_MAX, decode, encode, encode_all, readable
from headwater.message.times import TIME_MS_MAX, Moment, Span, datetime_of, iso, ms_of_iso, span_ms, time_ms

__all__ = [
    "BATCH_MESSAGES_MAX",
    "DATA_BYTES_MAX",
    "HEADERS_BYTES_MAX",
    "ID_CHARS_MAX",
    "NAMED_HEADERS",
    "NAME_CHARS_MAX",
    "NO_HEADERS",
    "PRIORITY_MAX",
    "SALT_BITS",
    "TIME_MS_MAX",
    "VERSION_MAX",
    "Draft",
    "Extras",
    "Message",
    "MessageDocument",
    "Moment",
    "PublishOptions",
    "Span",
    "check_limits",
    "check_whole",
    "datetime_of",
    "decode",
    "derived_id",
    "encode",
    "encode_all",
    "from_document",
    "iso",
    "make_draft",
    "ms_of_iso",
    "readable",
    "scoped_id",
    "span_ms",
    "time_ms",
    "to_document",
]
