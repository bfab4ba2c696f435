"""A directory with a configuration file in it, and what it loads as."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.settings import Settings, load_settings

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load settings from the text of a file (None: there is none), the environment and flags."""

    def call(
        text: str | None = None,
        environment: dict[str, str] | None = None,
        flags: dict[str, Any] | None = None,
        config: str | None = None,
        profile: str | None = None,
        serves: bool = True,
    ) -> Settings:
        if text is not None:
            (tmp_path / "headwater.toml").write_text(text)
        return load_settings(
            config=config,
            profile=profile,
            flags=flags or {},
            environment=environment or {},
            directory=str(tmp_path),
            serves=serves,
        )

    return call
