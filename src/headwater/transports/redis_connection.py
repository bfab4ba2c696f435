"""What all that talks to Redis shares: reading its url, connections with limits, its errors in our words, and when to
try again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headwater.errors import InvalidOption, TransportFailed

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
HEALTH_CHECK_S = 30
CONNECTIONS_MAX = 32
RECONNECT_FIRST_S = 0.1
RECONNECT_MOST_S = 5.0
JITTER = 0.25
SCHEMES = ("redis", "rediss", "unix")

# What may stand in the query of a url for the client itself; the rest are options of ours, or mistakes.
_OF_THE_CLIENT = frozenset(
    (
        "db", "username", "password", "client_name", "socket_timeout", "socket_connect_timeout",
        "health_check_interval", "max_connections", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile",
        "ssl_cert_reqs", "ssl_check_hostname",
    )
)  # fmt: skip


class RedisAddress(msgspec.Struct, frozen=True):
    """Where a Redis is. `url` may hold a password and is for the client alone; `name` is for people."""

    url: str
    name: str

    def connect(self, *, retries: int = 0, connections: int = CONNECTIONS_MAX) -> Any:
        """A client with limits on connections and waits. `retries` only where asking twice does not do it twice: the
        answer to what was done may be what got lost. The protocol is the older one, whose answers all servers give in
        the same shape. Not typed: the client's types follow its versions, not what is asked here."""
        settings: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": ANSWER_TIMEOUT_S,
            "health_check_interval": HEALTH_CHECK_S,
            "max_connections": connections,
            "timeout": ANSWER_TIMEOUT_S,
            "protocol": 2,
            "retry": Retry(NoBackoff(), retries),
        }
        return redis.Redis(connection_pool=redis.BlockingConnectionPool.from_url(self.url, **settings))


def read_url(url: str, options: Mapping[str, Any], known: Mapping[str, str]) -> tuple[RedisAddress, dict[str, Any]]:
    """The address, and the options of the url's query and of `options`, which win. `known`: their names, each with a
    line for the error that refuses others."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
        if parts.fragment or "@" in parts.path + parts.query:
            raise ValueError("the host does not begin where it seems to")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        # Its text may quote a part of the password, when that holds a character that had to be escaped.
        raise InvalidOption(
            "this Redis url cannot be read", next="Write redis://user:password@host:6379/0, with %-escapes in passwords"
        ) from None
    scheme = parts.scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise InvalidOption(f"{parts.scheme!r} is no scheme of Redis", next=f"Known: {', '.join(SCHEMES)}")
    ours = {name: query.pop(name) for name in list(query) if name in known} | dict(options)
    unknown = next((name for name in (*query, *ours) if name not in known and name not in _OF_THE_CLIENT), None)
    if unknown is not None:
        told = "; ".join(f"{name}: {line}" for name, line in known.items())
        raise InvalidOption(f"Redis has no option {unknown!r}", next=f"Known: {told}")
    query |= {name: str(ours.pop(name)) for name in list(ours) if name not in known}
    address = RedisAddress(
        url=parts._replace(scheme=scheme, query=urlencode(query)).geturl(),
        name=_name_of(parts, host, port, query, ours),
    )
    try:
        address.connect()
    except ValueError as exc:
        raise InvalidOption(str(exc), where=address.name) from None
    return address, ours


def _name_of(
    parts: SplitResult, host: str | None, port: int | None, query: Mapping[str, str], ours: Mapping[str, Any]
) -> str:
    """The url again, but never with a password in it."""
    user = f"{parts.username}@" if parts.username else ""
    shown_host = f"[{host}]" if host and ":" in host else (host or "")
    netloc = f"{user}{shown_host}" + (f":{port}" if port else "")
    told = {"db": query["db"]} if "db" in query else {}
    told |= {name: str(value) for name, value in ours.items()}
    return parts._replace(netloc=netloc, query=urlencode(told, safe=":{}"), fragment="").geturl()


@contextlib.contextmanager
def translated(name: str, doing: str) -> Iterator[None]:
    """Redis's errors as TransportFailed, with themselves as the cause."""
    try:
        yield
    except (redis.RedisError, OSError) as exc:
        raise TransportFailed(f"{doing} failed: {str(exc).rstrip('.')}", where=name, next=_next_step(exc)) from exc


def _next_step(exc: Exception) -> str:
    for kind, step in _NEXT_STEPS:
        if isinstance(exc, kind):
            return step
    return "See what its log says"


_NEXT_STEPS: tuple[tuple[type[Exception], str], ...] = (
    (redis.AuthenticationError, "Check the user and the password in the url"),
    (redis.exceptions.NoPermissionError, "Allow this user the command and the keys (ACL SETUSER)"),
    (redis.BusyLoadingError, "It is reading its data from disk; try again later"),
    (redis.exceptions.OutOfMemoryError, "Give it more memory, or let streams be trimmed with maxlen"),
    (redis.ReadOnlyError, "This is a replica; connect to the primary"),
    (redis.TimeoutError, "It did not answer in time; what was given may have arrived"),
    (redis.ConnectionError, "Check that it runs and can be reached"),
)


def reconnect_delay_s(attempt: int, roll: float) -> float:
    """How long to wait before attempt 1, 2, …: twice as long each time, with up to a quarter more by chance (`roll`,
    from 0 to 1), so that many readers do not come back at the same moment."""
    doubled: float = min(RECONNECT_MOST_S, RECONNECT_FIRST_S * 2 ** min(attempt - 1, 16))
    return min(RECONNECT_MOST_S, doubled * (1 + JITTER * roll))


def flag(name: str, value: object) -> bool:
    """An option that is on or off, also as a url writes it."""
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise InvalidOption(f"{name} is 1 or 0, not {value!r}")


def whole(name: str, value: object, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        raise InvalidOption(f"{name} is a whole number, not {value!r}") from None
    if number < least:
        raise InvalidOption(f"{name} is at least {least}, not {number}")
    return number


def seconds_ms(name: str, value: object, least_ms: int) -> int:
    """Milliseconds of an option in seconds, or of a timedelta."""
    try:
        seconds = value.total_seconds() if isinstance(value, timedelta) else float(str(value))
    except ValueError:
        seconds = math.nan
    ms = round(seconds * 1000) if math.isfinite(seconds) else -1
    if not least_ms <= ms <= SPAN_MS_MAX:
        raise InvalidOption(f"{name} is a number of seconds, at least {least_ms / 1000:g}, not {value!r}")
    return ms


SPAN_MS_MAX = 10 * 366 * 24 * 3600 * 1000  # ten years: longer than any Redis is asked to remember something
