"""One tracer provider for the process, since OpenTelemetry takes no second one; its spans end up in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))

from served import RunningServer
from span_witness import Witness


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    assert trace.get_tracer_provider() is provider
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Witness:
    exporter.clear()
    return Witness(exporter)


@pytest.fixture(autouse=True)
def nothing_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no headwater.toml lies


@pytest.fixture(params=["file", "server"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a log is that any number of times can be opened: each time is like another process."""
    path = tmp_path / "log.db"
    if request.param == "file":
        yield str(path)
        return
    server = RunningServer(path)
    yield server.url
    server.stop()
