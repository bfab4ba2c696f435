"""What errors have in common: their text without the parts that change from one to the next."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

ERROR_CHARS_READ_MAX = 2_000
SIGNATURE_CHARS_MAX = 200

# In this order: what stands in quotes may hold a path, a path a uuid, a uuid numbers.
_PLACEHOLDERS = (
    (r'"[^"]*"', "<text>"),
    (r"(?<!\w)'[^']*'(?!\w)", "<text>"),  # not the apostrophe of "can't"
    (r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s,;)\]]+", "<path>"),
    (r"(?<![\w<])[A-Za-z]:\\[^\s:,;)\]]+", "<path>"),
    (r"(?<![\w<.~/])(?:~|\.{1,2})?/[^\s:,;)\]]+", "<path>"),
    (r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<uuid>"),
    (r"(?i)\b0x[0-9a-f]+\b", "<hex>"),
    (r"(?i)\b(?=[0-9a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}\b", "<hex>"),
    (r"(?<!\w)[+-]?\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?", "<n>"),  # not the 8 of "utf8"
    (r"\s+", " "),
)


def error_signature(error: Column) -> Column:
    text = F.substring(error, 1, ERROR_CHARS_READ_MAX)
    for changing, placeholder in _PLACEHOLDERS:
        text = F.regexp_replace(text, changing, placeholder)
    return F.substring(F.trim(text), 1, SIGNATURE_CHARS_MAX)
