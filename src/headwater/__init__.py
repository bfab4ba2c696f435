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
from headwater.broker.asynchronous import AsyncLog, AsyncReceivedMessage, AsyncSubscription
from headwater.broker.blocking import Log, ReceivedMessage, Subscription
from headwater.broker.handlers import Reject
from headwater.errors import HeadwaterError
from headwater.message import Message
from headwater.ports.clock import ManualClock
from headwater.ports.records import DeadLetter, Gap
from headwater.server.registry import Middleware, ShortCircuit
from headwater.version import VERSION
from headwater.wiring import connect, connect_bus, open, open_bus, open_transport, serve

if TYPE_CHECKING:
    from headwater.broker.forwarding import Forwarder
    from headwater.replication.follower import follow
    from headwater.replication.synchronise import sync
    from headwater.stores.dedupe.opening import open_dedupe
    from headwater.transports.multi import MultiTransport
    from headwater.typed import Event

__version__ = VERSION

# Imported when they are wanted: pydantic alone takes longer than all the rest.
_LATER = {
    "Event": "headwater.typed",
    "Forwarder": "headwater.broker.forwarding",
    "MultiTransport": "headwater.transports.multi",
    "follow": "headwater.replication.follower",
    "open_dedupe": "headwater.stores.dedupe.opening",
    "sync": "headwater.replication.synchronise",
}


def __getattr__(name: str) -> Any:
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
    "ReceivedMessage",
    "Reject",
    "ShortCircuit",
    "Subscription",
    "connect",
    "connect_bus",
    "errors",
    "follow",
    "open",
    "open_bus",
    "open_dedupe",
    "open_transport",
    "serve",
    "sync",
]
