"""Child processes, and a log file for them to share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not

from process_child import Child

import headwater


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log.db")


@pytest.fixture
def log(path: str) -> Iterator[headwater.Log]:
    with headwater.open(path, maintenance_interval=None) as log:
        yield log


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(role: Callable[..., None], *arguments: Any) -> Child:
        children.append(Child(role, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()
