"""Plain HTTP to a server that misbehaves."""

import socketserver
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from headwater.errors import InvalidOptionError, UnauthorizedError, UnreachableError
from headwater.replication import connection
from headwater.replication.connection import http_request


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
        (b"SSH-2.0-OpenSSH_9.6\r\n", UnreachableError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", UnreachableError),
        (b"HTTP/1.1 401 No\r\nTransfer-Encoding: chunked\r\n\r\nnonsense", UnauthorizedError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[]", UnreachableError),
        (b"", UnreachableError),
        (b"HTTP/1.1 302 Go\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", UnreachableError),
    ],
)
def test_what_is_no_answer_is_an_error_of_ours(
    url: str, answer: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misbehaving, "answer", answer)
    monkeypatch.setattr(Misbehaving, "asked", [])
    with pytest.raises(error) as shown:
        http_request(f"{url}?after=3", key="secret", ca=None)
    assert str(shown.value).startswith(f"ws{url.removeprefix('http').replace('/sapi/versions', '')}: ")
    assert Misbehaving.asked == [b"GET /sapi/versions/shop/app.db?after=3 HTTP/1.1\r\n"]  # and nowhere else


def test_a_key_that_is_none_is_reported(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="characters"):
        http_request(url, key="two\nlines", ca=None)


def test_a_name_that_no_host_can_have_is_reported() -> None:
    with pytest.raises(UnreachableError):
        http_request("http://a..b/sapi/versions/shop/app.db", key=None, ca=None)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 401 No\r\n\r\n"])
def test_an_answer_that_trickles_is_given_up(url: str, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for one of its bytes is long."""
    given_up = threading.Event()

    def trickle(self: Misbehaving) -> None:
        self.wfile.write(head)
        try:
            while not given_up.wait(0.01):
                self.wfile.write(b"x")
        except OSError:
            given_up.set()

    monkeypatch.setattr(Misbehaving, "handle", trickle)
    monkeypatch.setattr(connection, "HTTP_S_MAX", 0.3, raising=False)
    watchdog = threading.Timer(10, given_up.set)
    watchdog.start()
    with pytest.raises((UnreachableError, UnauthorizedError)):
        http_request(url, key=None, ca=None)
    assert watchdog.is_alive(), "it was waited for until the server had enough"
    given_up.set()
    watchdog.cancel()
