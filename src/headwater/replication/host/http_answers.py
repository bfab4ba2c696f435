"""What is answered over plain HTTP when it is a sentence; the rest is JSON."""

from __future__ import annotations

from headwater.ports.annex import HttpResponse

JSON = "application/json"


def text(status: int, why: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{why}\n".encode(), headers)


def refused(status: int, why: str) -> HttpResponse:
    """Who came with nothing, or with nothing that is known, is told what to come with."""
    return text(status, why, *((("WWW-Authenticate", "Bearer"),) if status == 401 else ()))
