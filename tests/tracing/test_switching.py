"""Tracing is off unless it is asked for, costs nothing then, and says what it needs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import RunningServer
from span_witness import WAIT_S, Witness, span

import headwater
from headwater.errors import InvalidOptionError
from headwater.version import install_hint

WITHOUT = """
import sys, threading
import headwater

done = threading.Event()
with headwater.open(sys.argv[1]) as log:
    log.on("a", id="worker")(lambda message: done.set())
    log.publish("a", 1)
    log.publish_many([("b", 1)])
    log.start()
    assert done.wait(30)
    assert type(log._core).__module__ == sys.argv[2], type(log._core)
print(sorted(name for name in sys.modules if name.startswith("opentelemetry") or name.endswith(".tracing")))
"""


@pytest.mark.parametrize("kind", ["file", "server"])
def test_without_it_nothing_of_it_is_imported_or_in_between(kind: str, tmp_path: Path) -> None:
    server = RunningServer(tmp_path / "log.db") if kind == "server" else None
    where = [str(tmp_path / "log.db"), "headwater.broker.log"]
    if server is not None:
        where = [server.url, "headwater.client.log"]
    ran = subprocess.run([sys.executable, "-c", WITHOUT, *where], capture_output=True, text=True, timeout=60)
    if server is not None:
        server.stop()
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr


def test_by_default_there_are_no_spans_and_no_headers(url: str, spans: Witness) -> None:
    with span("outer"), headwater.open(url) as log:
        log.publish("a", 1)
        log.publish_many([("a", 2)])
        with log.subscribe("s", ">") as subscription:
            assert [message.traceparent for message in subscription.fetch()] == [None, None]
    assert [each.name for each in spans.all] == ["outer"]


@pytest.fixture
def without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("opentelemetry") or name in ("headwater.broker.tracing", "headwater.server.tracing"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


async def connect(path: Path, **options: Any) -> None:
    await headwater.open_async(path, **options)


@pytest.mark.usefixtures("without_opentelemetry")
def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    openings = [
        ("tracing", lambda: headwater.open(path, tracing=True)),
        ("tracing", lambda: asyncio.run(connect(path, tracing=True))),
        ("tracing", lambda: headwater.open("ws://127.0.0.1:9", tracing=True)),
        ("server.tracing", lambda: headwater.serve(path, port=0, tracing=True)),
    ]
    for where, opening in openings:
        with pytest.raises(InvalidOptionError) as refused:
            opening()
        assert (refused.value.where, refused.value.next) == (where, install_hint("otel"))
    assert not path.exists()


@pytest.mark.usefixtures("without_opentelemetry")
def test_without_the_package_and_without_tracing_all_is_well(url: str) -> None:
    with headwater.open(url, tracing=False) as log:
        assert log.publish("a", 1) == 1


def test_it_is_on_or_off(tmp_path: Path) -> None:
    options: Any = {"tracing": "yes"}
    for opening in (headwater.open, headwater.serve):
        with pytest.raises(InvalidOptionError, match="tracing is True or False, not 'yes'"):
            opening(tmp_path / "log.db", **options)


def test_without_an_sdk_the_trace_of_the_caller_is_passed_on_unchanged(tmp_path: Path) -> None:
    """The api alone makes no spans, but knows the current one."""
    code = """
import sys
import headwater
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

with headwater.open(sys.argv[1], tracing=True) as log:
    log.publish("a", 1)
    with use_span(NonRecordingSpan(SpanContext(0xAB, 0xCD, is_remote=True, trace_flags=TraceFlags(1)))):
        log.publish("a", 2)
    with log.subscribe("s", ">") as subscription:
        print([message.traceparent for message in subscription.fetch()])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log.db")], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ran.stdout == f"{[None, f'00-{0xAB:032x}-{0xCD:016x}-01']}\n", ran.stderr


def test_a_server_may_be_switched_by_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert headwater.serve(tmp_path / "log.db", port=0).registry.middleware == []
    monkeypatch.setenv("HEADWATER_SERVER_TRACING", "true")
    (middleware,) = headwater.serve(tmp_path / "log.db", port=0).registry.middleware
    assert type(middleware).__name__ == "CallTracing"
    assert headwater.serve(tmp_path / "log.db", port=0, tracing=False).registry.middleware == []
