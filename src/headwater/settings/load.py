"""Loading settings from the file, the environment and flags, or one error that lists every problem."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headwater.errors import HeadwaterError, InvalidConfigurationError
from headwater.settings.model import (
    DEFAULT,
    NAMED_TABLES,
    PROFILES,
    SECTIONS,
    ConfigurationFile,
    Profile,
    Settings,
    SettingsTable,
    Tables,
    TransportSettings,
    Value,
    as_toml,
    display_value,
    is_loopback,
    values_in,
)
from headwater.topics.topic import quoted

FILE_NAME = "headwater.toml"
FILE_BYTES_MAX = 1024**2
PREFIX_CHARS_MIN = 3

CONFIG_FLAG = "--config"
PROFILE_FLAG = "--profile"
VARIABLE_PREFIX = "HEADWATER_"
CONFIG_VARIABLE = "HEADWATER_CONFIG"
PROFILE_VARIABLE = "HEADWATER_PROFILE"
TOKENS_VARIABLE = "HEADWATER_TOKENS"
OTHER_VARIABLES = (  # of clients and commands; a machine may serve and sync
    "HEADWATER_CERTIFICATE",
    "HEADWATER_DEBUG",
    "HEADWATER_PULL_KEY",
    "HEADWATER_PUSH_KEY",
    "HEADWATER_TOKEN",
    PROFILE_VARIABLE,
    CONFIG_VARIABLE,
)

PATHS = tuple(f"{section}.{key}" for section, table in SECTIONS.items() for key in table.model_fields)

_OF_PROFILES: Mapping[Profile, Mapping[str, object]] = {
    "development": {},
    "test": {"server": {"log": "memory:", "port": 0}},
    "production": {"server": {"log_format": "json"}},
}


class Problem(NamedTuple):
    where: str
    why: str
    next: str = ""


def load_settings(
    *,
    config: str | None = None,
    profile: str | None = None,
    flags: Mapping[str, Any] = {},
    environment: Mapping[str, str] = os.environ,
    directory: str = ".",
    serves: bool = True,
) -> Settings:
    """Built-in defaults < built-in profile < file < file's profile < environment < flags.

    `config` and `profile` are the values of --config and --profile. `flags` has paths like `server.port`; None is not
    given. `serves` is False where no server will listen: what only a server needs is not required then.
    """
    found = _find_file(config, environment, directory)
    file_name = found.name if found else ""
    problems: list[Problem] = []
    file = _read_file(found, directory, problems)
    from_environment = _read_environment(environment, problems)
    from_flags = _read_flags(flags, problems)
    chosen = _choose_profile(profile, environment, file.profile, file_name, problems)
    if problems:
        raise _error_of(problems)

    name = cast(Profile, chosen.value)
    settings = Settings.from_values(
        values_in(Tables.model_validate(_OF_PROFILES[name]), f"profile {name}")
        | values_in(file, file_name)
        | values_in(getattr(file.profiles, name), f"{file_name} [profiles.{name}]")
        | from_environment
        | from_flags
        | {"profile": chosen},
        found.name if found else None,
    )
    if problems := [*(_server_conflicts(settings) if serves else ()), *_transport_conflicts(settings)]:
        raise _error_of(problems)
    return settings


def _choose_profile(
    flag: str | None,
    environment: Mapping[str, str],
    in_file: Profile | None,
    file_name: str,
    problems: list[Problem],
) -> Value:
    """The first source that names one. A wrong name is a problem even where another one wins."""
    sources = ((flag, PROFILE_FLAG), (environment.get(PROFILE_VARIABLE), PROFILE_VARIABLE), (in_file, file_name))
    given = [Value(name, source) for name, source in sources if name is not None]
    for name, source in given:
        if name not in PROFILES:
            next = _did_you_mean(nearest(str(name), PROFILES)) or f"Name one of {', '.join(PROFILES)}"
            problems.append(Problem(source, f"there is no profile {quoted(name)}", next))
    return [*given, Value(PROFILES[0], DEFAULT)][0]


# --- the file ---------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    name: str
    """As the user named it, also in errors."""
    named_by: str
    """The flag or variable; empty for the one in the working directory."""

    @property
    def where(self) -> str:
        return f"{self.named_by} {self.name}".strip()


def _find_file(config: str | None, environment: Mapping[str, str], directory: str) -> _File | None:
    if config is not None:
        return _File(config, CONFIG_FLAG)
    if (named := environment.get(CONFIG_VARIABLE)) is not None:
        return _File(named, CONFIG_VARIABLE)
    # A dangling link counts: an error is better than a server that silently runs on defaults.
    return _File(FILE_NAME, "") if os.path.lexists(os.path.join(directory, FILE_NAME)) else None


def _read_file(file: _File | None, directory: str, problems: list[Problem]) -> ConfigurationFile:
    if file is None:
        return ConfigurationFile()
    try:
        return ConfigurationFile.model_validate(_parse_file(file, directory))
    except ValidationError as exc:
        problems += _problems_of(exc, ConfigurationFile, lambda path: f"{file.name}, {path}")
    except InvalidConfigurationError as exc:
        problems.append(Problem(exc.where, exc.why, exc.next))
    return ConfigurationFile()


def _parse_file(file: _File, directory: str) -> dict[str, Any]:
    if not file.name:
        raise InvalidConfigurationError("it is empty", where=file.named_by, next="Name a file, or do not give it")
    try:
        with open(os.path.join(directory, file.name), "rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        next = f"Without it, {FILE_NAME} is used if there is one" if file.named_by else "It is a broken symbolic link"
        raise InvalidConfigurationError("there is no such file", where=file.where, next=next) from None
    except (OSError, ValueError) as exc:  # ValueError: a name with a NUL
        next = "Name a file that can be read"
        raise InvalidConfigurationError(f"it cannot be read: {_reason(exc)}", where=file.where, next=next) from exc
    if len(content) > FILE_BYTES_MAX:
        why = f"it is larger than {FILE_BYTES_MAX:,} bytes"
        raise InvalidConfigurationError(why, where=file.where, next="Name another file")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        why = f"it is not UTF-8 at byte {exc.start}"
        raise InvalidConfigurationError(why, where=file.where, next="Save it as UTF-8") from exc
    except (ValueError, RecursionError) as exc:  # also a number with more digits than Python reads
        next = 'Put text in quotes and sections in brackets: [server], host = "::1", port = 8765'
        raise InvalidConfigurationError(f"it is not TOML: {_reason(exc)}", where=file.where, next=next) from exc


def _reason(exc: Exception) -> str:
    text = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    return text[:1].lower() + text[1:]


# --- the environment and flags ----------------------------------------------------------------------------------------


def variable_of(path: str) -> str:
    """`server.port` is HEADWATER_SERVER_PORT, and `cli.log` HEADWATER_LOG."""
    return VARIABLE_PREFIX + path.removeprefix("cli.").replace(".", "_").upper()


def flag_of(path: str) -> str:
    """Keys of the server have bare flags (`--port`), others begin with their section."""
    if path == "server.log":
        return "LOG"
    return "--" + path.removeprefix("server.").replace(".", "-").replace("_", "-")


VARIABLES: Mapping[str, str] = {TOKENS_VARIABLE: "server.tokens"} | {variable_of(path): path for path in PATHS}


def _read_environment(environment: Mapping[str, str], problems: list[Problem]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    foreign = _service_links(environment)
    for name in sorted(environment):
        if not name.startswith(VARIABLE_PREFIX) or name in OTHER_VARIABLES or name in foreign:
            continue
        if path := VARIABLES.get(name) or _path_of_transport(name):
            values |= _read_text(path, environment[name], name, problems)
        else:
            problems.append(_unknown_variable(name))
    alike = (TOKENS_VARIABLE, variable_of(VARIABLES[TOKENS_VARIABLE]))
    if len({environment[name] for name in alike if name in environment}) > 1:
        problems.append(Problem(alike[0], f"{alike[1]} means the same and says something else", "Keep one of them"))
    return values


def _path_of_transport(variable: str) -> str | None:
    """HEADWATER_TRANSPORTS_ARCHIVE_URL is `transports.archive.url`, so that no password must stand in the file."""
    name = variable.removeprefix(variable_of("transports") + "_")
    for key in TransportSettings.model_fields:
        if name != variable and name.endswith(f"_{key.upper()}"):
            return f"transports.{name.removesuffix(f'_{key.upper()}').lower()}.{key}"
    return None


def _read_flags(flags: Mapping[str, Any], problems: list[Problem]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for path, value in flags.items():
        if value is None:
            continue
        if path in PATHS:
            values |= _read_text(path, value, flag_of(path), problems)
        else:
            meant = nearest(path, PATHS)
            next = _did_you_mean(flag_of(meant) if meant else None)
            problems.append(Problem(flag_of(path), f"there is no key {path}", next))
    return values


def _read_text(path: str, value: object, source: str, problems: list[Problem]) -> dict[str, Value]:
    section, *names, key = path.split(".")
    table: dict[str, object] = {key: _typed(section, key, value)}
    try:
        tables = Tables.model_validate({section: dict.fromkeys(names, table) or table})
    except ValidationError as exc:
        problems += _problems_of(exc, Tables, lambda _: source)
        return {}
    return values_in(tables, source)


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _typed(section: str, key: str, value: object) -> object:
    """Text as the type that its key has in TOML. Text that cannot be converted stays, and validation refuses it."""
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    kind = {**SECTIONS, **NAMED_TABLES}[section].model_fields[key].annotation
    if kind is bool:
        return _BOOLEANS.get(value.lower(), value)
    if kind is int and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    if get_origin(kind) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _unknown_variable(name: str) -> Problem:
    """The error of an unknown variable. Its value is not shown: it may be a secret under a misspelt name."""
    if name.startswith(variable_of("topics")):
        return Problem(name, "topics are set in the file alone", "Write a [[topics]] table")
    if name.startswith(variable_of("messages")):
        return Problem(name, "messages are set in the file alone", "Write a [messages.TYPE] table")
    if name.startswith(variable_of("transports")):
        keys = ", ".join(key.upper() for key in TransportSettings.model_fields)
        return Problem(name, "it does not end with a key of a transport", f"Known keys: {keys}")
    key = name.upper().removeprefix(VARIABLE_PREFIX)
    without_section = [each for each in VARIABLES if each.endswith(f"_{key}")]
    meant = without_section[0] if len(without_section) == 1 else nearest(name.upper(), [*VARIABLES, *OTHER_VARIABLES])
    return Problem(name, "no setting has this name", _did_you_mean(meant) or "Unset it")


_LINK = re.compile(r"(?P<service>HEADWATER(?:_[A-Z0-9_]+)?)_PORT")
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


def _service_links(environment: Mapping[str, str]) -> set[str]:
    """The variables that Kubernetes sets in every container when a service is called `headwater` or `headwater-…`.

    HEADWATER_PORT=tcp://… gives them away: it cannot be a port of ours, and never comes without the others.
    """
    links: set[str] = set()
    for name, value in environment.items():
        found = _LINK.fullmatch(name)
        if found and _LINK_VALUE.match(value):
            own = re.compile(rf"{found['service']}_(?:PORT(?:_[0-9]+_.*)?|SERVICE_HOST|SERVICE_PORT(?:_.*)?)")
            links |= {each for each in environment if own.fullmatch(each)}
    return links


# --- settings that are valid alone and not together -------------------------------------------------------------------

_TOKENS_OR_ANONYMOUS = "Set server.tokens to a file of tokens, or server.allow_anonymous = true to accept every client"


def _server_conflicts(settings: Settings) -> Iterable[Problem]:
    server = settings.server
    if server.tokens is None and not server.allow_anonymous:
        if settings.profile == "production":
            yield _conflict(settings, "profile", "production needs tokens, and none are set", _TOKENS_OR_ANONYMOUS)
        elif not is_loopback(server.host):
            why = f"other machines can reach {server.host}, and no tokens are set"
            yield _conflict(settings, "server.host", why, _TOKENS_OR_ANONYMOUS)
    if server.tls_certificate is None:
        next = "Set server.tls_certificate too"
        if server.tls_key is not None:
            yield _conflict(settings, "server.tls_key", "a key without a certificate", next)
        if server.tls_client_ca is not None:
            why = "clients show certificates over TLS only, and the server has none"
            yield _conflict(settings, "server.tls_client_ca", why, next)


def _transport_conflicts(settings: Settings) -> Iterable[Problem]:
    for name, transport in settings.transports.items():
        if transport.url is None:
            next = 'Write it like url = "redis://localhost/0"'
            yield _conflict(settings, f"transports.{name}.url", "it is missing", next)
    known = ", ".join(settings.transports) or "none"
    for type_, message in settings.messages.items():
        for name in message.transports:
            if name not in settings.transports:
                next = f"Write a [transports.{name}] table; there is {known}"
                why = f"there is no transport {quoted(name)}"
                yield _conflict(settings, f"messages.{type_}.transports", why, next)


def _conflict(settings: Settings, path: str, why: str, next: str) -> Problem:
    return Problem(f"{path} ({settings.source_of(path)})", why, next)


# --- errors -----------------------------------------------------------------------------------------------------------

_TOPICS_ADVICE = "Write a [[topics]] table for each"
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "tables by name",
}

Location = tuple[str | int, ...]


def _error_of(problems: Sequence[Problem]) -> InvalidConfigurationError:
    if len(problems) == 1:
        [only] = problems
        return InvalidConfigurationError(only.why, where=only.where, next=only.next)
    lines = [f"{each.where}: {each.why}" + (f". {each.next}" if each.next else "") for each in problems]
    return InvalidConfigurationError(f"{len(lines)} things are wrong\n" + "\n".join(f"- {line}" for line in lines))


def _problems_of(error: ValidationError, model: type[SettingsTable], where: Callable[[str], str]) -> list[Problem]:
    """Pydantic's errors in our words; `where` names the place of a key path."""
    return [
        Problem(where(_path_of(details["loc"])), *_why_and_next(details, model))
        for details in error.errors(include_url=False)
    ]


def _why_and_next(details: ErrorDetails, model: type[SettingsTable]) -> tuple[str, str]:
    location, context, given = details["loc"], details.get("ctx", {}), _quoted(details["input"])
    cause = context.get("error")
    if isinstance(cause, HeadwaterError):
        why = f"{cause.where}: {cause.why}" if cause.where else cause.why
        return why, cause.next or _advice_from_default(location, model)
    match details["type"]:
        case "extra_forbidden":
            return "there is no such key", _advice_for_unknown(location, model)
        case "missing":
            return "it is missing", 'Write it like pattern = "orders.>"'
        case "model_type":
            in_list = isinstance(location[-1], int)
            next = _TOPICS_ADVICE if in_list else f"Write [{_path_of(location)}], and its keys below"
            return f"must be a table, not {given}", next
        case "literal_error":
            meant = nearest(str(details["input"]), re.findall(r"'(\w+)'", context["expected"]))
            wanted = context["expected"].replace("'", "")
            return f"must be {wanted}, not {given}", _did_you_mean(meant) or _advice_from_default(location, model)
        case "greater_than_equal":
            why = f"must be at least {context['ge']}, not {given}"
        case "less_than_equal":
            why = f"must be at most {context['le']}, not {given}"
        case "string_too_short":
            why = "it is empty"
        case "string_too_long" | "too_long":
            why = f"it is longer than {context['max_length']}"
        case kind:
            why = f"must be {_WANTED[kind]}, not {given}" if kind in _WANTED else details["msg"]
    return why, _advice_from_default(location, model)


def _advice_for_unknown(location: Location, model: type[SettingsTable]) -> str:
    """The key that was probably meant, or the known ones."""
    *parents, name = location
    known = list(_model_at(model, parents).model_fields)
    if meant := nearest(str(name), known):
        return _did_you_mean(meant)
    elsewhere = [section for section, table in SECTIONS.items() if name in table.model_fields]
    if elsewhere:
        outside = parents[:-1] if parents and parents[-1] in SECTIONS else parents
        return f"It belongs into [{_path_of((*outside, elsewhere[0]))}]"
    return f"Known keys: {', '.join(known)}"


def _advice_from_default(location: Location, model: type[SettingsTable]) -> str:
    """Right for every source, unlike a line of TOML, and an example of what is wanted."""
    if location[-1] == "topics":
        return _TOPICS_ADVICE
    *parents, name = [part for part in location if isinstance(part, str)]
    field = _model_at(model, parents).model_fields[name]
    if get_origin(field.annotation) is dict:
        return f"Write [{_path_of(location)}.NAME], and its keys below"
    if field.is_required():
        return ""
    if field.default is None:
        return "Leave it out to have none"
    return f"The default is {as_toml(display_value(field.default))}"


def _model_at(model: type[SettingsTable], parents: Iterable[str | int]) -> type[SettingsTable]:
    parts = iter(parents)
    for part in parts:
        if isinstance(part, str):
            kind: Any = model.model_fields[part].annotation
            if get_origin(kind) is dict:  # tables by name, and the name comes next
                model = get_args(kind)[1]
                next(parts, None)
            else:
                model = kind if isinstance(kind, type) else get_args(kind)[0]  # a table, or the tables of a list
    return model


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one known word that begins so, or else the one most alike."""
    known = list(known)
    begins = [each for each in known if len(word) >= PREFIX_CHARS_MIN and each.startswith(word)]
    close = begins if len(begins) == 1 else difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def _did_you_mean(word: str | None) -> str:
    return f"Did you mean {word}?" if word else ""


def _path_of(location: Iterable[str | int]) -> str:
    """`server.port`, `topics[0].max_age`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _quoted(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else quoted(value)
