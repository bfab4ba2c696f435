"""Messages as classes: fields checked at publish and at delivery, versions, requests, copies."""

from headwater.typed.bus import AsyncBus, Bus, make_bus
from headwater.typed.codec import register_serializer
from headwater.typed.declaration import Registry
from headwater.typed.event import Event, publish_many
from headwater.typed.export import asyncapi, json_schema
from headwater.typed.handling import on

__all__ = [
    "AsyncBus",
    "Bus",
    "Event",
    "Registry",
    "asyncapi",
    "json_schema",
    "make_bus",
    "on",
    "publish_many",
    "register_serializer",
]
