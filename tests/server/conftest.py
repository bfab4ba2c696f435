"""Servers on real sockets, in the loop of the test. A test that is a coroutine function runs in a loop of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from foreign_client import Make, Serve, without_settings

import headwater
from headwater import ManualClock
from headwater.server import listener
from headwater.server.auth import Scopes, TokenFile
from headwater.server.mount import Mount
from headwater.server.server import Server
from headwater.settings import load_settings
from headwater.wiring import open_core


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve(port=…) as server`: a server for a log of the test's own, on a free port."""
    without_settings(monkeypatch, tmp_path)

    def make(log: str | Path = tmp_path / "log.db", **flags: Any) -> Server:
        return headwater.serve(log, **{"port": 0, **flags})

    return make


@pytest.fixture
def serve_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`async with serve_mount(mount, **{"limits.connections": 1}) as server`: a server of a log in memory."""
    without_settings(monkeypatch, tmp_path)

    def make(mount: Mount, **flags: Any) -> Server:
        given = {"server.log": "memory:", "server.port": 0, **flags}
        settings = load_settings(config=None, profile=None, flags=given, environment={}, directory=str(tmp_path))
        return Server(lambda: open_core("memory:"), settings, mounts=[mount])

    return make


@pytest.fixture
def short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not answer a close is cut at once, where the real server waits for seconds."""
    monkeypatch.setattr(listener, "CLOSE_SECONDS_MAX", 0.1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tokens(tmp_path: Path, clock: ManualClock) -> TokenFile:
    """A file with one token in it, so that there is one to read."""
    file = TokenFile(tmp_path / "tokens.json")
    file.create("nobody's", Scopes(), now_ms=clock.now_ms())
    return file


@pytest.fixture
def make(tokens: TokenFile, clock: ManualClock) -> Make:
    """`make("label", read=[…])`: a token."""

    def create(label: str, scopes: Scopes | None = None, **given: Any) -> str:
        return tokens.create(label, scopes or Scopes(**given), now_ms=clock.now_ms())

    return create


@pytest.fixture
def serve_tokens(serve: Serve, tmp_path: Path, clock: ManualClock, tokens: TokenFile) -> Serve:
    return lambda **flags: serve(tokens=str(tmp_path / "tokens.json"), clock=clock, **flags)
