"""What a profile changes by itself, before the file has its say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from headwater.configuration.settings import Profile, Said, Tables, said_by

PROFILES: tuple[Profile, ...] = get_args(Profile)

_DIFFERENCES: Mapping[Profile, Mapping[str, object]] = {
    "development": {},
    "test": {"server": {"log": "memory:", "port": 0}},
    "production": {"server": {"log_format": "json"}},
}


def built_in(profile: Profile) -> dict[str, Said]:
    return said_by(Tables.model_validate(_DIFFERENCES[profile]), f"profile {profile}")
