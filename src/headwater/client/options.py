"""What may be said when a log behind a connection is opened."""

from __future__ import annotations

import os
import re
import socket
import ssl
from typing import Any, TypedDict
from urllib.parse import urlsplit

import msgspec

from headwater.client.backoff import Backoff, Strategy
from headwater.errors import HeadwaterError, InvalidOption, Unauthorized, Unreachable
from headwater.message import Span, span_ms
from headwater.protocol.tls import CERTIFICATE_VARIABLE, client_context

TOKEN_VARIABLE = "HEADWATER_TOKEN"
NO_TLS = "it does not speak TLS"
HUNG_UP = "it hung up right after the TLS handshake"
URL_NEXT = "Write ws://host:8765"


class RemoteOptions(TypedDict, total=False):
    """`token`: shown to the server; the environment's HEADWATER_TOKEN if not given. `ca`: a file with the certificates
    to trust for wss://. `certificate`: a file with a certificate and its key, for servers that ask for one; the
    environment's HEADWATER_CERTIFICATE if not given. `timeout`: for an answer. `connect_timeout`: for the first
    connection. `reconnect`, `reconnect_min`, `reconnect_max`, `reconnect_attempts`: what to do when the connection
    breaks. `ping`: how long a silent connection is trusted. `tracing`: spans of OpenTelemetry, as for a log here."""

    token: str | None
    ca: str | os.PathLike[str] | None
    certificate: str | os.PathLike[str] | None
    timeout: Span
    connect_timeout: Span
    reconnect: Strategy
    reconnect_min: Span
    reconnect_max: Span
    reconnect_attempts: int | None
    ping: Span
    tracing: bool


class Settings(msgspec.Struct, frozen=True):
    url: str
    host: str
    port: int
    tls: Any  # an SSLContext, or None
    token: str | None
    timeout_s: float
    connect_timeout_s: float
    ping_s: float
    backoff: Backoff


def read_options(url: str, options: RemoteOptions) -> Settings:
    unknown = options.keys() - RemoteOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown option {sorted(unknown)[0]!r} for a log behind a connection",
            where=_shown(url),
            next=f"Known ones: {', '.join(RemoteOptions.__annotations__)}",
        )
    if "@" in re.split("[/?#]", url.partition("://")[2])[0]:  # before an error may quote it
        raise InvalidOption("a server is named by host and port", where=_shown(url), next=URL_NEXT)
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver does, where it would be too late to say so
    except ValueError as exc:  # UnicodeError is one, too
        raise InvalidOption(f"no host and port can be read from it ({exc})", where=_shown(url), next=URL_NEXT) from exc
    if not parts.hostname or parts.fragment:
        raise InvalidOption("a server is named by host and port", where=_shown(url), next=URL_NEXT)
    token = options.get("token") or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise InvalidOption("the token holds characters that no token has", where=_shown(url))

    def seconds(name: str, default: float) -> float:
        given: Any = options.get(name, default)
        return span_ms(given, name) / 1000

    least, most = seconds("reconnect_min", 0.1), seconds("reconnect_max", 30.0)
    return Settings(
        url=url,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "wss" else 80),
        tls=client_context(options.get("ca"), options.get("certificate")) if parts.scheme == "wss" else None,
        token=token,
        timeout_s=seconds("timeout", 30.0),
        connect_timeout_s=seconds("connect_timeout", 10.0),
        ping_s=max(0.05, seconds("ping", 10.0)),
        backoff=Backoff(options.get("reconnect", "exponential"), least, most, options.get("reconnect_attempts")),
    )


def _shown(url: str) -> str:
    """Without what may be secret, also of a url that cannot be read."""
    scheme, _, rest = re.split("[?#]", url)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def why_not_connected(exc: BaseException) -> str:
    """What goes wrong most often, in words; the rest as the system says it."""
    if isinstance(exc, HeadwaterError):
        return exc.why
    if isinstance(exc, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(exc, socket.gaierror):
        return "there is no such host, as far as this machine knows"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({exc.verify_message})"
    if _speaks_no_tls(exc):
        return NO_TLS
    if isinstance(exc, TimeoutError):
        return str(exc) or "no answer in time"
    return str(exc) if isinstance(exc, OSError) else f"{type(exc).__name__}: {exc}"


def is_hopeless(exc: Exception) -> bool:
    """No waiting mends it."""
    return isinstance(exc, Unauthorized | ssl.SSLCertVerificationError) or _speaks_no_tls(exc)


def _speaks_no_tls(exc: BaseException) -> bool:
    return isinstance(exc, ssl.SSLError) and exc.reason == "WRONG_VERSION_NUMBER"


def unreachable(settings: Settings, why: str) -> Unreachable:
    next = "Is the server running? headwater serve LOG"
    if why == NO_TLS:
        next = f"Write {_shown(settings.url).replace('wss:', 'ws:', 1)}, or give the server a certificate"
    if why == HUNG_UP:
        next = f"If it asks for a certificate: name a PEM file with certificate and key in {CERTIFICATE_VARIABLE}"
    elif "certificate" in why:
        next = "Trust a certificate of your own with ca=FILE (--ca FILE for commands)"
    return Unreachable(why, where=_shown(settings.url), next=next)
