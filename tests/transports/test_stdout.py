import io
import os
import re
from collections.abc import Callable

import pytest

from headwater import Message
from headwater.errors import Closed, PublishOnly, TransportFailed
from headwater.transports.lines import from_line
from headwater.transports.stdout import StdoutTransport

MAKE = Callable[..., Message]


def test_lines_go_to_standard_output(make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    given = [make({"größe": 1}), make("\n")]
    StdoutTransport().publish_many(given)
    lines = capsys.readouterr().out.encode().splitlines(keepends=True)
    assert list(map(from_line, lines)) == given


def test_a_batch_is_flushed_once(make: MAKE) -> None:
    flushes: list[int] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            flushes.append(len(self.getvalue().splitlines()))

    StdoutTransport(Stream()).publish_many([make(1), make(2), make(3)])
    assert flushes == [3]


def test_a_reader_that_is_gone_is_told(make: MAKE) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(io.FileIO(writing, "w"), encoding="utf-8", write_through=True)
    transport = StdoutTransport(stream)
    with pytest.raises(Closed, match="its reader is gone") as failed:
        transport.publish(make(1))
    assert isinstance(failed.value.__cause__, BrokenPipeError)
    assert not transport.connected
    with pytest.raises(Closed):
        transport.publish(make(2))


def test_a_closed_stream_is_told(make: MAKE) -> None:
    stream = io.StringIO()
    stream.close()
    with pytest.raises(TransportFailed, match="closed file"):
        StdoutTransport(stream).publish(make(1))


def test_a_stream_that_is_not_utf_8_gets_the_same_json_in_ascii(make: MAKE) -> None:
    written = io.BytesIO()
    message = make({"größe": "🌊"})
    stream = io.TextIOWrapper(written, encoding="ascii")
    StdoutTransport(stream).publish(message)
    assert written.getvalue().isascii()
    assert from_line(written.getvalue()).data == message.data


def test_closing_leaves_the_stream_open(make: MAKE) -> None:
    stream = io.StringIO()
    StdoutTransport(stream).close()
    assert not stream.closed


def test_subscribing_is_refused_with_what_to_do_instead() -> None:
    expected = "stdout: StdoutTransport is publish-only: it carries no messages back. Read the lines"
    with pytest.raises(PublishOnly, match=re.escape(expected)):
        StdoutTransport().subscribe(">", print)
