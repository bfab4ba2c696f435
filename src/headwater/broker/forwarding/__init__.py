"""A durable subscription that feeds a transport: a target that is away loses nothing, for the cursor waits."""

from headwater.broker.forwarding.forwarder import Forwarder
from headwater.broker.forwarding.status import ForwarderStatus

__all__ = ["Forwarder", "ForwarderStatus"]
