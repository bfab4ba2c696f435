"""Headwater: durable messaging where the database is the broker.

with headwater.open("events.db") as log:
    log.publish("orders.new", {"order": 17})
    for message in log.subscribe("billing", "orders.>"):
        print(message.data)
        message.ack()
"""

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
from headwater.wiring import connect, open, serve

__version__ = VERSION

__all__ = [
    "AsyncLog",
    "AsyncReceivedMessage",
    "AsyncSubscription",
    "DeadLetter",
    "Gap",
    "HeadwaterError",
    "Log",
    "ManualClock",
    "Message",
    "Middleware",
    "ReceivedMessage",
    "Reject",
    "ShortCircuit",
    "Subscription",
    "connect",
    "errors",
    "open",
    "serve",
]
