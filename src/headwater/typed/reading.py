"""From a message to an event: the right class, the right version, fields that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headwater.broker.received import Received
from headwater.errors import InvalidMessage, UnknownType
from headwater.message import Message, encode
from headwater.typed.checking import told
from headwater.typed.serializers import from_data, is_json
from headwater.typed.upgrading import upgraded

if TYPE_CHECKING:
    from headwater.typed.event import Event

FIRST_VERSION = 1
"""What a message without a version is taken for."""


def message_of(received: Message | Received) -> Message:
    return received if isinstance(received, Message) else received.message


def class_of(classes: Sequence[type[Event]], message: Message) -> type[Event] | None:
    """That of the message's type, or a subclass of one; of several versions of a type the message's own, or else the
    newest, which may know how to upgrade."""
    version = FIRST_VERSION if message.version is None else message.version
    alike = [cls for cls in classes if cls.__headwater__.type == message.type]
    if alike:
        return max(alike, key=lambda cls: (cls.__headwater__.version == version, cls.__headwater__.version))
    for registry in {id(cls.registry): cls.registry for cls in classes}.values():
        found = registry.find(message.type, version)
        if found is not None and issubclass(found, tuple(classes)):
            return found
    return None


def unknown_type(classes: Sequence[type[Event]], message: Message) -> UnknownType:
    wanted = " or ".join(cls.__headwater__.type for cls in classes)
    why = "it has no type" if message.type is None else f"its type is {message.type!r}"
    return UnknownType(
        f"{why}, and this wants {wanted}",
        where=_where(message),
        next="Publish it by its class, or let a handler of that class read it",
    )


def read_event(cls: type[Event], message: Message) -> Event:
    """Raises VersionMismatch, InvalidMessage or InvalidData."""
    declared = cls.__headwater__
    version = FIRST_VERSION if message.version is None else message.version
    where = _where(message)
    text: bytes | str = bytes(message.raw)
    if version != declared.version or not is_json(message.content_type):
        fields = from_data(message.content_type, message.data, where)
        text = encode(upgraded(declared, version, fields, where), where)[0]
    try:
        event: Any = cls.__pydantic_validator__.validate_json(text)
    except ValidationError as exc:
        path, why = told(exc)
        raise InvalidMessage(
            why,
            where=f"{where}, {declared.type}{path}",
            next=f"It says it is version {version}; fields that change want a new version, and an upgrader",
        ) from exc
    return event  # type: ignore[no-any-return]


def _where(message: Message) -> str:
    return f"message {message.seq} on {message.topic}"
