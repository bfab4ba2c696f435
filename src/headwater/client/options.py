"""Options of a connection: urls, tokens, TLS, timeouts, reconnects; and what connection errors mean."""

from __future__ import annotations

import os
import re
import socket
import ssl
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

import msgspec

from headwater.arguments import INT64_MAX, check_choice, check_optional_text, check_whole
from headwater.errors import HeadwaterError, InvalidOptionError, UnauthorizedError, UnreachableError
from headwater.formats import Span, redact_url, span_ms

TOKEN_VARIABLE = "HEADWATER_TOKEN"
CERTIFICATE_VARIABLE = "HEADWATER_CERTIFICATE"
NO_TLS = "it does not speak TLS"
HUNG_UP = "it hung up right after the TLS handshake"
NO_ANSWER = "it closed the connection without an answer"
URL_NEXT = "Write ws://host:8765"
JITTER = 0.25
STRATEGIES = ("exponential", "fixed", "none")
Strategy = Literal["exponential", "fixed", "none"]


class Backoff(msgspec.Struct, frozen=True):
    """`exponential` doubles from `first_s` up to `most_s`, `fixed` stays at `first_s`; both with up to a quarter more
    at random, so that a thousand clients do not reconnect at the same moment. `none` does not reconnect."""

    strategy: Strategy = "exponential"
    first_s: float = 0.1
    most_s: float = 30.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        check_choice("reconnect", self.strategy, STRATEGIES)
        if not 0 < self.first_s <= self.most_s:
            raise InvalidOptionError("reconnect_min must be more than 0 and at most reconnect_max")
        if self.attempts is not None:
            check_whole("reconnect_attempts", self.attempts, 0, INT64_MAX)

    def delay_s(self, attempt: int, roll: float) -> float | None:
        """The wait before attempt 1, 2, …; None to stop. `roll` is a random number from 0 to 1."""
        if self.strategy == "none" or (self.attempts is not None and attempt > self.attempts):
            return None
        doubled = self.first_s * 2 ** min(attempt - 1, 62) if self.strategy == "exponential" else self.first_s
        return min(self.most_s, min(self.most_s, doubled) * (1 + JITTER * roll))


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


class ConnectionSettings(msgspec.Struct, frozen=True):
    url: str
    host: str
    port: int
    tls: Any  # an SSLContext, or None
    token: str | None
    timeout_s: float
    connect_timeout_s: float
    ping_s: float
    backoff: Backoff


def read_options(url: str, options: RemoteOptions) -> ConnectionSettings:
    where = redact_url(url.partition("#")[0], user=False)
    unknown = options.keys() - RemoteOptions.__annotations__.keys()
    if unknown:
        raise InvalidOptionError(
            f"unknown option {sorted(unknown)[0]!r} for a log behind a connection",
            where=where,
            next=f"Known ones: {', '.join(RemoteOptions.__annotations__)}",
        )
    if "@" in re.split("[/?#]", url.partition("://")[2])[0]:  # before an error may quote it
        raise InvalidOptionError("a server is named by host and port", where=where, next=URL_NEXT)
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver does, where it would be too late to say so
    except ValueError as exc:  # UnicodeError is one, too
        raise InvalidOptionError(f"no host and port can be read from it ({exc})", where=where, next=URL_NEXT) from exc
    if not parts.hostname or parts.fragment:
        raise InvalidOptionError("a server is named by host and port", where=where, next=URL_NEXT)
    token = check_optional_text("token", options.get("token")) or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise InvalidOptionError("the token holds characters that no token has", where=where)

    def seconds(name: str, default: float) -> float:
        given: Any = options.get(name, default)
        return span_ms(given, name) / 1000

    least, most = seconds("reconnect_min", 0.1), seconds("reconnect_max", 30.0)
    return ConnectionSettings(
        url=url,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "wss" else 80),
        tls=tls_context(options.get("ca"), options.get("certificate")) if parts.scheme == "wss" else None,
        token=token,
        timeout_s=seconds("timeout", 30.0),
        connect_timeout_s=seconds("connect_timeout", 10.0),
        ping_s=max(0.05, seconds("ping", 10.0)),
        backoff=Backoff(options.get("reconnect", "exponential"), least, most, options.get("reconnect_attempts")),
    )


def tls_context(ca: str | os.PathLike[str] | None, certificate: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """The TLS settings of a client. `ca`: a PEM file, instead of what the system trusts. `certificate`: a PEM file with
    certificate and key; the environment's HEADWATER_CERTIFICATE if not given."""
    certificate = certificate or os.environ.get(CERTIFICATE_VARIABLE) or None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except (OSError, ssl.SSLError) as exc:
        raise InvalidOptionError(f"the certificates cannot be read ({exc})", where=str(ca)) from exc
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, password="")
        except (OSError, ssl.SSLError) as exc:
            raise InvalidOptionError(
                f"the certificate or its key cannot be used ({exc})",
                where=os.fspath(certificate),
                next="Name a PEM file that holds both",
            ) from exc
    return context


def why_not_connected(exc: BaseException) -> str:
    """The usual errors in plain words; the others as the system has them."""
    if isinstance(exc, HeadwaterError):
        return exc.why
    if isinstance(exc, ConnectionRefusedError):
        return "connection refused"
    if isinstance(exc, socket.gaierror):
        return "the host is unknown"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({exc.verify_message})"
    if _speaks_no_tls(exc):
        return NO_TLS
    if isinstance(exc, TimeoutError):
        return str(exc) or "no answer in time"
    return str(exc) if isinstance(exc, OSError) else f"{type(exc).__name__}: {exc}"


def is_permanent(exc: Exception) -> bool:
    """Permanent errors are not retried."""
    return isinstance(exc, UnauthorizedError | ssl.SSLCertVerificationError) or _speaks_no_tls(exc)


def _speaks_no_tls(exc: BaseException) -> bool:
    return isinstance(exc, ssl.SSLError) and exc.reason == "WRONG_VERSION_NUMBER"


def unreachable(settings: ConnectionSettings, why: str) -> UnreachableError:
    where, next = redact_url(settings.url, user=False), "Is the server running? headwater serve LOG"
    if why == NO_TLS:
        next = f"Write {where.replace('wss:', 'ws:', 1)}, or give the server a certificate"
    elif why == NO_ANSWER:
        next = f"If it has a certificate, write {where.replace('ws:', 'wss:', 1)}"
    elif why == HUNG_UP:
        next = f"If it asks for a certificate: name a PEM file with certificate and key in {CERTIFICATE_VARIABLE}"
    elif "certificate" in why:
        next = "Trust a certificate of your own with ca=FILE (--ca FILE for commands)"
    return UnreachableError(why, where=where, next=next)
