"""Which columns a DataFrame may have to be published, and of what types."""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from headwater.errors import InvalidData, InvalidOption

TEXTS = ("topic", "data", "id", "type", "from", "to", "reply_to", "correlation_id", "content_type", "traceparent")
NUMBERS = ("version", "priority")
TIMES = ("deliver_at", "expires_at")
COLUMNS = (*TEXTS, *NUMBERS, *TIMES, "headers")

# What the log says itself; a DataFrame read from a log has them, and may be written back as it is.
IGNORED = ("seq", "published_at", "size")

_WHOLE = (ByteType, ShortType, IntegerType, LongType)


def check_columns(schema: StructType, topic: str | None) -> tuple[str, ...]:
    """The names of the columns that will be published, or the first reason why they cannot be."""
    names = schema.fieldNames()
    for field in schema.fields:
        if names.count(field.name) > 1:
            raise InvalidOption("there are two columns of this name", where=f"column {field.name}", next="Drop one")
        if field.name not in COLUMNS and field.name not in IGNORED:
            raise InvalidOption(
                "a message has no such column",
                where=f"column {field.name}",
                next=f"Drop it, or put it into data or headers. Known ones: {', '.join(COLUMNS)}",
            )
        _check_type(field.name, field.dataType)
    if "data" not in names:
        raise InvalidOption(
            "there is no column data",
            where="headwater sink",
            next='Select to_json(struct("*")).alias("data"), or name the column that holds the payload so',
        )
    if "topic" not in names and topic is None:
        raise InvalidOption(
            "nothing says the topic", where="headwater sink", next='Add .option("topic", …) or a column topic'
        )
    return tuple(name for name in names if name in COLUMNS and not (name == "topic" and topic is not None))


def _check_type(name: str, found: DataType) -> None:
    if name in TEXTS and not isinstance(found, StringType):
        wanted = "text"
    elif name in NUMBERS and not isinstance(found, _WHOLE):
        wanted = "a whole number"
    elif name in TIMES and not isinstance(found, TimestampType):
        wanted = "a timestamp"
    elif name == "headers" and not _is_text_map(found):
        wanted = "map<string,string>"
    else:
        return
    kind = InvalidData if name == "data" else InvalidOption
    raise kind(f"it is {found.simpleString()}, not {wanted}", where=f"column {name}", next=_cure(name, found))


def _is_text_map(found: DataType) -> bool:
    return (
        isinstance(found, MapType) and isinstance(found.keyType, StringType) and isinstance(found.valueType, StringType)
    )


def _cure(name: str, found: DataType) -> str:
    if name == "headers":
        return 'Make it with create_map(lit("name"), col("value").cast("string"), …)'
    if name in TIMES:
        times = "its time zone is the session's" if isinstance(found, TimestampNTZType) else "or make_timestamp(…)"
        return f'Use col("{name}").cast("timestamp") ({times})'
    if name in NUMBERS:
        return f'Use col("{name}").cast("bigint")'
    if name == "data" and isinstance(found, (StructType, MapType, ArrayType, VariantType)):
        return 'Use to_json(col("data")).alias("data")'
    return f'Use col("{name}").cast("string")'
