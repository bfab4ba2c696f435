"""Messages as JSON lines: in a file, appended, synced per batch, rotated by size and by age; or on a stream of text.

A full file is renamed to `<path>.000001`, `<path>.000002`, …: numbers that only grow. One rename per rotation, so a
crash leaves nothing half renamed; and the order of files depends on no clock, as it would with times in their names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO
from urllib.parse import unquote

import msgspec

from headwater.arguments import check_whole
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidDataError,
    InvalidOptionError,
    TooLargeError,
    TransportFailedError,
)
from headwater.files import lock_file, sync_file
from headwater.formats import Span, span_ms
from headwater.message import Message, MessageDocument, from_document, to_document
from headwater.ports.clock import Clock
from headwater.transports.base import BaseTransport

logger = logging.getLogger("headwater")

LINE_BYTES_MAX = 8 * 1024 * 1024  # a payload at its limit that no parser reads, written as text, grows sixfold
LINE_BEGIN = b'{"seq":'
MAX_BYTES_LEAST = 1
MAX_BYTES_MOST = 2**50
KEEP_MAX = 999_999
ROTATED_DIGITS = 6
WRITE_BYTES = 4 * 1024 * 1024
TAIL_BLOCK = 64 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(MessageDocument).decode


def to_line(message: Message) -> bytes:
    """The message as one JSON document that ends its line. Raises TooLargeError."""
    line: bytes = _encode(to_document(message))
    if b"\n" in line:  # white space between values written by hand; within text it is always escaped
        line = msgspec.json.format(line, indent=-1)
    if len(line) >= LINE_BYTES_MAX:
        raise TooLargeError(
            f"{len(line)} bytes in one line, the limit is {LINE_BYTES_MAX}", where=f"message {message.id}"
        )
    return line + b"\n"


def from_line(line: bytes, where: str = "line") -> Message:
    """The message of one line. Raises InvalidDataError, which names `where` the line is."""
    if len(line) > LINE_BYTES_MAX:
        raise InvalidDataError(f"over {LINE_BYTES_MAX} bytes without an end", where=where)
    try:
        return from_document(_decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise InvalidDataError(
            f"this is no message ({exc})", where=where, next="Repair or remove the line; the others are whole"
        ) from exc


class FileTransport(BaseTransport):
    """`max_bytes`, `max_age`: when the file is rotated, by what it would hold and by when it was begun; looked at with
    every publish. `keep`: how many rotated files stay, None for all. `sync`: whether a publish returns only when its
    lines are on disk, or already when the system has them."""

    recognises_ids = False
    read_instead = "Read the file with headwater.transports.file.read_lines"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock,
        max_bytes: int | None = None,
        max_age: Span | None = None,
        keep: int | None = None,
        sync: bool = True,
    ) -> None:
        self._path = Path(path)
        self.name = f"file:{self._path}"
        self._clock = clock
        if max_bytes is not None:
            check_whole("max_bytes", max_bytes, MAX_BYTES_LEAST, MAX_BYTES_MOST)
        if keep is not None:
            check_whole("keep", keep, 1, KEEP_MAX)
        if not isinstance(sync, bool):
            raise InvalidOptionError(f"sync is True or False, not {sync!r}", where=self.name)
        self._max_bytes = max_bytes
        self._max_age_ms = None if max_age is None else span_ms(max_age, "max_age")
        self._keep = keep
        self._sync = sync
        self._lock = threading.Lock()
        self._torn = False
        with self._translated():
            self._side = self._lock_side_file()
            try:
                self._file = self._opened()
            except BaseException:
                os.close(self._side)
                raise

    @classmethod
    def _address(cls, url: str) -> tuple[str]:
        host, path = "", url[len("file:") :]
        if path.startswith("//"):
            host, slash, path = path[2:].partition("/")
            path = slash + path
        if host not in ("", "localhost"):
            raise InvalidOptionError(
                f"a file on {host!r} cannot be reached", where="file:", next="Write file:///path/to.jsonl"
            )
        if path in ("", "/"):
            raise InvalidOptionError("the path is missing", where=url, next="Write file:///path/to.jsonl")
        return (unquote(path),)

    def _publish(self, messages: Sequence[Message]) -> None:
        lines = list(map(to_line, messages))
        with self._lock:
            self._check_open()
            if not lines:
                return
            with self._translated():
                self._append(lines)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                os.close(self._side)  # the side file stays: to remove it would let two hold it at once

    # --- writing ------------------------------------------------------------------------------------------------

    def _append(self, lines: list[bytes]) -> None:
        if self._was_moved_away():
            self._reopen()
        if self._torn:
            self._heal(self._file)
            self._torn = False
        size = os.fstat(self._file).st_size
        at = 0
        while at < len(lines):
            if size and self._is_full(size + len(lines[at])):
                self._rotate()
                size = 0
            end, chunk = at, 0
            while end < len(lines) and (end == at or self._fits(size + chunk + len(lines[end]), chunk)):
                chunk += len(lines[end])
                end += 1
            if not size:
                self._note_begun(self._clock.now_ms())
            self._write(b"".join(lines[at:end]), size, last=end == len(lines))
            size += chunk
            at = end

    def _fits(self, size: int, chunk: int) -> bool:
        return chunk < WRITE_BYTES and (self._max_bytes is None or size <= self._max_bytes)

    def _is_full(self, size: int) -> bool:
        if self._max_bytes is not None and size > self._max_bytes:
            return True
        # Begun in the future: the clock was set back. Rather a file too short than one that goes on for years.
        return self._max_age_ms is not None and not 0 <= self._clock.now_ms() - self._begun_ms() < self._max_age_ms

    def _write(self, chunk: bytes, size_before: int, *, last: bool) -> None:
        """Write all of the chunk, or nothing: what a full disk leaves of it is cut off."""
        try:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if self._sync and last:
                os.fsync(self._file)
        except BaseException:
            self._torn = True  # until the cut has been made
            os.ftruncate(self._file, size_before)
            self._torn = False
            raise

    def _rotate(self) -> None:
        if self._sync:
            os.fsync(self._file)
        earlier = rotated_files(self._path)
        number = 1 + (number_of(earlier[-1]) if earlier else 0)
        moved = self._path.with_name(f"{self._path.name}.{number:0{ROTATED_DIGITS}d}")
        os.rename(self._path, moved)
        self._reopen()
        if self._keep is not None:
            for old in [*earlier, moved][: -self._keep]:
                old.unlink(missing_ok=True)

    def _was_moved_away(self) -> bool:
        """Whether another program rotated or removed it."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return True

    # --- opening ------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Open the file that has the name now, in place of the one that had it."""
        before, self._file = self._file, self._opened()
        os.close(before)

    def _opened(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if self._sync:
                sync_file(self._path.parent)
            self._heal(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def _heal(self, file: int) -> None:
        """A crash may leave half a line. One that is whole but for its end gets it; any other was never confirmed and
        is cut off."""
        size = os.fstat(file).st_size
        tail = _unended(file, size)
        if not tail:
            return
        if not tail.strip(b"\0"):  # a power cut can leave room without content
            whole = False
        elif not LINE_BEGIN.startswith(tail[: len(LINE_BEGIN)]):
            raise TransportFailedError(
                "its last line is incomplete and not Headwater's; nothing was changed",
                where=self.name,
                next="Choose another path, or add a line break at the end of the file",
            )
        else:
            whole = _is_whole(tail)
        if whole:
            os.write(file, b"\n")
        else:
            os.ftruncate(file, size - len(tail))
        os.fsync(file)
        logger.warning("%s: its last line had no end; it %s", self.name, "got one" if whole else "was cut off")

    def _lock_side_file(self) -> int:
        side = lock_file(f"{self._path}.lock")
        if side is None:
            raise TransportFailedError(
                "another transport writes this file", where=self.name, next="Give each a path of its own, or close it"
            )
        return side

    def _note_begun(self, now_ms: int) -> None:
        """Record the time in the side file: file systems do not keep it, and a restart must not reset the age."""
        if self._max_age_ms is not None:
            os.pwrite(self._side, f"{now_ms:015d}\n".encode(), 0)

    def _begun_ms(self) -> int:
        noted = os.pread(self._side, 15, 0)
        if not noted.isdigit():  # written without max_age until now
            self._note_begun(self._clock.now_ms())
            return self._clock.now_ms()
        return int(noted)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._connected = False
            directory = self._path.parent
            remedy = "Its lines are whole; fix the cause and publish again"
            if isinstance(exc, FileNotFoundError) and not directory.exists():
                remedy = f"mkdir -p {shlex.quote(str(directory))}"
            raise TransportFailedError(exc.strerror or str(exc), where=self.name, next=remedy) from exc
        except HeadwaterError:
            self._connected = False
            raise
        self._connected = True


def read_lines(path: str | os.PathLike[str]) -> Iterator[Message]:
    """All messages of a FileTransport's files, oldest first, also while it writes and rotates them. Raises
    InvalidDataError that names the corrupt line."""
    active = Path(path)
    done = 0
    while True:
        waiting = [file for file in rotated_files(active) if number_of(file) > done]
        for rotated in waiting:
            done = number_of(rotated)
            with contextlib.suppress(FileNotFoundError), rotated.open("rb") as lines:  # `keep` may remove it meanwhile
                yield from _messages(lines, rotated, growing=False)
        try:
            newest = active.open("rb")
        except FileNotFoundError:
            if any(number_of(file) > done for file in rotated_files(active)):
                continue
            return
        with newest:
            # Rotated between the two looks: what was `active` a moment ago has a number now, and comes first.
            if any(number_of(file) > done for file in rotated_files(active)):
                continue
            yield from _messages(newest, active, growing=True)
            return


def rotated_files(path: Path) -> list[Path]:
    """Oldest first."""
    begin = f"{path.name}."
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = [name for name in names if name.startswith(begin) and _is_number(name.removeprefix(begin))]
    return sorted((path.with_name(name) for name in found), key=number_of)


def number_of(rotated: Path) -> int:
    return int(rotated.name.rpartition(".")[2])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) >= ROTATED_DIGITS


def _messages(lines: BinaryIO, path: Path, *, growing: bool) -> Iterator[Message]:
    number = 0
    while line := lines.readline(LINE_BYTES_MAX + 1):
        number += 1
        where = f"{path} line {number}"
        if not line.endswith(b"\n") and len(line) <= LINE_BYTES_MAX:
            if growing:  # it is being written, or its writer died; the next to open the file sees to it
                return
            raise InvalidDataError("half a line", where=where)
        yield from_line(line, where)


def _unended(file: int, size: int) -> bytes:
    """What stands after the last line end."""
    tail = b""
    begin = size
    while begin > 0 and len(tail) <= LINE_BYTES_MAX:
        block_begin = max(0, begin - TAIL_BLOCK)
        block = os.pread(file, begin - block_begin, block_begin)
        cut = block.rfind(b"\n")
        tail = block[cut + 1 :] + tail
        if cut >= 0:
            break
        begin = block_begin
    return tail


def _is_whole(line: bytes) -> bool:
    try:
        from_line(line)
    except InvalidDataError:
        return False
    return True


class StdoutTransport(BaseTransport):
    """One JSON document per line, flushed per batch. The stream is the caller's: `close` leaves it open."""

    recognises_ids = False
    read_instead = "Read the lines at the other end of the pipe"

    def __init__(self, stream: TextIO | None = None, name: str = "stdout") -> None:
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()

    @classmethod
    def _address(cls, url: str) -> tuple[()]:
        return ()

    def _publish(self, messages: Sequence[Message]) -> None:
        text = b"".join(map(to_line, messages)).decode()
        with self._lock:
            self._check_open()
            if not text:
                return
            try:
                self._write(text)
            except BrokenPipeError as exc:
                self._closed = True  # a pipe gets no new reader
                raise ClosedError("its reader is gone", where=self.name) from exc
            except (OSError, ValueError) as exc:  # a closed stream is a ValueError
                self._connected = False
                raise TransportFailedError(
                    f"the stream took no more ({exc or type(exc).__name__})",
                    where=self.name,
                    next="Check that the program that reads it still runs",
                ) from exc
            self._connected = True

    def close(self) -> None:
        self._closed = True

    def _write(self, text: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        try:
            stream.write(text)
        except UnicodeEncodeError:  # not UTF-8; the same JSON can be written in ASCII
            stream.write(_BEYOND_ASCII.sub(_escaped, text))
        stream.flush()


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
