"""Names of replicas and versions, and the places between which a sync copies: files and urls. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

import msgspec

from headwater.errors import InvalidOptionError, InvalidTopicError, UnknownReplicaError
from headwater.replication.protocol import PREFIX, SessionKind
from headwater.topics import check_topic

NAMESPACE_CHARS_MAX = 64
NAME_CHARS_MAX = 128
VERSION_DIGITS_MAX = 9
RANGES_SHOWN_MAX = 20  # of kept versions, in an error

_NAMESPACE = re.compile(rf"[A-Za-z0-9_-]{{1,{NAMESPACE_CHARS_MAX}}}")
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{NAME_CHARS_MAX - 1}}}")
_NUMBER = rf"[1-9][0-9]{{0,{VERSION_DIGITS_MAX - 1}}}"
_VERSION = re.compile(rf"@?(?:v?(?P<number>{_NUMBER})|latest(?:-(?P<back>{_NUMBER}))?)")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_HOST = re.compile(r"([A-Za-z0-9.-]{2,})(:[0-9]{1,5}(?=/)|:(?=/))/")  # host:8765/ns/name, or host:/path as rsync has it
# A url with too few slashes, or without its colon.
_SLIP = re.compile(r"(?P<scheme>wss?|https?)(?::/?|//)(?P<rest>[^/].*)", re.IGNORECASE | re.DOTALL)
_PORTS = {"ws": 80, "wss": 443}
_MEANT = {"http": "ws", "https": "wss"}
_HOW_REMOTE = "Write it as ws://host:port/namespace/name; append @3, @latest or @latest-2 for a version"


class ReplicaName(msgspec.Struct, frozen=True, order=True):
    """`namespace/name`. Nothing in it can be read as a path, a topic with empty tokens, or a version."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise InvalidOptionError(
                f"{self.namespace[:80]!r} is no namespace of replicas",
                next=f"Use 1 to {NAMESPACE_CHARS_MAX} letters, digits, - or _",
            )
        if not _NAME.fullmatch(self.name) or ".." in self.name or self.name.endswith("."):
            raise InvalidOptionError(
                f"{self.name[:160]!r} is no name of a replica",
                next=f"Use 1 to {NAME_CHARS_MAX} letters, digits, -, _ or single dots; no dot first or last",
            )
        try:
            check_topic(self.topic)
        except InvalidTopicError as exc:
            raise InvalidOptionError(f"{self.name!r} makes no topic: {exc.why}", next="Use fewer dots") from None

    @classmethod
    def parse(cls, text: str) -> ReplicaName:
        namespace, slash, name = text.partition("/")
        if not slash or "/" in name:
            raise InvalidOptionError(f"{text[:200]!r} is no name of a replica", next="Write it as namespace/name")
        return cls(namespace, name)

    @property
    def topic(self) -> str:
        """The topic of the messages about its versions."""
        return f"replica.{self.namespace}.{self.name}"

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.name}"

    def __str__(self) -> str:
        return self.path

    __repr__ = __str__


class VersionName(msgspec.Struct, frozen=True):
    """A version by its number, or by its distance from the newest."""

    number: int | None = None
    back: int = 0

    @classmethod
    def parse(cls, text: str) -> VersionName:
        """`@3`, `@v3`, `@latest` or `@latest-2`; the @ may be left out."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise InvalidOptionError(
                f"{text[:40]!r} names no version", next="Write @3 or @v3 (from 1 on), @latest or @latest-2"
            )
        number, back = found["number"], found["back"]
        return cls(int(number) if number else None, int(back or 0))

    def number_from(self, newest: int) -> int:
        """The number of the version, which need not exist."""
        return newest - self.back if self.number is None else self.number

    def pick(self, newest: int, kept: Collection[int]) -> int:
        """The number of the version if it is kept, otherwise UnknownReplicaError; `newest` is 0 while there is none."""
        number = self.number_from(newest)
        if number in kept:
            return number
        if newest == 0:
            raise UnknownReplicaError("there is no version yet", where=str(self), next="Push one first")
        why = "there is no such version" if number < 1 or number > newest else f"version {number} is not kept any more"
        raise UnknownReplicaError(why, where=str(self), next=f"Kept are {_ranges(kept)}; the newest is {newest}")

    def __str__(self) -> str:
        if self.number is not None:
            return f"@{self.number}"
        return f"@latest-{self.back}" if self.back else "@latest"

    __repr__ = __str__


class Remote(msgspec.Struct, frozen=True):
    """A replica on a server, and a version of it if one was named."""

    url_base: str
    name: ReplicaName
    version: VersionName | None = None

    @property
    def key(self) -> str:
        """The url without the version, by which a client keeps its state. It holds no secrets."""
        return f"{self.url_base}/{self.name.path}"

    def endpoint(self, session: SessionKind) -> str:
        """The url of a session. Only a pull names its version there; a push sends its base in the session."""
        version = str(self.version) if session == "pull" and self.version is not None else ""
        return f"{self.url_base}{PREFIX}{session}/{self.name.path}{version}"

    def __str__(self) -> str:
        return f"{self.key}{self.version or ''}"


Place = str | Remote
"""The path of a database file of this machine, or a replica."""


def place_of(text: str) -> Place:
    """A text that begins like a url names a replica; all others are paths."""
    found = _URL.match(text)
    if found is None:
        if not text or "\0" in text:
            raise InvalidOptionError("a path cannot be empty or hold a zero byte", next="Name a database file")
        if slip := _SLIP.fullmatch(text):
            lacks = "slash" if ":" in text[: slip.start("rest")] else "colon"
            raise InvalidOptionError(
                f"this looks like a url that lacks a {lacks}", next=_meant(slip["scheme"], slip["rest"])
            )
        if host := _HOST.match(text):
            server = host[1] + (host[2] if host[2] != ":" else ":8765")
            path = text[host.end() :].lstrip("/")
            raise InvalidOptionError(
                "this looks like a file on another machine",
                where=text,
                next=f"Did you mean ws://{server}/{path}? If it is a file here, write ./{text}",
            )
        return text
    scheme = found["scheme"].lower()
    if scheme not in _PORTS:
        next = _meant(scheme, text[found.end() :]) if scheme in _MEANT else _HOW_REMOTE
        raise InvalidOptionError(f"a replica is not reached by {scheme}://", next=next)
    return _remote(scheme, text)


def _meant(scheme: str, rest: str) -> str:
    """A correction, unless the text may hold a secret."""
    host, _, _ = rest.partition("/")
    if "@" in host or "?" in rest:
        return _HOW_REMOTE
    scheme = _MEANT.get(scheme.lower(), scheme.lower())
    return f"Did you mean {scheme}://{rest}? If it is a file here, write ./ before it"


def split_version(text: str) -> tuple[str, VersionName | None]:
    """Split `ns/name@3`; the version is None without an @."""
    path, at, version = text.partition("@")
    return path, VersionName.parse(f"@{version}") if at else None


def _remote(scheme: str, text: str) -> Remote:
    """Errors do not repeat the parts of a url that could be a secret."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidOptionError("this url has no readable host and port", next=_HOW_REMOTE) from None
    if "@" in parts.netloc:
        raise InvalidOptionError(
            "keys and passwords do not belong in a url", next="Give the key by --push-key or --pull-key"
        )
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise InvalidOptionError("the url of a replica ends with its name: no ? and no #", next=_HOW_REMOTE)
    if not host or any(character.isspace() for character in parts.netloc):
        raise InvalidOptionError("this url has no readable host", next=_HOW_REMOTE)
    path, version = split_version(parts.path)
    segments = path.removeprefix("/").split("/")
    if len(segments) != 2 or not all(segments):
        why = f"{path[:200]!r} is not namespace/name" if path.strip("/") else "this names a server and no replica"
        raise InvalidOptionError(why, where=f"{scheme}://{parts.netloc}", next=_HOW_REMOTE)
    shown_host = f"[{host}]" if ":" in host else host
    shown_port = "" if port in (None, _PORTS[scheme]) else f":{port}"
    return Remote(f"{scheme}://{shown_host}{shown_port}", ReplicaName(*segments), version)


def _ranges(numbers: Iterable[int]) -> str:
    """`1, 4-9`; only the newest ranges if there are very many."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[-RANGES_SHOWN_MAX:]]
    return ", ".join(["…"] * (len(ranges) > RANGES_SHOWN_MAX) + shown) or "none"
