"""A server with its console, and a browser that looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, Page, find_browser
from served import ServerOnThread

import headwater
from headwater import Log

Serve = Callable[..., ServerOnThread]
OpenPage = Callable[[str], Page]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server for a log of the test's own, on a free port by default."""
    monkeypatch.chdir(tmp_path)  # where no headwater.toml lies
    started: list[ServerOnThread] = []

    def start(log: str | Path = tmp_path / "events.db", **flags: Any) -> ServerOnThread:
        started.append(ServerOnThread(headwater.serve(log, **{"port": 0, **flags})))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def server(serve: Serve) -> ServerOnThread:
    return serve()


@pytest.fixture
def log(server: ServerOnThread) -> Iterator[Log]:
    with headwater.open(server.url) as opened:
        yield opened


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no chromium or google-chrome on the PATH")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open pages. At the end none may have raised an error, or tried what its security policy forbids."""
    opened: list[Page] = []

    def call(url: str) -> Page:
        opened.append(browser.open(url))
        return opened[-1]

    yield call
    problems = [problem for page in opened for problem in page.problems()]
    for page in opened:
        page.close()
    assert problems == []


@pytest.fixture
def page(server: ServerOnThread, open_page: OpenPage) -> Page:
    opened = open_page(server.page)
    opened.until("main.dataset.sight === 'all'")
    return opened
