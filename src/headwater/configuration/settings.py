"""The settings, their defaults and where each value came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from headwater.configuration.durations import say_duration
from headwater.configuration.frozen import Frozen
from headwater.configuration.kinds import (
    BufferBytes,
    Count,
    CountOrZero,
    Duration,
    Host,
    OptionalBool,
    OptionalText,
    OptionalTimeout,
    Origins,
    Port,
    StoredBytes,
    StoredCount,
    Text,
    Timeout,
    read_list,
)
from headwater.configuration.transports import Messages, MessageSettings, Transports, TransportSettings
from headwater.errors import InvalidOption
from headwater.topics import Dialect, parse_pattern

TOPIC_RULES_MAX = 1_000
DEFAULT = "default"

Profile = Literal["development", "test", "production"]
Shown: TypeAlias = str | int | bool | list[str] | None


class ServerSettings(Frozen):
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


class Limits(Frozen):
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


class LogSettings(Frozen):
    durability: Literal["full", "relaxed"] = "full"
    dedupe: Duration = 24 * 3600.0
    dedupe_count: StoredCount = 1_000_000
    retention_interval: Timeout = 60.0
    subscription_timeout: OptionalTimeout = None


class ReplicaSettings(Frozen):
    """SQLite databases that clients push to this server."""

    directory: OptionalText = None
    keep_last: Count = 100
    keep_age: OptionalTimeout = None
    max_bytes: StoredBytes = 10 * 1024**3
    max_replicas: Count = 1_000
    pushes: Count = 8
    idle_timeout: Timeout = 60.0


class TopicSettings(Frozen):
    """How much history of the topics under a pattern stays; None is unlimited, 0 keeps nothing."""

    pattern: Text
    max_age: Duration | None = None
    max_count: StoredCount | None = None
    max_bytes: StoredBytes | None = None
    keep_unacked: bool = False
    dialect: Dialect = "nats"

    @model_validator(mode="after")
    def _check(self) -> TopicSettings:
        parse_pattern(self.pattern, self.dialect)
        if self.max_age is None and self.max_count is None and self.max_bytes is None:
            raise InvalidOption("retention without a limit", next="Set max_age, max_count or max_bytes")
        return self


def _check_each_pattern_once(topics: tuple[TopicSettings, ...]) -> tuple[TopicSettings, ...]:
    seen: set[tuple[str, str]] = set()
    for topic in topics:
        if (topic.pattern, topic.dialect) in seen:
            raise InvalidOption(f"there are two rules of {topic.pattern!r}", next="Keep one of them")
        seen.add((topic.pattern, topic.dialect))
    return topics


Topics = Annotated[
    tuple[TopicSettings, ...],
    BeforeValidator(read_list),
    AfterValidator(_check_each_pattern_once),
    Field(max_length=TOPIC_RULES_MAX),
]


class Tables(Frozen):
    """What every source may say, whole or in part. Each key has a default, so that a part can be checked alone."""

    server: ServerSettings = ServerSettings()
    limits: Limits = Limits()
    log: LogSettings = LogSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    topics: Topics = ()
    transports: Transports = Field(default_factory=dict)
    messages: Messages = Field(default_factory=dict)


SECTIONS: Mapping[str, type[Frozen]] = {
    "server": ServerSettings,
    "limits": Limits,
    "log": LogSettings,
    "replicas": ReplicaSettings,
}
NAMED_TABLES: Mapping[str, type[Frozen]] = {"transports": TransportSettings, "messages": MessageSettings}
"""Sections with a table for each name, like [transports.archive], which is in the path: `transports.archive.url`."""


class Profiles(Frozen):
    development: Tables = Tables()
    test: Tables = Tables()
    production: Tables = Tables()


class ConfigurationFile(Tables):
    profile: Profile | None = None
    profiles: Profiles = Profiles()


class Said(NamedTuple):
    """A checked value and the source that said it."""

    value: object
    source: str


class Explained(NamedTuple):
    """A value as the file would write it (None: not set), without passwords."""

    key: str
    value: Shown
    source: str


class Settings(Tables):
    """All there is to know; `load_settings` makes them."""

    profile: Profile = "development"

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(default=None)

    @classmethod
    def assembled(cls, said: Mapping[str, Said], file: str | None) -> Settings:
        """From the winning value of each path: `profile`, `server.port`, …, `topics`."""
        tables: dict[str, object] = {}
        for section, model in SECTIONS.items():
            tables[section] = model(
                **{key: said[f"{section}.{key}"].value for key in model.model_fields if f"{section}.{key}" in said}
            )
        tables |= {key: said[key].value for key in ("profile", "topics") if key in said}
        for section, model in NAMED_TABLES.items():
            tables[section] = _named_tables(section, model, said)
        settings = cls.model_validate(tables)
        settings._sources.update({path: each.source for path, each in said.items()})
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
        for section, model in SECTIONS.items():
            table = getattr(self, section)
            for key in model.model_fields:
                path = f"{section}.{key}"
                yield Explained(path, as_shown(getattr(table, key)), self.source_of(path))
        for number, topic in enumerate(self.topics):
            for key in TopicSettings.model_fields:
                source = self.source_of("topics") if key in topic.model_fields_set else DEFAULT
                yield Explained(f"topics[{number}].{key}", as_shown(getattr(topic, key)), source)
        for section, model in NAMED_TABLES.items():
            for name, table in getattr(self, section).items():
                for key in model.model_fields:
                    path = f"{section}.{name}.{key}"
                    yield Explained(path, as_shown(getattr(table, key)), self.source_of(path))


def _named_tables(section: str, model: type[Frozen], said: Mapping[str, Said]) -> dict[str, Frozen]:
    """Names may hold dots, keys do not. A path without a key says that the table is there, and nothing of what is in
    it."""
    values: dict[str, dict[str, object]] = {}
    for path, each in said.items():
        if path.startswith(f"{section}."):
            name, _, key = path.removeprefix(f"{section}.").rpartition(".")
            table = values.setdefault(name, {})
            if key:
                table[key] = each.value
    return {name: model(**given) for name, given in values.items()}


def said_by(tables: Tables, source: str) -> dict[str, Said]:
    """What a source really said, path by path; defaults that fill its tables are not its own words."""
    said: dict[str, Said] = {}
    for section in SECTIONS:
        table = getattr(tables, section)
        for key in table.model_fields_set:
            said[f"{section}.{key}"] = Said(getattr(table, key), source)
    if "topics" in tables.model_fields_set:
        said["topics"] = Said(tables.topics, source)
    for section in NAMED_TABLES:
        for name, table in getattr(tables, section).items():
            said[f"{section}.{name}."] = Said(None, source)
            for key in table.model_fields_set:
                said[f"{section}.{name}.{key}"] = Said(getattr(table, key), source)
    return said


_PASSWORD_BEFORE_HOST = re.compile(r"(?<=://)([^:/@]*):.*@")
_PASSWORD_IN_QUERY = re.compile(r"([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


def written(value: Shown) -> str:
    """A shown value on one line; "-" is none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def as_shown(value: object) -> Shown:
    if isinstance(value, float):  # lengths of time are the only ones
        return say_duration(round(value * 1000))
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if isinstance(value, str):
        return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD_BEFORE_HOST.sub(r"\1:***@", value))
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"no setting is a {type(value).__name__}")
