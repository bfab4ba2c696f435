"""A server with replicas, in the loop of the test, and a database to push."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from by_hand import Hosted, make_database


@pytest.fixture
def hosted(tmp_path: Path) -> Callable[..., Hosted]:
    """`async with hosted() as server`: with a log and replicas of the test's own."""
    return lambda **options: Hosted(tmp_path, **options)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_database(tmp_path / "app.db")
