"""Redis as its transports and consumers share it: connections with limits, errors, reconnect delays, and messages as
stream entries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headwater.errors import InvalidDataError, InvalidOptionError, TransportFailedError
from headwater.formats import split_url
from headwater.message import Message, MessageDocument, from_document, to_document
from headwater.topics import check_topic

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
HEALTH_CHECK_S = 30
CONNECTIONS_MAX = 32
BATCH_MESSAGES_MAX = 500  # per script or pipeline: a script blocks the server for a few milliseconds
BATCH_BYTES_MAX = 4 * 1024 * 1024
SCHEMES = ("redis", "rediss")
CLIENT_OPTIONS = frozenset(
    (
        "db", "username", "password", "client_name", "socket_timeout", "socket_connect_timeout",
        "health_check_interval", "max_connections", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile",
        "ssl_cert_reqs", "ssl_check_hostname",
    )
)  # fmt: skip
"""What may stand in the query of a url for the client itself."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(MessageDocument).decode

Fields = Mapping[bytes, bytes]


def client_url(url: str) -> str:
    """The url as the client takes it, from one whose query has only options of the client. It may hold a password: it
    is for no log, name or error."""
    parts = split_url(url, next="Write redis://user:password@host:6379/0, with %-escapes in passwords")
    scheme = parts.scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise InvalidOptionError(f"{parts.scheme!r} is no scheme of Redis", next=f"Known: {', '.join(SCHEMES)}")
    found = parts._replace(scheme=scheme).geturl()
    try:
        make_client(found)
    except ValueError as exc:
        raise InvalidOptionError(str(exc), where=f"{scheme}://{parts.hostname or ''}") from None
    return found


def make_client(url: str, *, retries: int = 0, connections: int = CONNECTIONS_MAX) -> Any:
    """A client with limits on connections and waits; it connects with its first command. `retries` only for idempotent
    commands: the command may have run, and only its answer been lost. RESP2, which all servers answer in the same
    shape. Not typed: the client's types differ between its versions."""
    pool = redis.BlockingConnectionPool.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        health_check_interval=HEALTH_CHECK_S,
        max_connections=connections,
        timeout=ANSWER_TIMEOUT_S,
        protocol=2,
        retry=Retry(NoBackoff(), retries),
    )
    return redis.Redis(connection_pool=pool)


@contextlib.contextmanager
def translated(name: str, doing: str) -> Iterator[None]:
    """Raises Redis's errors as TransportFailedError."""
    try:
        yield
    except (redis.RedisError, OSError) as exc:
        next_step = next((step for kind, step in _NEXT_STEPS if isinstance(exc, kind)), "See the server's log")
        raise TransportFailedError(f"{doing} failed: {str(exc).rstrip('.')}", where=name, next=next_step) from exc


_NEXT_STEPS: tuple[tuple[type[Exception], str], ...] = (
    (redis.AuthenticationError, "Check the user and the password in the url"),
    (redis.exceptions.NoPermissionError, "Allow this user the command and the keys (ACL SETUSER)"),
    (redis.BusyLoadingError, "It is reading its data from disk; try again later"),
    (redis.exceptions.OutOfMemoryError, "Give it more memory, or let streams be trimmed with maxlen"),
    (redis.ReadOnlyError, "This is a replica; connect to the primary"),
    (redis.TimeoutError, "It did not answer in time; what was given may have arrived"),
    (redis.ConnectionError, "Check that it runs and can be reached"),
)


# --- messages ----------------------------------------------------------------------------------------------------


class StreamEntry(msgspec.Struct, frozen=True):
    """A message in a stream. Other programs find `id`, `topic` and `type` as plain fields; `doc` is the whole message
    as its JSON document. `type` is empty where a message has none: Redis stores the names of equal fields once."""

    id: str
    topic: str
    type: str
    doc: bytes

    @property
    def size(self) -> int:
        return len(self.doc) + len(self.id) + len(self.topic) + len(self.type)


def to_doc(message: Message) -> bytes:
    return _encode(to_document(message))


def from_doc(doc: bytes | None, where: str) -> Message:
    """The message of a field `doc` or of a Pub/Sub payload. Raises InvalidDataError."""
    if doc is None:
        raise InvalidDataError("there is no field 'doc'", where=where)
    try:
        message = from_document(_decode(doc))
        check_topic(message.topic)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise InvalidDataError(f"this is no message ({exc})", where=where) from exc
    return message
