"""From an event to what a log publishes: checked again, encoded, with the headers that its class says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.errors import InvalidOption
from headwater.typed.checking import plain_values
from headwater.typed.serializers import is_json, to_data

if TYPE_CHECKING:
    from headwater.typed.event import Event

CLASS_SAYS = ("type", "version", "content_type")


class Prepared(NamedTuple):
    topic: str
    data: Any
    options: dict[str, Any]


def prepare(event: Event, options: Mapping[str, Any], *, topic: str | None = None) -> Prepared:
    """`topic` goes before that of the class; `options` before what the class says of sender and receiver."""
    declared = type(event).__headwater__
    refused = next((name for name in CLASS_SAYS if name in options), None)
    if refused is not None:
        raise InvalidOption(f"{refused} belongs to the class", where=declared.where, next="Leave it out")
    plain = plain_values(event)
    if topic is None:
        if declared.topic is None:
            raise InvalidOption(
                "it has no topic",
                where=f"class {type(event).__name__}",
                next=f'Write class {type(event).__name__}(…, topic="…")',
            )
        names = {name: plain.get(_wire_name(event, name)) for name in declared.topic.fields}
        topic = declared.topic.fill(names, declared.where)
    said = {"from_": declared.from_, "to": declared.to, "reply_to": declared.reply_to}
    if not is_json(declared.serializer.content_type):
        said["content_type"] = declared.serializer.content_type
    headers = {"type": declared.type, "version": declared.version}
    given = {name: value for name, value in {**said, **options}.items() if value is not None}
    return Prepared(topic, to_data(declared.serializer, plain, declared.where), {**given, **headers})


def _wire_name(event: Event, name: str) -> str:
    return type(event).model_fields[name].serialization_alias or name
