"""A process that forwards until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection

import headwater
from headwater.api.forwarder import Forwarder

LEASE_S = 0.3  # so that a dead holder delays no other for long


def forward(pipe: Connection, source: str, target: str) -> None:
    """Sends its state on request; forwards until its pipe says end."""
    with headwater.open(source, maintenance_interval=None) as log:
        transport = headwater.open_transport(target)
        forwarder = Forwarder(log, transport, id="f", batch=20, wait=0, lease=LEASE_S)
        forwarder.start()
        pipe.send("started")
        while pipe.recv() != "end":
            pipe.send(forwarder.status().state)
        forwarder.stop()
        transport.close()
        pipe.send(forwarder.status().forwarded)
