"""Telling systemd how we are, if it asked: a unit of `Type=notify` waits for READY=1."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

SOCKET_VARIABLE = "NOTIFY_SOCKET"


def tell_service_manager(state: Literal["READY=1", "STOPPING=1"]) -> None:
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # a name that is no file
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(state.encode(), address)
