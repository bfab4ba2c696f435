"""Messages as classes: fields checked at publish and at delivery, versions, requests, copies."""

from headwater.typed.bus import AsyncBus, Bus, make_bus
from headwater.typed.event import Event, publish_many
from headwater.typed.exporting import asyncapi, json_schema
from headwater.typed.handling import on
from headwater.typed.registry import Registry
from headwater.typed.serializers import register_serializer

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
