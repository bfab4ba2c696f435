"""A server with replicas, in the loop of the test, and a database to push."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from by_hand import Hosted, StartHost, make_database

from headwater.server.auth import TokenFile


@pytest.fixture
def hosted(tmp_path: Path) -> StartHost:
    """`async with hosted() as server`: with a log and replicas of the test's own."""
    return lambda **options: Hosted(tmp_path, **options)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_database(tmp_path / "app.db")
