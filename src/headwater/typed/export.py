"""The classes of a module or a registry as JSON Schemas and as an AsyncAPI document."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from headwater.errors import InvalidOptionError
from headwater.typed.declaration import Registry, TopicTemplate
from headwater.typed.event import Event

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ASYNCAPI = "3.0.0"

T = TypeVar("T", bound=Hashable)
Source = ModuleType | Registry | Iterable[type[Event]]

_NO_KEY = re.compile(r"[^A-Za-z0-9._-]")


def classes_in(source: Source) -> list[type[Event]]:
    """The classes with a topic, by type and version. Of a module also those that it imported from others."""
    found: Iterable[Any] = vars(source).values() if isinstance(source, ModuleType) else source
    classes = {
        cls for cls in found if isinstance(cls, type) and issubclass(cls, Event) and cls.__headwater__.topic is not None
    }
    return sorted(classes, key=lambda cls: (cls.__headwater__.type, cls.__headwater__.version))


def json_schema(source: Source) -> dict[str, dict[str, Any]]:
    """The JSON Schema of each class under `TYPE@VERSION`, each complete."""
    return {
        _type_and_version(cls): {"$schema": DIALECT, **cls.model_json_schema(schema_generator=PublishedSchema)}
        for cls in classes_in(source)
    }


def asyncapi(source: Source, *, title: str = "Events", version: str = "1.0.0") -> dict[str, Any]:
    """An AsyncAPI 3.0 document: a channel for each topic, a message and a send operation for each class, and a receive
    operation for each handler."""
    for word, value in (("title", title), ("version", version)):
        if not isinstance(value, str) or not value:
            raise InvalidOptionError(f"{word} is text, not {value!r}", where="asyncapi")
    classes = classes_in(source)
    refs, definitions = models_json_schema(
        [(cls, "validation") for cls in classes],
        ref_template="#/components/schemas/{model}",
        schema_generator=PublishedSchema,
    )
    channel_keys = _keys({_topic(cls).text: _topic(cls).text for cls in classes})
    message_keys = _keys({cls: _type_and_version(cls).replace("@", "-v") for cls in classes})
    channels: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for cls in classes:
        key, channel = message_keys[cls], channel_keys[_topic(cls).text]
        messages[key] = _message(cls, refs[cls, "validation"])
        channels.setdefault(channel, _channel(cls))["messages"][key] = {"$ref": f"#/components/messages/{key}"}
    return {
        "asyncapi": ASYNCAPI,
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": _operations(message_keys, channel_keys),
        "components": {"messages": messages, "schemas": definitions.get("$defs", {})},
    }


def gaps_in(source: Source) -> list[str]:
    """The missing upgraders between the versions of each class, one line each."""
    return [
        f"{cls.__headwater__.type}: nothing upgrades version {version} to {version + 1}"
        for cls in classes_in(source)
        for version in cls.__headwater__.missing_upgraders()
    ]


def _type_and_version(cls: type[Event]) -> str:
    return f"{cls.__headwater__.type}@{cls.__headwater__.version}"


def _topic(cls: type[Event]) -> TopicTemplate:
    topic = cls.__headwater__.topic
    assert topic is not None, "classes_in gives none without"
    return topic


def _keys(names: Mapping[T, str]) -> dict[T, str]:
    """Unique keys as AsyncAPI allows them: other characters become _, and repeated keys get a number."""
    keys: dict[T, str] = {}
    taken: set[str] = set()
    for name, text in names.items():
        plain = key = _NO_KEY.sub("_", text)
        number = 1
        while key in taken:
            number += 1
            key = f"{plain}-{number}"
        taken.add(key)
        keys[name] = key
    return keys


def _channel(cls: type[Event]) -> dict[str, Any]:
    topic = _topic(cls)
    channel: dict[str, Any] = {"address": topic.text, "messages": {}}
    if topic.fields:
        schema = cls.model_json_schema(by_alias=False, schema_generator=PublishedSchema)
        channel["parameters"] = {name: _parameter(name, schema) for name in topic.fields}
    return channel


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    found = schema["properties"][name]
    found = schema.get("$defs", {}).get(found.get("$ref", "").removeprefix("#/$defs/"), found)  # an Enum has its own
    parameter: dict[str, Any] = {"description": f"The field {name} of the message"}
    choices = found.get("enum", [])
    if choices and all(isinstance(value, str) for value in choices):
        parameter["enum"] = choices
    return parameter


def _message(cls: type[Event], payload: Any) -> dict[str, Any]:
    declared = cls.__headwater__
    message: dict[str, Any] = {
        "name": declared.type,
        "title": f"{declared.type}, version {declared.version}",
        "contentType": declared.serializer.content_type,
        "headers": {
            "type": "object",
            "properties": {"type": {"const": declared.type}, "version": {"const": declared.version}},
        },
        "payload": payload,
    }
    if cls.__doc__ and cls.__doc__ != Event.__doc__:
        message["description"] = cls.__doc__.strip()
    if declared.reply_to is not None:
        message["headers"]["properties"]["reply_to"] = {"const": declared.reply_to}
    return message


def _operations(message_keys: Mapping[type[Event], str], channel_keys: Mapping[str, str]) -> dict[str, Any]:
    names: dict[tuple[type[Event], str | None], str] = {}
    for cls, key in message_keys.items():
        names[cls, None] = f"send-{key}"
        names |= {(cls, id): f"receive-{key}-{id}" for id in cls.registry.handlers_of(cls)}
    operations: dict[str, Any] = {}
    for (cls, handler), name in _keys(names).items():
        channel = f"#/channels/{channel_keys[_topic(cls).text]}"
        operations[name] = {
            "action": "send" if handler is None else "receive",
            "channel": {"$ref": channel},
            "messages": [{"$ref": f"{channel}/messages/{message_keys[cls]}"}],
        }
    return operations


class PublishedSchema(GenerateJsonSchema):
    """Accepts every payload that its class publishes. Pydantic's own is narrower: times without a zone, durations with
    a fraction and Decimals with an exponent are published, but do not match the format or pattern that it writes."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        found: dict[str, Any] = super().decimal_schema(schema)
        for each in found.get("anyOf", [found]):
            each.pop("pattern", None)
        return found

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        return super().datetime_schema(schema) if schema.get("tz_constraint") == "aware" else {"type": "string"}

    def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
        return {"type": "string"}

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        return {"type": "string"}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        return {"type": "string", "contentEncoding": "base64"}  # its lengths are of bytes, not of characters
