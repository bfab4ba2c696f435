"""What a server is told: `headwater.toml`, then the environment, then flags, each over the one before.

`load_settings` gives `Settings`, or one InvalidConfiguration that lists every complaint. The names are imported when
asked for: the command line takes its spans and sizes from this room, and must not pay for pydantic with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.configuration.loading import load_settings
    from headwater.configuration.settings import (
        Explained,
        Limits,
        LogSettings,
        Profile,
        ReplicaSettings,
        ServerSettings,
        Settings,
        TopicSettings,
    )
    from headwater.configuration.transports import MessageSettings, TransportSettings

__all__ = [
    "Explained",
    "Limits",
    "LogSettings",
    "MessageSettings",
    "Profile",
    "ReplicaSettings",
    "ServerSettings",
    "Settings",
    "TopicSettings",
    "TransportSettings",
    "load_settings",
]

_HOMES = {"load_settings": "loading", "MessageSettings": "transports", "TransportSettings": "transports"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "settings")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
