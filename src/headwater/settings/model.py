"""The settings with their types and defaults, and the source of each value."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from headwater.arguments import INT64_MAX
from headwater.delivery import retention
from headwater.errors import InvalidOptionError
from headwater.formats import DURATION_HELP, format_duration, mask_url, parse_duration, parse_size, span_ms
from headwater.topics import Dialect, parse_pattern
from headwater.topics.topic import quoted

COUNT_MAX = 1_000_000_000
BUFFER_BYTES_MIN = 4 * 1024  # less would not hold the refusal of a call
BUFFER_BYTES_MAX = 1024**3
PORT_MAX = 65_535
TEXT_CHARS_MAX = 4_096
ORIGINS_MAX = 1_000
TOPIC_RULES_MAX = 1_000
TRANSPORTS_MAX = 100
MESSAGE_TYPES_MAX = 10_000
NAMES_MAX = 32

DEFAULT = "default"
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_TRANSPORT_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


# --- types ------------------------------------------------------------------------------------------------------------


def _read_duration(value: object) -> object:
    """Seconds of text with units, of a number of seconds or of a timedelta."""
    if isinstance(value, str):
        value = parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidOptionError(f"must be a duration, not {quoted(value)}", next=f"Write it {DURATION_HELP}")
    return span_ms(value, "a duration") / 1000


def _check_longer_than_nothing(seconds: float) -> float:
    if not seconds:
        raise InvalidOptionError("must be longer than 0", next=f"Write it {DURATION_HELP}")
    return seconds


def _read_size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _read_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _none_if_empty(value: object) -> object:
    # TOML has no null, and a profile or a variable must be able to take back what the file says.
    return None if value == "" else value


def _check_host(host: str) -> str:
    if _address(host) is None and not _HOST_NAME.fullmatch(host):
        raise InvalidOptionError(
            f"must be a name or an address, not {quoted(host)}",
            next="Write it like localhost, 127.0.0.1 or ::1; the port stands in server.port",
        )
    return host


def _check_origin(origin: str) -> str:
    if origin not in ("*", "same") and not _ORIGIN.fullmatch(origin):
        raise InvalidOptionError(
            f"must be an origin as browsers send it, not {quoted(origin)}",
            next='Write it like "https://shop.example" (lower case, no path), or "*" for any',
        )
    return origin


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Of names only `localhost` is sure to be one."""
    address = _address(host)
    return host.lower().rstrip(".") == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


Text = Annotated[str, Field(min_length=1, max_length=TEXT_CHARS_MAX)]
OptionalText = Annotated[
    Annotated[str, Field(max_length=TEXT_CHARS_MAX)] | None,
    BeforeValidator(_none_if_empty),
]
OptionalBool = Annotated[bool | None, BeforeValidator(_none_if_empty)]
Host = Annotated[Text, AfterValidator(_check_host)]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_check_origin)], ...],
    BeforeValidator(_read_list),
    Field(max_length=ORIGINS_MAX),
]

Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX)]
BufferBytes = Annotated[int, BeforeValidator(_read_size), Field(ge=BUFFER_BYTES_MIN, le=BUFFER_BYTES_MAX)]
StoredCount = Annotated[int, Field(ge=0, le=INT64_MAX)]
StoredBytes = Annotated[int, BeforeValidator(_read_size), Field(ge=0, le=INT64_MAX)]

Duration = Annotated[float, BeforeValidator(_read_duration)]
"""Seconds, to the millisecond; may be 0."""
Timeout = Annotated[Duration, AfterValidator(_check_longer_than_nothing)]
"""Seconds, more than 0."""
OptionalTimeout = Annotated[Timeout | None, BeforeValidator(_none_if_empty)]


# --- tables -----------------------------------------------------------------------------------------------------------

Profile = Literal["development", "test", "production"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
Displayed: TypeAlias = str | int | bool | list[str] | None


class SettingsTable(BaseModel):
    """Strict: TOML has types, and text from elsewhere is converted before it is validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ServerSettings(SettingsTable):
    log: Text = Field(default="events.db", repr=False)  # there may be a password in it
    host: Host = "127.0.0.1"
    port: Port = 8765
    allow_anonymous: bool = False
    tokens: OptionalText = None
    origins: Origins = ()
    tls_certificate: OptionalText = None
    tls_key: OptionalText = None
    tls_client_ca: OptionalText = None
    shutdown_timeout: Duration = 10.0
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_need_token: OptionalBool = None
    console: bool = True
    tracing: bool = False
    audit: OptionalText = None
    lake: OptionalText = None


class Limits(SettingsTable):
    frame_bytes: BufferBytes = 4 * 1024**2
    batch_calls: Count = 1_000
    connections: Count = 10_000
    connections_per_address: CountOrZero = 0
    requests_in_flight: Count = 1_000
    requests_per_second: CountOrZero = 0
    burst: Count = 1_000
    subscriptions_per_connection: Count = 1_000
    outbound_bytes: BufferBytes = 4 * 1024**2
    request_timeout: Timeout = 30.0
    fetch_wait: Duration = 60.0
    authenticate_timeout: Timeout = 10.0
    ping_interval: Timeout = 20.0
    ping_timeout: Timeout = 20.0
    http_head_bytes: BufferBytes = 16 * 1024
    subscriptions_per_token: Count = 1_000
    method_threads: Count = 16
    unauthenticated: Count = 1_000
    unauthenticated_per_address: CountOrZero = 0
    unauthenticated_bytes: BufferBytes = 64 * 1024
    inbound_bytes: BufferBytes = 8 * 1024**2
    inbound_total_bytes: BufferBytes = 64 * 1024**2
    outbound_total_bytes: BufferBytes = 64 * 1024**2
    connections_per_token: Count = 1_000


class LogSettings(SettingsTable):
    durability: Literal["full", "relaxed"] = "full"
    dedupe: Duration = 24 * 3600.0
    dedupe_count: StoredCount = 1_000_000
    retention_interval: Timeout = 60.0
    subscription_timeout: OptionalTimeout = None


class ReplicaSettings(SettingsTable):
    """SQLite databases that clients push to this server."""

    directory: OptionalText = None
    keep_last: Count = 100
    keep_age: OptionalTimeout = None
    max_bytes: StoredBytes = 10 * 1024**3
    max_replicas: Count = 1_000
    pushes: Count = 8
    idle_timeout: Timeout = 60.0


class CliSettings(SettingsTable):
    """Defaults of commands that are given no LOG or no --lake."""

    log: OptionalText = Field(default=None, repr=False)  # there may be a password in it
    lake: OptionalText = None


class TopicSettings(SettingsTable):
    """Retention limits for the topics that match a pattern. None is no limit, 0 keeps nothing."""

    pattern: Text
    max_age: Duration | None = None
    max_count: StoredCount | None = None
    max_bytes: StoredBytes | None = None
    keep_unacked: bool = False
    dialect: Dialect = "nats"

    @property
    def limits(self) -> retention.Limits:
        return retention.make_limits(
            max_age=self.max_age, max_count=self.max_count, max_bytes=self.max_bytes, keep_unacked=self.keep_unacked
        )

    @model_validator(mode="after")
    def _check(self) -> TopicSettings:
        parse_pattern(self.pattern, self.dialect)
        _ = self.limits  # invalid ones raise here, and not when the server starts
        return self


def _check_each_pattern_once(topics: tuple[TopicSettings, ...]) -> tuple[TopicSettings, ...]:
    seen: set[tuple[str, str]] = set()
    for topic in topics:
        if (topic.pattern, topic.dialect) in seen:
            raise InvalidOptionError(f"there are two policies of {topic.pattern!r}", next="Keep one of them")
        seen.add((topic.pattern, topic.dialect))
    return topics


Topics = Annotated[
    tuple[TopicSettings, ...],
    BeforeValidator(_read_list),
    AfterValidator(_check_each_pattern_once),
    Field(max_length=TOPIC_RULES_MAX),
]


class TransportSettings(SettingsTable):
    """A target for copies. Only the table of a profile may lack the `url`, to change other settings of a transport."""

    url: OptionalText = Field(default=None, repr=False)  # there may be a password in it
    batch_size: Count = 1
    batch_wait: Timeout = 5.0
    breaker_failures: CountOrZero = 5
    breaker_window: Timeout = 120.0
    breaker_reset: Timeout = 30.0


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise InvalidOptionError("a name is in it twice", next="Keep one of them")
    return names


class MessageSettings(SettingsTable):
    """Settings of a message type, which override those of its class."""

    transports: Annotated[
        tuple[str, ...], BeforeValidator(_read_list), AfterValidator(_check_names), Field(max_length=NAMES_MAX)
    ] = ()


def _check_transport_names(tables: dict[str, Any]) -> dict[str, Any]:
    for name in tables:
        if not _TRANSPORT_NAME.fullmatch(name):
            raise InvalidOptionError(
                f"{quoted(name)} cannot name a transport",
                next="Use lower-case letters, digits and _, beginning with a letter",
            )
    return tables


Transports = Annotated[
    dict[str, TransportSettings], AfterValidator(_check_transport_names), Field(max_length=TRANSPORTS_MAX)
]
Messages = Annotated[dict[str, MessageSettings], Field(max_length=MESSAGE_TYPES_MAX)]


class Tables(SettingsTable):
    """What every source may say, whole or in part. Each key has a default, so that a part can be checked alone."""

    server: ServerSettings = ServerSettings()
    limits: Limits = Limits()
    log: LogSettings = LogSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    cli: CliSettings = CliSettings()
    topics: Topics = ()
    transports: Transports = Field(default_factory=dict)
    messages: Messages = Field(default_factory=dict)


SECTIONS: Mapping[str, type[SettingsTable]] = {
    "server": ServerSettings,
    "limits": Limits,
    "log": LogSettings,
    "replicas": ReplicaSettings,
    "cli": CliSettings,
}
NAMED_TABLES: Mapping[str, type[SettingsTable]] = {"transports": TransportSettings, "messages": MessageSettings}
"""Sections with a table for each name, like [transports.archive], which is in the path: `transports.archive.url`."""


class Profiles(SettingsTable):
    development: Tables = Tables()
    test: Tables = Tables()
    production: Tables = Tables()


class ConfigurationFile(Tables):
    profile: Profile | None = None
    profiles: Profiles = Profiles()


class Value(NamedTuple):
    """A validated value and its source."""

    value: object
    source: str


class Explained(NamedTuple):
    """A value as the file would write it (None: not set), without passwords."""

    key: str
    value: Displayed
    source: str


class Settings(Tables):
    """The effective settings; `load_settings` makes them."""

    profile: Profile = "development"

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(default=None)

    @classmethod
    def from_values(cls, values: Mapping[str, Value], file: str | None) -> Settings:
        """Settings from the winning value of each path: `profile`, `server.port`, …, `topics`."""
        tables: dict[str, object] = {key: values[key].value for key in ("profile", "topics") if key in values}
        for section, table in SECTIONS.items():
            given = {key: values.get(f"{section}.{key}") for key in table.model_fields}
            tables[section] = table(**{key: each.value for key, each in given.items() if each is not None})
        for section, table in NAMED_TABLES.items():
            tables[section] = _named_tables(section, table, values)
        settings = cls.model_validate(tables)
        settings._sources.update({path: each.source for path, each in values.items()})
        settings._file = file
        return settings

    @property
    def file(self) -> str | None:
        """The configuration file that was read, as it was named."""
        return self._file

    def source_of(self, path: str) -> str:
        return self._sources.get(path, DEFAULT)

    def explain(self) -> list[Explained]:
        """Every value with its key path and its source, in the order of the documentation."""
        return list(self._explained())

    def _explained(self) -> Iterator[Explained]:
        yield Explained("profile", self.profile, self.source_of("profile"))
        for section in SECTIONS:
            yield from self._explained_table(section, getattr(self, section))
        for number, topic in enumerate(self.topics):
            for key in TopicSettings.model_fields:
                source = self.source_of("topics") if key in topic.model_fields_set else DEFAULT
                yield Explained(f"topics[{number}].{key}", display_value(getattr(topic, key)), source)
        for section in NAMED_TABLES:
            for name, table in getattr(self, section).items():
                yield from self._explained_table(f"{section}.{name}", table)

    def _explained_table(self, path: str, table: SettingsTable) -> Iterator[Explained]:
        for key in type(table).model_fields:
            yield Explained(f"{path}.{key}", display_value(getattr(table, key)), self.source_of(f"{path}.{key}"))


def _named_tables(section: str, model: type[SettingsTable], values: Mapping[str, Value]) -> dict[str, SettingsTable]:
    """Names may hold dots, keys do not. A path without a key is that of an empty table."""
    tables: dict[str, dict[str, object]] = {}
    for path, each in values.items():
        if path.startswith(f"{section}."):
            name, _, key = path.removeprefix(f"{section}.").rpartition(".")
            table = tables.setdefault(name, {})
            if key:
                table[key] = each.value
    return {name: model(**given) for name, given in tables.items()}


def values_in(tables: Tables, source: str) -> dict[str, Value]:
    """The values that a source sets, by path; not the defaults that fill its tables."""
    values: dict[str, Value] = {}
    for section in SECTIONS:
        table = getattr(tables, section)
        values |= {f"{section}.{key}": Value(getattr(table, key), source) for key in table.model_fields_set}
    if "topics" in tables.model_fields_set:
        values["topics"] = Value(tables.topics, source)
    for section in NAMED_TABLES:
        for name, table in getattr(tables, section).items():
            values[f"{section}.{name}."] = Value(None, source)
            values |= {f"{section}.{name}.{key}": Value(getattr(table, key), source) for key in table.model_fields_set}
    return values


def display_value(value: object) -> Displayed:
    """The value as the file would write it, without passwords."""
    if isinstance(value, float):  # only durations are
        return format_duration(round(value * 1000))
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if isinstance(value, str):
        return mask_url(value)
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"no setting is a {type(value).__name__}")


def as_toml(value: Displayed) -> str:
    """A displayed value on one line; "-" is none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
