"""Headwater: durable messaging where the database is the broker.

with headwater.open("events.db") as log:
    log.publish("orders.new", {"order": 17})
    for message in log.subscribe("billing", "orders.>"):
        print(message.data)
        message.ack()
"""

import importlib
from typing import TYPE_CHECKING, Any

from headwater.version import VERSION

if TYPE_CHECKING:
    from headwater import errors
    from headwater.api._async import AsyncLog, AsyncReceivedMessage, AsyncSubscription
    from headwater.api._sync import Log, ReceivedMessage, Subscription
    from headwater.api.forwarder import Forwarder
    from headwater.broker.handlers import Reject
    from headwater.broker.schedules import Occurrence
    from headwater.errors import HeadwaterError
    from headwater.message import Message
    from headwater.ports.clock import ManualClock
    from headwater.ports.records import DeadLetter, Gap
    from headwater.replication.follow import follow
    from headwater.replication.sync import sync
    from headwater.server.registry import Middleware, ShortCircuit
    from headwater.stores.dedupe import open_dedupe
    from headwater.transports.multi import MultiTransport
    from headwater.typed import Event
    from headwater.wiring import open, open_async, open_bus, open_bus_async, open_transport, serve

__version__ = VERSION

# Where each name is. It is imported when it is used: a command imports only what it needs, and pydantic alone takes
# longer than all the rest.
_MODULES = {
    "AsyncLog": "headwater.api._async",
    "AsyncReceivedMessage": "headwater.api._async",
    "AsyncSubscription": "headwater.api._async",
    "DeadLetter": "headwater.ports.records",
    "Event": "headwater.typed",
    "Forwarder": "headwater.api.forwarder",
    "Gap": "headwater.ports.records",
    "HeadwaterError": "headwater.errors",
    "Log": "headwater.api._sync",
    "ManualClock": "headwater.ports.clock",
    "Message": "headwater.message",
    "Middleware": "headwater.server.registry",
    "MultiTransport": "headwater.transports.multi",
    "Occurrence": "headwater.broker.schedules",
    "ReceivedMessage": "headwater.api._sync",
    "Reject": "headwater.broker.handlers",
    "ShortCircuit": "headwater.server.registry",
    "Subscription": "headwater.api._sync",
    "follow": "headwater.replication.follow",
    "open": "headwater.wiring",
    "open_async": "headwater.wiring",
    "open_bus": "headwater.wiring",
    "open_bus_async": "headwater.wiring",
    "open_dedupe": "headwater.stores.dedupe",
    "open_transport": "headwater.wiring",
    "serve": "headwater.wiring",
    "sync": "headwater.replication.sync",
}
_SUBMODULES = ("errors", "pipeline")  # importing `pipeline` does not import Spark


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"headwater.{name}")
    if name not in _MODULES:
        from headwater.arguments import no_module_attribute

        no_module_attribute(__name__, name)
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBMODULES})


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
