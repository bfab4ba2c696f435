"""Headwater: durable messaging where the database is the broker.

with headwater.open("events.db") as log:
    log.publish("orders.new", {"order": 17})
    for message in log.subscribe("billing", "orders.>"):
        print(message.data)
        message.ack()
"""

import importlib
from typing import TYPE_CHECKING, Any

from headwater import errors
from headwater.api._async import AsyncLog, AsyncReceivedMessage, AsyncSubscription
from headwater.api._sync import Log, ReceivedMessage, Subscription
from headwater.broker.handlers import Reject
from headwater.broker.schedules import Occurrence
from headwater.errors import HeadwaterError
from headwater.message import Message
from headwater.ports.clock import ManualClock
from headwater.ports.records import DeadLetter, Gap
from headwater.server.registry import Middleware, ShortCircuit
from headwater.version import VERSION
from headwater.wiring import open, open_async, open_bus, open_bus_async, open_transport, serve

if TYPE_CHECKING:
    from headwater.api.forwarder import Forwarder
    from headwater.replication.follow import follow
    from headwater.replication.sync import sync
    from headwater.stores.dedupe import open_dedupe
    from headwater.transports.multi import MultiTransport
    from headwater.typed import Event

__version__ = VERSION

# Imported when they are wanted: pydantic alone takes longer than all the rest.
_LATER = {
    "Event": "headwater.typed",
    "Forwarder": "headwater.api.forwarder",
    "MultiTransport": "headwater.transports.multi",
    "follow": "headwater.replication.follow",
    "open_dedupe": "headwater.stores.dedupe",
    "sync": "headwater.replication.sync",
}


def __getattr__(name: str) -> Any:
    if name == "pipeline":  # `headwater.pipeline.session()`; importing it does not import Spark
        return importlib.import_module("headwater.pipeline")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncLog",
    "AsyncReceivedMessage",
    "AsyncSubscription",
    "DeadLetter",
    "Event",
    "Forwarder",
    "Gap",
    "HeadwaterError",
    "Log",
    "ManualClock",
    "Message",
    "Middleware",
    "MultiTransport",
    "Occurrence",
    "ReceivedMessage",
    "Reject",
    "ShortCircuit",
    "Subscription",
    "errors",
    "follow",
    "open",
    "open_async",
    "open_bus",
    "open_bus_async",
    "open_dedupe",
    "open_transport",
    "serve",
    "sync",
]
