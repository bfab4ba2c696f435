"""Plain HTTP to a server that misbehaves."""

import socketserver
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from headwater.errors import InvalidOption, Unauthorized, Unreachable
from headwater.replication.asking import ask


class Misbehaving(socketserver.StreamRequestHandler):
    answer: ClassVar[bytes] = b""

    asked: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        self.asked.append(self.rfile.readline())
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.answer)


@pytest.fixture
def url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Misbehaving) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/sapi/versions/shop/app.db"
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", Unreachable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", Unreachable),
        (b"HTTP/1.1 401 No\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", Unauthorized),
        (b"", Unreachable),
        (b"HTTP/1.1 302 Go\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", Unreachable),
    ],
)
def test_what_is_no_answer_is_an_error_of_ours(
    url: str, answer: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misbehaving, "answer", answer)
    monkeypatch.setattr(Misbehaving, "asked", [])
    with pytest.raises(error):
        ask(url, key="secret", ca=None)
    assert Misbehaving.asked == [b"GET /sapi/versions/shop/app.db HTTP/1.1\r\n"]  # and nowhere else


def test_a_key_that_is_none_is_said(url: str) -> None:
    with pytest.raises(InvalidOption, match="characters"):
        ask(url, key="two\nlines", ca=None)


def test_a_name_that_no_host_can_have_is_said() -> None:
    with pytest.raises(Unreachable):
        ask("http://a..b/sapi/versions/shop/app.db", key=None, ca=None)
