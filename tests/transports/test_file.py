import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater import ManualClock, Message
from headwater.errors import (
    ClosedError,
    InvalidDataError,
    InvalidOptionError,
    InvalidTopicError,
    TooLargeError,
    TransportFailedError,
)
from headwater.message import MessageDocument, to_document
from headwater.transports import file as file_module
from headwater.transports.base import make_message
from headwater.transports.file import FileTransport, StdoutTransport, from_line, read_lines, rotated_files, to_line

MAKE = Callable[..., Message]
OPEN = Callable[..., FileTransport]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def open_file(path: Path, clock: ManualClock) -> Iterator[OPEN]:
    with contextlib.ExitStack() as stack:

        def open_one(**options: Any) -> FileTransport:
            transport = FileTransport(path, clock=clock, **options)
            stack.callback(transport.close)
            return transport

        yield open_one


def read(path: Path) -> list[Any]:
    return [message.data for message in read_lines(path)]


def numbers(path: Path) -> list[str]:
    return [rotated.name.rpartition(".")[2] for rotated in rotated_files(path)]


def test_a_line_is_the_document_of_dead_letters(path: Path, open_file: OPEN, make: MAKE) -> None:
    message = make({"a": 1}, from_="shop")
    open_file().publish(message)
    assert msgspec.json.decode(path.read_bytes(), type=MessageDocument) == to_document(message)


def test_it_appends_to_what_is_there(path: Path, open_file: OPEN, make: MAKE) -> None:
    for number in range(3):
        transport = open_file()
        transport.publish(make(number))
        transport.close()
    assert read(path) == [0, 1, 2]


def test_payloads_written_by_hand_over_several_lines_take_one(make: MAKE) -> None:
    message = msgspec.structs.replace(make(0), raw=msgspec.Raw(b'{\n "price": 1.10\n}'))
    assert to_line(message).count(b"\n") == 1
    assert from_line(to_line(message)).data_json == '{"price":1.10}'


# --- rotation ---------------------------------------------------------------------------------------------------


def test_no_file_grows_over_its_limit_and_the_order_stays(path: Path, open_file: OPEN, make: MAKE) -> None:
    size = len(to_line(make(10)))
    transport = open_file(max_bytes=3 * size)
    transport.publish_many([make(number) for number in range(10, 17)])
    transport.publish(make(17))
    assert numbers(path) == ["000001", "000002"]
    assert [len(file.read_bytes()) // size for file in (*rotated_files(path), path)] == [3, 3, 2]
    assert read(path) == list(range(10, 18))


def test_a_line_longer_than_the_limit_gets_a_file_of_its_own(path: Path, open_file: OPEN, make: MAKE) -> None:
    transport = open_file(max_bytes=10)
    transport.publish_many([make(1), make(2)])
    transport.publish(make(3))
    assert len(rotated_files(path)) == 2
    assert read(path) == [1, 2, 3]


def test_only_so_many_rotated_files_are_kept_and_numbers_go_on(path: Path, open_file: OPEN, make: MAKE) -> None:
    transport = open_file(max_bytes=1, keep=2)
    transport.publish_many([make(number) for number in range(5)])
    transport.close()
    open_file(max_bytes=1, keep=2).publish(make(5))
    assert numbers(path) == ["000004", "000005"]
    assert read(path) == [3, 4, 5]


def test_a_file_is_rotated_when_it_is_old_also_over_a_restart(
    path: Path, open_file: OPEN, make: MAKE, clock: ManualClock
) -> None:
    transport = open_file(max_age=60)
    transport.publish(make(1))
    clock.advance(59.999)
    transport.publish(make(2))
    assert numbers(path) == []
    transport.close()
    transport = open_file(max_age=60)
    clock.advance(0.001)
    transport.publish(make(3))
    assert numbers(path) == ["000001"]
    clock.advance(59.999)
    transport.publish(make(4))
    assert numbers(path) == ["000001"]
    assert read(path) == [1, 2, 3, 4]


def test_an_empty_file_is_not_rotated(path: Path, open_file: OPEN, make: MAKE, clock: ManualClock) -> None:
    transport = open_file(max_age=60, max_bytes=1)
    clock.advance(120)
    transport.publish(make(1))
    assert numbers(path) == []


def test_a_file_moved_away_by_another_program_is_replaced(path: Path, open_file: OPEN, make: MAKE) -> None:
    transport = open_file()
    transport.publish(make(1))
    path.rename(path.with_name("elsewhere"))
    transport.publish(make(2))
    path.unlink()
    transport.publish(make(3))
    assert read(path) == [3]
    assert read(path.with_name("elsewhere")) == [1]


# --- crashes ----------------------------------------------------------------------------------------------------


def test_half_a_line_is_cut_off_at_the_next_opening(path: Path, open_file: OPEN, make: MAKE) -> None:
    line = to_line(make(2))
    for left in (1, 5, len(line) // 2, len(line) - 2):
        path.write_bytes(to_line(make(1)) + line[:left])
        assert read(path) == [1]
        transport = open_file()
        assert path.read_bytes().count(b"\n") == 1
        transport.publish(make(3))
        transport.close()
        assert read(path) == [1, 3]


def test_a_line_that_lacks_only_its_end_gets_one(path: Path, open_file: OPEN, make: MAKE) -> None:
    path.write_bytes(to_line(make(1)) + to_line(make("x" * 200_000)).rstrip())
    transport = open_file()
    transport.publish(make(3))
    assert read(path) == [1, "x" * 200_000, 3]


def test_room_without_content_is_cut_off(path: Path, open_file: OPEN, make: MAKE) -> None:
    path.write_bytes(to_line(make(1)) + bytes(5_000))
    open_file().publish(make(2))
    assert read(path) == [1, 2]


def test_a_file_of_another_program_is_not_changed(path: Path, open_file: OPEN) -> None:
    path.write_text("Dear diary")
    with pytest.raises(TransportFailedError, match="not Headwater's; nothing was changed"):
        open_file()
    assert path.read_text() == "Dear diary"


WRITER = """
import sys
from headwater import ManualClock
from headwater.transports.file import FileTransport
from headwater.transports.base import make_message
transport = FileTransport(sys.argv[1], clock=ManualClock(), max_bytes=20_000)
number = 0
while True:
    transport.publish_many([make_message("a", [number + at, "x" * 2_000], 0) for at in range(5)])
    number += 5
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_every_line_that_it_confirmed(path: Path, open_file: OPEN, make: MAKE) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        confirmed = 0
        while confirmed < 200:
            confirmed = int(writer.stdout.readline())
        with pytest.raises(TransportFailedError, match="another transport writes this file"):
            open_file()
        writer.send_signal(signal.SIGKILL)
        confirmed = int(([confirmed, *writer.stdout.read().split()])[-1])
    open_file().publish(make(["after"]))
    found = [data[0] for data in read(path)]
    assert found[:confirmed] == list(range(confirmed))
    assert found == [*range(len(found) - 1), "after"]


# --- a disk that takes no more ----------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """The system cuts a write off where the file reaches this size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_and_leaves_whole_lines(path: Path, open_file: OPEN, make: MAKE) -> None:
    transport = open_file()
    transport.publish(make(1))
    whole = path.read_bytes()
    with no_file_over(len(whole) + 50), pytest.raises(TransportFailedError) as failed:
        transport.publish(make(2))
    assert isinstance(failed.value.__cause__, OSError)
    assert not transport.connected
    assert path.read_bytes() == whole
    transport.publish(make(3))
    assert transport.connected
    assert read(path) == [1, 3]


def test_half_a_line_that_could_not_be_cut_off_is_before_the_next(
    path: Path, open_file: OPEN, make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    transport = open_file()
    transport.publish(make(1))
    size = len(path.read_bytes())
    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", refuse)
        with no_file_over(size + 50), pytest.raises(TransportFailedError):
            transport.publish(make(2))
    assert len(path.read_bytes()) == size + 50
    transport.publish(make(3))
    assert read(path) == [1, 3]


def test_what_could_not_be_synced_is_not_there(
    path: Path, open_file: OPEN, make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    transport = open_file()
    transport.publish(make(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        with pytest.raises(TransportFailedError, match="Input/output error"):
            transport.publish(make(2))
    transport.publish(make(2))
    assert read(path) == [1, 2]


def test_each_batch_is_synced_once_unless_it_need_not_be(
    open_file: OPEN, make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    transport = open_file()
    monkeypatch.setattr(os, "fsync", synced.append)
    transport.publish_many([make(number) for number in range(10)])
    transport.publish(make(10))
    assert len(synced) == 2
    transport.close()
    open_file(sync=False).publish(make(11))
    assert len(synced) == 2


def test_a_missing_directory_is_reported(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(TransportFailedError, match=r"No such file or directory\. mkdir -p .*/missing$"):
        FileTransport(tmp_path / "missing" / "out.jsonl", clock=clock)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_age": -1}, {"keep": 0}, {"keep": True}, {"sync": 1}])
def test_impossible_options_are_refused(open_file: OPEN, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        open_file(**options)


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_corrupt_line_is_named(path: Path, make: MAKE) -> None:
    path.write_bytes(to_line(make(1)) + b'{"seq": 0}\n' + to_line(make(2)))
    reading = read_lines(path)
    assert next(reading).data == 1
    with pytest.raises(InvalidDataError, match=r"out.jsonl line 2: this is no message"):
        next(reading)


@pytest.mark.parametrize("line", [b"", b"\n", b"[]", b"null", b"\xff", b"[" * 5_000, b'{"seq":0,"id":"a","topic":"t"'])
def test_nothing_but_messages_is_read(line: bytes) -> None:
    with pytest.raises(InvalidDataError, match="here"):
        from_line(line, "here")


def test_a_time_that_is_none_is_refused(make: MAKE) -> None:
    line = to_line(make(1)).replace(b"2023-", b"never")
    with pytest.raises(InvalidDataError):
        from_line(line)


def test_a_line_without_end_is_not_read_into_memory(path: Path, make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"x" * 5_000)
    monkeypatch.setattr(file_module, "LINE_BYTES_MAX", 1_000)
    with pytest.raises(InvalidDataError, match="over 1000 bytes"):
        read(path)
    with pytest.raises(TooLargeError, match="the limit is 1000"):
        to_line(make("x" * 1_000))


def test_a_reader_misses_nothing_while_files_are_rotated(path: Path, open_file: OPEN, make: MAKE) -> None:
    transport = open_file(max_bytes=1)
    transport.publish_many([make(number) for number in range(3)])
    reading = read_lines(path)
    found = [next(reading).data]
    transport.publish_many([make(number) for number in range(3, 6)])
    found += [message.data for message in reading]
    assert found == [0, 1, 2, 3, 4, 5]


def test_a_file_rotated_between_two_looks_is_read_under_its_number(
    path: Path, open_file: OPEN, make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = open_file(max_bytes=1)
    transport.publish(make(1))
    looks = iter([lambda: None])

    def look(of: Path) -> list[Path]:
        found = rotated_files(of)
        for _ in looks:
            transport.publish(make(2))  # after the first look, before the file is opened
        return found

    monkeypatch.setattr(file_module, "rotated_files", look)
    assert read(path) == [1, 2]


def test_files_with_other_endings_are_none_of_ours(path: Path, make: MAKE) -> None:
    path.write_bytes(to_line(make(1)))
    path.with_name(f"{path.name}.bak").write_text("no")
    path.with_name(f"{path.name}.12").write_text("no")
    assert read(path) == [1]


def test_reading_what_is_not_there_gives_nothing(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "missing" / "out.jsonl")) == []


# --- messages of one's own --------------------------------------------------------------------------------------


def test_made_messages_have_an_id_of_their_own_and_are_checked() -> None:
    first, second = make_message("a", 1, 1_700_000_000_000), make_message("a", 1, 1_700_000_000_000)
    assert first.id != second.id
    assert first.id.startswith("018bcfe5-6800-7")
    assert first.seq == 0
    assert make_message("a", 1, 0, id="mine", headers={"x": 1}).headers == {"x": 1}
    with pytest.raises(InvalidOptionError, match="unknown publish option"):
        make_message("a", 1, 0, nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidTopicError, match="kept for patterns"):
        make_message("a.*", 1, 0)


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


def test_a_reader_that_is_gone_closes_it(make: MAKE) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(io.FileIO(writing, "w"), encoding="utf-8", write_through=True)
    transport = StdoutTransport(stream)
    with pytest.raises(ClosedError, match="its reader is gone") as failed:
        transport.publish(make(1))
    assert isinstance(failed.value.__cause__, BrokenPipeError)
    assert not transport.connected
    with pytest.raises(ClosedError):
        transport.publish(make(2))


def test_a_closed_stream_is_reported(make: MAKE) -> None:
    stream = io.StringIO()
    stream.close()
    with pytest.raises(TransportFailedError, match="closed file"):
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
