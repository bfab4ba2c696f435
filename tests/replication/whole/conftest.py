"""Servers and clients in processes of their own, and what must be true on a server whatever happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from replica_host import ReplicaHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ReplicaHost]:
    """A server of the test's own, to be killed."""
    (tmp_path / "server").mkdir()
    with ReplicaHost(tmp_path / "server" / "log.db") as made:
        yield made


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaHost]:
    """One for all tests of a file that leave it alone; each has a replica of its own."""
    with ReplicaHost(tmp_path_factory.mktemp("server") / "log.db") as made:
        yield made


@pytest.fixture
def remote(shared_host: ReplicaHost, request: pytest.FixtureRequest) -> str:
    return shared_host.remote(shared_host.name_for(request.node.nodeid))
