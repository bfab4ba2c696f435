"""The configuration of a server: `headwater.toml`, then the environment, then flags, each over the one before."""

from headwater.settings.load import load_settings
from headwater.settings.model import Explained, Limits, ServerSettings, Settings, TransportSettings, is_loopback

__all__ = ["Explained", "Limits", "ServerSettings", "Settings", "TransportSettings", "is_loopback", "load_settings"]
