"""What the two ends of sqlite3_rsync say to each other, as far as whoever stands between them has to know it."""

from __future__ import annotations

from headwater.errors import ReplicationFailed

BEGIN, END, ERROR, PAGE, TXN, MSG, DETAIL, READY = range(0x41, 0x49)  # the words of an origin
REPLICA_BEGIN, REPLICA_ERROR = 0x61, 0x62  # of a replica
LAST_BYTES = 6  # that an origin ends with: TXN, how many pages its database has, END
TEXT_BYTES_MAX = 1024 * 1024  # of an ERROR or MSG: longer ones are no sqlite3_rsync's
ERROR_CHARS_MAX = 1_000
PAGE_SIZE_LOG2_MAX = 16

_HEAD_BYTES = {BEGIN: 7, END: 1, ERROR: 5, PAGE: 5, TXN: 5, MSG: 5, DETAIL: 9, READY: 1}
BEGIN_BYTES = _HEAD_BYTES[BEGIN]  # the last four: how many pages its database has


class OriginStream:
    """Fed the stdout of an origin in chunks of any size, it lets through what changes nothing at the replica, and
    counts the pages that would. All talk about differences comes before the first PAGE: a dry run needs no more."""

    def __init__(self) -> None:
        self.page_size = 0
        self.origin_pages = 0  # in the whole database
        self.pages = 0  # that would move
        self.has_first_page = False  # among them
        self.page_bytes = 0  # of the stream, their heads included
        self.passed_bytes = 0
        # In the stream; from here on nothing is let through. A TXN alone would write too: it cuts the replica to size.
        self.first_page_at: int | None = None
        self.ended = False  # the origin is through, and told all
        self.error: str | None = None  # what the origin could not do
        self._head = b""
        self._body_left = 0
        self._error_bytes: bytearray | None = None

    def feed(self, chunk: bytes) -> bytes:
        """What of this chunk may go on to the replica."""
        before = self.passed_bytes
        at = 0
        while at < len(chunk):
            at += self._take_body(chunk, at) if self._body_left else self._take_head(chunk, at)
        if self.first_page_at is None:
            self.passed_bytes += len(chunk)
        else:
            self.passed_bytes = self.first_page_at
        return chunk[: self.passed_bytes - before]

    def finish(self) -> None:
        """When the origin says no more: raises ReplicationFailed if it did not get to its end."""
        if self.error is not None or not self.ended:
            raise ReplicationFailed(self.error or "the origin ended too early", next="Try again")

    def _take_body(self, chunk: bytes, at: int) -> int:
        taken = min(self._body_left, len(chunk) - at)
        self._body_left -= taken
        if self._error_bytes is not None:
            self._error_bytes += chunk[at : at + taken]
            if not self._body_left:
                self._note_error()
        return taken

    def _take_head(self, chunk: bytes, at: int) -> int:
        kind = self._head[0] if self._head else chunk[at]
        size = _HEAD_BYTES.get(kind)
        if size is None or (kind == PAGE and not self.page_size):
            raise ReplicationFailed(
                f"the origin said {kind:#04x}, which is no word of sqlite3_rsync here",
                next="Use one version of apsw at both ends",
            )
        if not self._head and kind in (PAGE, TXN) and self.first_page_at is None:
            self.first_page_at = self.passed_bytes + at
        taken = min(size - len(self._head), len(chunk) - at)
        self._head += chunk[at : at + taken]
        if len(self._head) == size:
            head, self._head = self._head, b""
            self._note(kind, head)
        return taken

    def _note(self, kind: int, head: bytes) -> None:
        if kind == BEGIN:
            self.page_size = 1 << min(head[2], PAGE_SIZE_LOG2_MAX)
            self.origin_pages = int.from_bytes(head[3:7], "big")
        elif kind == PAGE:
            self.pages += 1
            self.has_first_page |= int.from_bytes(head[1:5], "big") == 1
            self.page_bytes += len(head) + self.page_size
            self._body_left = self.page_size
        elif kind in (ERROR, MSG):
            self._body_left = int.from_bytes(head[1:5], "big")
            if self._body_left > TEXT_BYTES_MAX:
                raise ReplicationFailed("the origin announced a text without end", next="Try again")
            if kind == ERROR:
                self._error_bytes = bytearray()
                if not self._body_left:
                    self._note_error()
        elif kind == END:
            self.ended = True

    def _note_error(self) -> None:
        text = bytes(self._error_bytes or b"").decode("utf-8", "replace").strip()
        self.error = text[:ERROR_CHARS_MAX] or "the origin failed without a word"
        self._error_bytes = None


def pages_in(moved_bytes: int, page_size: int) -> int:
    """How many pages were in what an origin said: each comes with its number, and all else is too little to make up a
    page."""
    return moved_bytes // (page_size + _HEAD_BYTES[PAGE])


def error_at_the_end(said: bytes, kind: int) -> str:
    """The text of an ERROR or REPLICA_ERROR that is the last thing an end said; empty if it said none."""
    if kind == ERROR and said[-LAST_BYTES : 1 - LAST_BYTES] == bytes([TXN]) and said[-1:] == bytes([END]):
        return ""
    at = said.rfind(kind)
    while at >= 0:
        text = said[at + 5 :]
        if len(said) > at + 5 and int.from_bytes(said[at + 1 : at + 5], "big") == len(text):
            return text.decode(errors="replace").strip("\0\n ") or "it failed without a word"
        at = said.rfind(kind, 0, at)
    return ""
