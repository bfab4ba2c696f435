"""Settings that are fine one by one and cannot be used together. Pure."""

from __future__ import annotations

from headwater.configuration.complaints import Complaint
from headwater.configuration.kinds import is_loopback
from headwater.configuration.settings import Settings

_TOKENS_OR_ANYBODY = "Set server.tokens to a file of tokens, or server.allow_anonymous = true to let everybody in"


def conflicts_in(settings: Settings) -> list[Complaint]:
    server = settings.server
    found: list[Complaint] = []
    if server.tokens is None and not server.allow_anonymous:
        if settings.profile == "production":
            found.append(_complaint(settings, "profile", "production needs tokens, and none are set"))
        elif not is_loopback(server.host):
            why = f"other machines can reach {server.host}, and no tokens are set"
            found.append(_complaint(settings, "server.host", why))
    if server.tls_key is not None and server.tls_certificate is None:
        next = "Set server.tls_certificate too"
        found.append(_complaint(settings, "server.tls_key", "a key without a certificate", next))
    return found


def _complaint(settings: Settings, path: str, why: str, next: str = _TOKENS_OR_ANYBODY) -> Complaint:
    return Complaint(f"{path} ({settings.source_of(path)})", why, next)
