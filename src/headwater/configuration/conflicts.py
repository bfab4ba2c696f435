"""Settings that are fine one by one and cannot be used together. Pure."""

from __future__ import annotations

from headwater.configuration.complaints import Complaint
from headwater.configuration.kinds import is_loopback
from headwater.configuration.settings import Settings
from headwater.topics.topic import quoted

_TOKENS_OR_ANYBODY = "Set server.tokens to a file of tokens, or server.allow_anonymous = true to let everybody in"


def conflicts_in(settings: Settings, *, serves: bool) -> list[Complaint]:
    return (_about_the_server(settings) if serves else []) + _about_transports(settings)


def _about_the_server(settings: Settings) -> list[Complaint]:
    server = settings.server
    found: list[Complaint] = []
    if server.tokens is None and not server.allow_anonymous:
        if settings.profile == "production":
            found.append(_complaint(settings, "profile", "production needs tokens, and none are set"))
        elif not is_loopback(server.host):
            why = f"other machines can reach {server.host}, and no tokens are set"
            found.append(_complaint(settings, "server.host", why))
    if server.tls_certificate is None:
        alone = {
            "server.tls_key": "a key without a certificate",
            "server.tls_client_ca": "clients show certificates over TLS only, and the server has none",
        }
        for path, why in alone.items():
            if getattr(server, path.removeprefix("server.")) is not None:
                found.append(_complaint(settings, path, why, "Set server.tls_certificate too"))
    return found


def _about_transports(settings: Settings) -> list[Complaint]:
    found = [
        _complaint(settings, f"transports.{name}.url", "it is missing", 'Write it like url = "redis://localhost/0"')
        for name, transport in settings.transports.items()
        if transport.url is None
    ]
    known = ", ".join(settings.transports) or "none"
    for type_, message in settings.messages.items():
        for name in message.transports:
            if name not in settings.transports:
                next = f"Write a [transports.{name}] table; there is {known}"
                path = f"messages.{type_}.transports"
                found.append(_complaint(settings, path, f"there is no transport {quoted(name)}", next))
    return found


def _complaint(settings: Settings, path: str, why: str, next: str = _TOKENS_OR_ANYBODY) -> Complaint:
    return Complaint(f"{path} ({settings.source_of(path)})", why, next)
