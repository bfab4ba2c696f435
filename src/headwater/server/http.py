"""Plain HTTP/1.1 on the one port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import h11

from headwater.ports.annex import HttpRequest, HttpResponse
from headwater.server.logger import logger

HTTP_BODY_BYTES_MAX = 64 * 1024  # of a request, which may come from a stranger


class Answering(Protocol):
    def answer(self, request: HttpRequest) -> Awaitable[HttpResponse]: ...


class HttpExchange:
    """Plain HTTP/1.1, one request at a time."""

    def __init__(
        self,
        transport: asyncio.Transport,
        address: str,
        house: Answering,
        head_bytes_max: int,
        body_seconds_max: float,
        seconds_max: float,
    ) -> None:
        self._transport = transport
        self._address = address
        self._house = house
        self._seconds_max = seconds_max
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes_max)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._is_full = False  # of answers that were not read
        self._timer = asyncio.get_running_loop().call_later(body_seconds_max, transport.abort)

    def _restart_timer(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._seconds_max, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        if not self._is_full:  # over TLS more may come in although reading is paused
            self._advance()

    def _advance(self) -> None:
        try:
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self._request = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > HTTP_BODY_BYTES_MAX:
                        self._reply(plain(413, f"the body is longer than {HTTP_BODY_BYTES_MAX} bytes"), close=True)
                        return
                elif isinstance(event, h11.EndOfMessage):
                    self._transport.pause_reading()
                    self._restart_timer()
                    self._task = asyncio.ensure_future(self._run())
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
            if self._http.they_are_waiting_for_100_continue:
                self._transport.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        except h11.RemoteProtocolError as exc:
            self._reply(plain(exc.error_status_hint, str(exc)), close=True)

    async def _run(self) -> None:
        request = self._request
        assert request is not None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        asked = HttpRequest(
            request.method.decode("latin-1"),
            request.target.decode("latin-1"),
            headers,
            bytes(self._body),
            self._address,
        )
        try:
            response = await self._house.answer(asked)
        except Exception:
            told = {"path": asked.target.partition("?")[0], "address": asked.address}
            logger.exception("answering %(path)s failed", told)
            response = plain(500, "internal error")
        self._task = None
        if not self._transport.is_closing():
            self._reply(response)

    def _reply(self, response: HttpResponse, close: bool = False) -> None:
        self._restart_timer()  # also for one that never reads its answer
        headers = [
            ("Content-Type", response.content_type),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if response.status != HTTPStatus.NO_CONTENT:  # which must not have one
            headers.append(("Content-Length", str(len(response.body))))
        if close:
            headers.append(("Connection", "close"))
        is_head = self._request is not None and self._request.method == b"HEAD"
        reason = HTTPStatus(response.status).phrase.encode()
        try:
            answer = h11.Response(status_code=response.status, headers=headers, reason=reason)
            for event in (answer, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage()):
                self._transport.write(self._http.send(event) or b"")
        except h11.LocalProtocolError:  # it had sent so much nonsense that there is no answering it
            self._transport.close()
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._request = None
        self._body.clear()
        if not self._is_full:
            self._go_on()

    def _go_on(self) -> None:
        self._transport.resume_reading()
        self._advance()  # the next request may be here already

    def eof_received(self) -> bool:
        return self._task is not None  # who has closed its half still gets its answer

    def pause_writing(self) -> None:
        """Who asks and asks and reads no answer is not listened to."""
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._request is None:  # all are answered
            self._go_on()

    def connection_lost(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def path_of(target: str) -> str:
    """The path of a request; empty if it has none. What begins with a slash is a path, also with two: to others who
    look at it, like a proxy with rules for paths, the first part of it is no host either."""
    if target.startswith("/"):
        return target.partition("?")[0].partition("#")[0]
    try:
        return urlsplit(target).path
    except ValueError:
        return ""


def plain(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode())
