"""WebSocket without I/O, for both ends: bytes in, whole messages out, and the reverse.

The `websockets` library reads the frames and keeps the state. What it leaves to its callers is here: fragments are
joined, and binary messages are refused where they have no meaning. Text frames are written here, because every message
takes one and the library needs a dozen calls for it.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence

from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import OPEN, SEND_EOF
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from headwater.protocol.jsonrpc import NULL_ID, error_text, frame_too_long

try:
    from websockets.speedups import apply_mask
except ImportError:  # the library was installed without its part in C
    from websockets.utils import apply_mask

SUBPROTOCOL = Subprotocol("jsonrpc")
NORMAL = int(CloseCode.NORMAL_CLOSURE)
GOING_AWAY = int(CloseCode.GOING_AWAY)
VANISHED = int(CloseCode.ABNORMAL_CLOSURE)
POLICY_VIOLATION = int(CloseCode.POLICY_VIOLATION)
TRY_LATER = int(CloseCode.TRY_AGAIN_LATER)

_CONTROL = (Opcode.PING, Opcode.PONG)
_TEXT_FIN = 0x80 | Opcode.TEXT
_MASKED = 0x80


def text_frame(text: bytes, *, masked: bool) -> bytes:
    """A whole text message as one frame (RFC 6455, section 5.2). What a client sends is masked."""
    length, mask_bit = len(text), _MASKED if masked else 0
    if length < 126:
        head = bytes((_TEXT_FIN, mask_bit | length))
    elif length < 1 << 16:
        head = struct.pack("!BBH", _TEXT_FIN, mask_bit | 126, length)
    else:
        head = struct.pack("!BBQ", _TEXT_FIN, mask_bit | 127, length)
    if not masked:
        return head + text
    key = secrets.token_bytes(4)
    return b"%b%b%b" % (head, key, apply_mask(text, key))


class WebSocket:
    """One end of a connection. Feed it with `receive_messages`, and send `data_to_send` after each call."""

    def __init__(self, protocol: ServerProtocol | ClientProtocol) -> None:
        self._protocol = protocol
        self._is_client = isinstance(protocol, ClientProtocol)
        self._frames: list[bytes] = []  # to be sent before what the protocol has to send
        self._fragments = bytearray()  # not a list, which empty fragments would grow for ever
        self._is_text = True
        self._is_refused = False
        self.takes_binary = False
        self.idle_frames = 0
        """Frames without data; the caller resets it."""
        self.wants_eof = False
        """Close the connection after the data to send."""
        self.response: Response | None = None
        """The server's answer to the upgrade request of a client."""

    def receive_messages(self, data: bytes) -> list[tuple[bytes, bool]]:
        """The messages that are complete with these bytes, in order, with True for text and False for binary. Data that
        violates the protocol closes the connection."""
        self._protocol.receive_data(data)
        messages: list[tuple[bytes, bool]] = []
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode is Opcode.TEXT and event.fin and event.data and not self._is_refused:  # as a rule
                    messages.append((bytes(event.data), True))
                else:
                    self._take(event, messages)
            elif isinstance(event, Response):
                self.response = event
        return messages

    def _take(self, frame: Frame, messages: list[tuple[bytes, bool]]) -> None:
        if self._is_refused:
            return
        if frame.opcode in _CONTROL or not frame.data:
            self.idle_frames += 1
        if frame.opcode is Opcode.BINARY and not self.takes_binary:
            self._is_refused = True
            self._protocol.fail(CloseCode.UNSUPPORTED_DATA, "send JSON in text frames")
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            is_text = frame.opcode is Opcode.TEXT
            if frame.fin:
                messages.append((bytes(frame.data), is_text))
            else:
                self._fragments, self._is_text = bytearray(frame.data), is_text
        elif frame.opcode is Opcode.CONT:
            self._fragments += frame.data
            if frame.fin:
                messages.append((bytes(self._fragments), self._is_text))
                self._fragments = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """The bytes received of a message that is not complete yet."""
        return len(self._protocol.reader.buffer) + len(self._fragments)

    def receive_eof(self) -> None:
        self._protocol.receive_eof()

    def send(self, texts: Sequence[bytes]) -> None:
        if self._protocol.state is OPEN:
            self._frames += [text_frame(text, masked=self._is_client) for text in texts]

    def send_binary(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.send_binary(data)

    def ping(self) -> None:
        if self.is_open:
            self._protocol.send_ping(b"")

    def close(self, code: int, reason: str) -> None:
        if self.is_open:
            self._protocol.send_close(code, reason)

    def fail(self, code: int, reason: str) -> None:
        """Close, and drop data that still arrives."""
        if self.is_open:
            self._fragments = bytearray()
            self._is_refused = True
            self._protocol.fail(code, reason)

    def data_to_send(self) -> bytes:
        frames, self._frames = self._frames, []
        chunks = self._protocol.data_to_send()
        if SEND_EOF in chunks:
            self.wants_eof = True
        return b"".join(frames + chunks)

    @property
    def is_open(self) -> bool:
        return self._protocol.state is OPEN

    @property
    def close_code(self) -> int:
        """The code that the other end closed with; 1006 without a close frame."""
        received = self._protocol.close_rcvd
        return VANISHED if received is None else received.code


class _ServerProtocol(ServerProtocol):
    speaks_rpc = False

    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        return SUBPROTOCOL if self.speaks_rpc and SUBPROTOCOL in subprotocols else None

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        if self.speaks_rpc and code == CloseCode.MESSAGE_TOO_BIG and self.state is OPEN:
            self.send_text(error_text(NULL_ID, frame_too_long(self.max_message_size or 0)))
        super().fail(code, reason)


class ServerSocket(WebSocket):
    def __init__(self, frame_bytes_max: int) -> None:
        self._server = _ServerProtocol(max_size=frame_bytes_max)
        super().__init__(self._server)

    def receive_request(self, head: bytes) -> Request | None:
        """The upgrade request; None if it is not one. Bytes after the head belong to `receive_messages`."""
        self._server.receive_data(head)
        return next((event for event in self._server.events_received() if isinstance(event, Request)), None)

    def accept(self, request: Request, *, speaks_rpc: bool = False) -> bool:
        """Answer with 101, or with an error if the request is invalid. `speaks_rpc`: the messages are JSON-RPC, so its
        subprotocol is accepted, and a message over the limit is answered with an error before the close."""
        self._server.speaks_rpc = speaks_rpc
        response = self._server.accept(request)
        self._server.send_response(response)
        return response.status_code == 101

    def limit_messages(self, bytes_max: int) -> None:
        self._server.max_message_size = bytes_max

    def refuse(self, status: int, text: str) -> None:
        self._server.send_response(self._server.reject(status, text))


class ClientSocket(WebSocket):
    def __init__(self, url: str, headers: dict[str, str], frame_bytes_max: int) -> None:
        self._client = ClientProtocol(parse_uri(url), max_size=frame_bytes_max)
        super().__init__(self._client)
        request = self._client.connect()
        for name, value in headers.items():
            request.headers[name] = value
        self._client.send_request(request)

    @property
    def refusal(self) -> str | None:
        """Why the server refused the upgrade; None if it did not."""
        if self._client.handshake_exc is None:
            return None
        response = self.response
        if response is None:
            return str(self._client.handshake_exc)
        body = bytes(response.body or b"").decode(errors="replace").strip()
        return f"{response.status_code} {response.reason_phrase}" + (f": {body}" if body else "")
