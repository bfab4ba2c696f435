"""Messages as JSON lines on standard output, or any stream of text."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from typing import Never, TextIO

from headwater.errors import Closed, TransportFailed
from headwater.message import Message
from headwater.ports.transport import Handle
from headwater.transports.base import BaseTransport
from headwater.transports.lines import publish_only, to_line


class StdoutTransport(BaseTransport):
    """One JSON document per line, flushed per batch. The stream is the caller's: `close` leaves it open."""

    recognises_ids = False

    def __init__(self, stream: TextIO | None = None, *, name: str = "stdout") -> None:
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        self._closed = False
        self._connected = True

    @property
    def connected(self) -> bool:
        return self._connected and not self._closed

    def _publish(self, messages: Sequence[Message]) -> None:
        text = b"".join(map(to_line, messages)).decode()
        with self._lock:
            if self._closed:
                raise Closed("this transport is closed", where=self.name)
            if not text:
                return
            try:
                self._write(text)
            except BrokenPipeError as exc:
                self._closed = True  # nobody comes back to the other end of a pipe
                raise Closed("its reader is gone", where=self.name) from exc
            except (OSError, ValueError) as exc:  # a closed stream is a ValueError
                self._connected = False
                raise TransportFailed(
                    f"the stream took no more ({exc or type(exc).__name__})",
                    where=self.name,
                    next="See whether its reader is still there",
                ) from exc
            self._connected = True

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> Never:
        raise publish_only("StdoutTransport", self.name, "Read the lines at the other end of the pipe")

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
