"""The environment and flags: one word for each value, checked one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_origin

from pydantic import ValidationError

from headwater.configuration.complaints import Complaint, complaints_of, nearest
from headwater.configuration.file import CONFIG_VARIABLE
from headwater.configuration.settings import NAMED_TABLES, SECTIONS, Said, Tables, said_by
from headwater.configuration.transports import TransportSettings

PREFIX = "HEADWATER_"
PROFILE_VARIABLE = "HEADWATER_PROFILE"
TOKENS_VARIABLE = "HEADWATER_TOKENS"
OTHER_VARIABLES = ("HEADWATER_DEBUG", "HEADWATER_TOKEN", PROFILE_VARIABLE, CONFIG_VARIABLE)

PATHS = tuple(f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields)


def variable_of(path: str) -> str:
    """`server.port` is HEADWATER_SERVER_PORT."""
    return PREFIX + path.replace(".", "_").upper()


def flag_of(path: str) -> str:
    """How the command line spells a path: keys of the server bare (`--port`), others with their section."""
    if path == "server.log":
        return "LOG"
    return "--" + path.removeprefix("server.").replace(".", "-").replace("_", "-")


def path_of_transport(variable: str) -> str | None:
    """HEADWATER_TRANSPORTS_ARCHIVE_URL is `transports.archive.url`: a password need not stand in the file."""
    name = variable.removeprefix(variable_of("transports") + "_")
    for key in TransportSettings.model_fields:
        if name != variable and name.endswith(f"_{key.upper()}"):
            return f"transports.{name.removesuffix(f'_{key.upper()}').lower()}.{key}"
    return None


VARIABLES: Mapping[str, str] = {TOKENS_VARIABLE: "server.tokens"} | {variable_of(path): path for path in PATHS}


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Said], list[Complaint]]:
    said: dict[str, Said] = {}
    complaints: list[Complaint] = []
    foreign = _service_links(environment)
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or name in foreign:
            continue
        if path := VARIABLES.get(name) or path_of_transport(name):
            read, wrong = _read_word(path, environment[name], name)
            said |= read
            complaints += wrong
        else:
            complaints.append(_unknown_variable(name))
    alike = (TOKENS_VARIABLE, variable_of(VARIABLES[TOKENS_VARIABLE]))
    if len({environment[name] for name in alike if name in environment}) > 1:
        complaints.append(Complaint(alike[0], f"{alike[1]} means the same and says something else", "Keep one of them"))
    return said, complaints


def read_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Said], list[Complaint]]:
    said: dict[str, Said] = {}
    complaints: list[Complaint] = []
    for path, value in flags.items():
        if value is None:
            continue
        if path in PATHS:
            read, wrong = _read_word(path, value, flag_of(path))
            said |= read
            complaints += wrong
        else:
            meant = nearest(path, PATHS)
            next = f"Did you mean {flag_of(meant)}?" if meant else ""
            complaints.append(Complaint(flag_of(path), f"there is no key {path}", next))
    return said, complaints


def _read_word(path: str, value: object, source: str) -> tuple[dict[str, Said], list[Complaint]]:
    section, *names, key = path.split(".")
    table: dict[str, object] = {key: _typed(section, key, value)}
    try:
        tables = Tables.model_validate({section: dict.fromkeys(names, table) or table})
    except ValidationError as exc:
        return {}, complaints_of(exc, Tables, lambda _: source)
    return said_by(tables, source), []


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _typed(section: str, key: str, value: object) -> object:
    """Text as the type that its key has in TOML. What cannot be read stays as it is, and is complained about."""
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    kind = {**SECTIONS, **NAMED_TABLES}[section].model_fields[key].annotation
    if kind is bool:
        return _TRUTHS.get(value.lower(), value)
    if kind is int and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    if get_origin(kind) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _unknown_variable(name: str) -> Complaint:
    """Its value is not shown: it may be a secret under a misspelt name."""
    if name.startswith(variable_of("topics")):
        return Complaint(name, "topics are set in the file alone", "Write a [[topics]] table")
    if name.startswith(variable_of("messages")):
        return Complaint(name, "messages are set in the file alone", "Write a [messages.TYPE] table")
    if name.startswith(variable_of("transports")):
        keys = ", ".join(key.upper() for key in TransportSettings.model_fields)
        return Complaint(name, "it does not end with a key of a transport", f"Known keys: {keys}")
    meant = nearest(name.upper(), [*VARIABLES, *OTHER_VARIABLES])
    return Complaint(name, "no setting has this name", f"Did you mean {meant}?" if meant else "Unset it")


_LINK = re.compile(r"(?P<service>HEADWATER(?:_[A-Z0-9_]+)?)_PORT")
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


def _service_links(environment: Mapping[str, str]) -> set[str]:
    """What Kubernetes puts into every container when a service is called `headwater` or `headwater-…`.

    Known by HEADWATER_PORT=tcp://…, which can be no port of ours and never comes without the others.
    """
    links: set[str] = set()
    for name, value in environment.items():
        found = _LINK.fullmatch(name)
        if found and _LINK_VALUE.match(value):
            own = re.compile(rf"{found['service']}_(?:PORT(?:_[0-9]+_.*)?|SERVICE_HOST|SERVICE_PORT(?:_.*)?)")
            links |= {each for each in environment if own.fullmatch(each)}
    return links
