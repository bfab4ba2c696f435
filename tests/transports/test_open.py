import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater import ManualClock, Message
from headwater.delivery.circuit import BreakerPolicy
from headwater.errors import InvalidOptionError
from headwater.ports.transport import Transport
from headwater.transports.batching import BatchingTransport
from headwater.transports.breaker import BreakerTransport
from headwater.transports.file import FileTransport, StdoutTransport, read_lines, rotated_files
from headwater.transports.log import LogTransport
from headwater.transports.memory import MemoryTransport
from headwater.transports.open import SCHEMES, cut_wraps, open_transport

MAKE = Callable[..., Message]
CLOCK = ManualClock()


def opened(url: Any, **options: Any) -> Transport:
    return open_transport(url, clock=CLOCK, **options)


def test_memory_and_stdout_with_options_in_the_url_or_beside_it(make: MAKE) -> None:
    for memory in (opened("memory:?max_messages=2&overflow=refuse"), opened("memory:", max_messages=2)):
        assert isinstance(memory, MemoryTransport)
        memory.publish_many([make(0), make(1)])
    assert isinstance(opened("stdout:"), StdoutTransport)


def test_files_by_url_and_by_path(tmp_path: Path, make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {
        f"file://{tmp_path}/a%20b.jsonl?max_bytes=1&keep=1&sync=off&max_age=3600": "a b.jsonl",
        "file:relative.txt": "relative.txt",
        "odd?name.jsonl": "odd?name.jsonl",
        tmp_path / "path.jsonl": "path.jsonl",
    }
    for url, name in named.items():
        transport = opened(url)
        assert isinstance(transport, FileTransport)
        transport.publish_many([make(0), make(1), make(2)])
        transport.close()
        kept = [1, 2] if name == "a b.jsonl" else [0, 1, 2]
        assert [message.data for message in read_lines(tmp_path / name)] == kept
    assert len(rotated_files(tmp_path / "a b.jsonl")) == 1


def test_another_log(tmp_path: Path, make: MAKE) -> None:
    path = tmp_path / "copy.db"
    for url in (f"headwater:{path}", f"sqlite:{path}"):
        transport = opened(url, opener=headwater.open, maintenance_interval=None)
        assert isinstance(transport, LogTransport)
        transport.publish(make(url))
        transport.close()
    with headwater.open(path) as log:
        assert log.last_seq() == 2


def test_a_log_needs_an_opener() -> None:
    with pytest.raises(InvalidOptionError, match=r"opener=headwater\.open"):
        opened("wss://host/")


def test_an_empty_url_is_refused() -> None:
    with pytest.raises(InvalidOptionError):
        opened("")


@pytest.mark.parametrize("url", ["nats://host", "events.db", "C:events.jsonl.gz"])
def test_what_is_not_known_is_refused_with_what_is(url: str) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        opened(url)
    assert all(f"{scheme}:" in refused.value.next for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("memory:?size=2", {}, "unknown option 'size'"),
        ("memory:", {"size": 2}, "unknown option 'size'"),
        ("memory:?max_messages=two", {}, "whole number"),
        ("memory:?max_messages=2", {"max_messages": 3}, "given twice"),
        ("memory:?max_messages=2&max_messages=3", {}, "given twice"),
        ("memory:?max_messages", {}, "query cannot be read"),
        ("stdout:?sync=on", {}, "unknown option 'sync'"),
        ("file://host/a.jsonl", {}, "cannot be reached"),
        ("file://", {}, "path is missing"),
        ("file:///tmp/a.jsonl?sync=maybe", {}, "on or off"),
        ("file:///tmp/a.jsonl?max_age=soon", {}, "max_age must be a duration, not 'soon'"),
        ("memory:?breaker=on", {"breaker": True}, "given twice"),
        ("memory:?breaker=on&breaker=off", {}, "given twice"),
        ("memory:?breaker=tries:5", {}, "breaker: unknown option 'tries'"),
        ("memory:?breaker=failures:0", {}, "failures must be"),
        ("memory:", {"batch": 100}, "on, off or a table"),
        ("memory:?batch=size:0", {}, "size must be"),
        ("memory:?batch=wait:soon", {}, "batch: wait must be a duration"),
    ],
)
def test_impossible_options_are_refused(url: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOptionError, match=why):
        opened(url, **options)


def test_a_breaker_and_batches_are_put_before_it() -> None:
    plain = opened("memory:?breaker=off", batch=False)
    assert isinstance(plain, MemoryTransport)
    guarded = opened("memory:?breaker=on&max_messages=5")
    assert isinstance(guarded, BreakerTransport)
    assert isinstance(guarded.inner, MemoryTransport)
    both = opened("memory:", breaker={"failures": 2, "within": 1.5, "open": "7"}, batch=True)
    assert isinstance(both, BatchingTransport)
    assert isinstance(both.inner, BreakerTransport)
    assert both.inner._policy == BreakerPolicy(2, 1_500, 7_000)
    both.close()
    small = opened("memory:?batch=size:2,wait:0.5,max_buffered:3", breaker=BreakerPolicy(9))
    assert isinstance(small, BatchingTransport)
    assert (small._size, small._wait_ms, small._max_buffered) == (2, 500, 3)
    assert isinstance(small.inner, BreakerTransport)
    assert small.inner._policy.failures == 9
    small.close()


def test_the_rest_of_a_query_goes_on_as_it_was_written() -> None:
    assert cut_wraps("redis://h/0?stream=a%2Fb&batch=on&x=1") == ("redis://h/0?stream=a%2Fb&x=1", {"batch": "on"})
    assert cut_wraps("redis://h/0?breaker=on") == ("redis://h/0", {"breaker": "on"})


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("redis://h", "redis", "redis"),
        ("redis+pubsub://h", "redis", "redis"),
        ("archive+postgres://h", "postgres", "postgres"),
        ("s3://b", "objects", "s3"),
        ("objects+file:///d", "objects", "s3"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"headwater.transports.{module}", None)
    with pytest.raises(InvalidOptionError, match=rf"pip install '.*\[{extra}\]'"):
        opened(url)


def test_errors_hold_no_secrets() -> None:
    for url in ("nats://user:pass@host", "postgres://user:pass@host/db", "memory:?token=pass"):
        with pytest.raises(InvalidOptionError) as refused:
            opened(url)
        assert "pass" not in str(refused.value).replace("Pass opener", "")


def test_a_path_in_bytes_is_a_path(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "out.jsonl")
    headwater.open_transport(path).close()  # type: ignore[arg-type]
    with headwater.open(os.fsencode(tmp_path / "log.db"), maintenance_interval=None) as log:  # type: ignore[arg-type]
        assert log.publish("a", 1) == 1


def test_the_code_of_the_docs_runs_in_order_in_a_fresh_directory(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "transports.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    with headwater.open(tmp_path / "events.db") as log:  # a full batch, which waits for nothing
        log.publish_many([("orders.new", number) for number in range(100)])
    program = [sys.executable, "-c", "\n".join(blocks)]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    for name in ("orders.jsonl", "copies.jsonl"):
        assert [message.data for message in read_lines(tmp_path / name)] == list(range(100))


@pytest.mark.parametrize("max_age", ["5400", "5400.0", "1h30m"])
def test_a_duration_in_a_url_is_seconds_or_a_text(tmp_path: Path, max_age: str) -> None:
    transport: Any = opened(f"file://{tmp_path}/a.jsonl?max_age={max_age}")
    assert transport._max_age_ms == 5_400_000
    transport.close()
