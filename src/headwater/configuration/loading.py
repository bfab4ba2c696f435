"""From the file, the environment and flags to settings, or to one error with every complaint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headwater.configuration.complaints import Complaint, error_of, nearest, shown
from headwater.configuration.conflicts import conflicts_in
from headwater.configuration.file import find_file, read_file
from headwater.configuration.profiles import PROFILES, built_in
from headwater.configuration.settings import DEFAULT, Profile, Said, Settings, said_by
from headwater.configuration.words import PROFILE_VARIABLE, read_environment, read_flags

PROFILE_FLAG = "--profile"


def load_settings(
    *,
    config: str | None,
    profile: str | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    directory: str,
    serves: bool = True,
) -> Settings:
    """Built-in defaults < built-in profile < file < file's profile < environment < flags.

    `config` and `profile` are what --config and --profile say. `flags` has paths like `server.port`; None is not given.
    `serves` is False where nobody will be let in: what a server must not be without is not asked for then.
    """
    found = find_file(config, environment, directory)
    file, complaints = read_file(found, directory)
    by_environment, about_environment = read_environment(environment)
    by_flags, about_flags = read_flags(flags)
    file_name = found.name if found else ""
    chosen, about_profile = _choose_profile(profile, environment, file.profile, file_name)
    complaints = [*complaints, *about_environment, *about_flags, *about_profile]
    if complaints:
        raise error_of(complaints)

    name = cast(Profile, chosen.value)
    overlay = said_by(getattr(file.profiles, name), f"{file_name} [profiles.{name}]")
    said = built_in(name) | said_by(file, file_name) | overlay | by_environment | by_flags | {"profile": chosen}
    settings = Settings.assembled(said, found.name if found else None)
    if complaints := conflicts_in(settings, serves=serves):
        raise error_of(complaints)
    return settings


def _choose_profile(
    flag: str | None, environment: Mapping[str, str], in_file: Profile | None, file_name: str
) -> tuple[Said, list[Complaint]]:
    """The first that names one. A wrong name is wrong even where another one wins."""
    sources = ((flag, PROFILE_FLAG), (environment.get(PROFILE_VARIABLE), PROFILE_VARIABLE), (in_file, file_name))
    given = [Said(name, source) for name, source in sources if name is not None]
    complaints = [_unknown_profile(str(each.value), each.source) for each in given if each.value not in PROFILES]
    return [*given, Said(PROFILES[0], DEFAULT)][0], complaints


def _unknown_profile(name: str, source: str) -> Complaint:
    meant = nearest(name, PROFILES)
    next = f"Did you mean {meant}?" if meant else f"Name one of {', '.join(PROFILES)}"
    return Complaint(source, f"there is no profile {shown(name)}", next)
