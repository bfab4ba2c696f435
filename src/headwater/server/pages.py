"""What the port answers to plain HTTP: metrics, health, and the files of pages for browsers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from headwater.broker.flow import run_async
from headwater.broker.lanes import SOURCE
from headwater.configuration import ServerSettings
from headwater.errors import HeadwaterError
from headwater.ports.annex import HttpRequest, HttpResponse
from headwater.server.http import path_of
from headwater.server.metrics import CONTENT_TYPE, SUBSCRIPTIONS_SHOWN_MAX
from headwater.server.parts import Parts
from headwater.server.tokens import Grant

PROBE_SECONDS_MAX = 5.0
SCRAPE_SECONDS_MAX = 10.0
CACHED_S = 1.0  # how long the answer to a scrape or to a readiness probe serves those who ask again
Files = Mapping[str, tuple[str, bytes]]  # by path: content type and content

# A page may use what lies beside it and nothing else: no script of another origin, no inline one, no frame around it.
FILE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
    ("Vary", "Accept"),
)


class _Cached:
    """An answer that costs something: computed once at a time, for all who ask meanwhile or soon after."""

    def __init__(self, compute: Callable[[], Coroutine[Any, Any, HttpResponse]]) -> None:
        self._compute = compute
        self._computing: asyncio.Task[HttpResponse] | None = None
        self._fresh_until_s = 0.0

    async def get(self) -> HttpResponse:
        loop = asyncio.get_running_loop()
        if self._computing is None or (self._computing.done() and loop.time() >= self._fresh_until_s):
            self._computing = loop.create_task(self._computed(loop))
        return await asyncio.shield(self._computing)  # one who leaves takes nothing from the others

    async def _computed(self, loop: asyncio.AbstractEventLoop) -> HttpResponse:
        try:
            return await self._compute()
        finally:
            self._fresh_until_s = loop.time() + CACHED_S


class Pages:
    def __init__(self, parts: Parts, settings: ServerSettings, files: Files) -> None:
        self._parts = parts
        # Where there are no tokens there may be none, unless the setting says otherwise.
        need = settings.metrics_need_token
        self._metrics_need_token = parts.needs_token if need is None else need
        self._files = files
        self.ready = False
        self._scrape = _Cached(self._metrics)
        self._proof = _Cached(self._prove_writable)

    async def answer(self, request: HttpRequest, grant: Grant | None) -> HttpResponse:
        path = path_of(request.target)
        pages = {"/": self._root, "/metrics": self._scrape.get, "/healthz": self._health, "/readyz": self._readiness}
        page, file = pages.get(path), self._files.get(path)
        if page is None and file is None:
            return _text(404, f"there is nothing at {path[:200]}; try {', '.join(pages)}, or JSON-RPC at /rpc")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "GET or HEAD")
        # A program that asks for the root is told in a line what is here; a browser says that it reads HTML.
        if file is not None and (page is None or "text/html" in request.headers.get("accept", "")):
            return HttpResponse(200, *file, FILE_HEADERS)
        assert page is not None
        if path == "/metrics" and self._metrics_need_token and not (grant and grant.scopes.may_watch):
            return _text(401, "a token with the admin right is needed, or manage of >", ("WWW-Authenticate", "Bearer"))
        return await page()

    async def _root(self) -> HttpResponse:
        return _text(200, "This is a Headwater server. JSON-RPC over WebSocket is at /rpc, metrics at /metrics.")

    async def _metrics(self) -> HttpResponse:
        core, metrics = self._parts.core, self._parts.metrics
        SOURCE.set(self)
        try:
            async with asyncio.timeout(SCRAPE_SECONDS_MAX):
                log = await run_async(core.statistics(SUBSCRIPTIONS_SHOWN_MAX))
                letters = await run_async(core.dead_letters.count_by_reason())
        except (HeadwaterError, TimeoutError) as exc:
            why = exc.why if isinstance(exc, HeadwaterError) else f"not counted within {SCRAPE_SECONDS_MAX:g} s"
            return _text(503, why)
        metrics.note_log(log, letters, core.engine.store.journal_bytes())
        return HttpResponse(200, CONTENT_TYPE, await asyncio.to_thread(metrics.text))

    async def _health(self) -> HttpResponse:
        """Alive: the process answers. Whether the log can be written is a matter of readiness."""
        return _json(200, {"status": "alive", "version": self._parts.version})

    async def _readiness(self) -> HttpResponse:
        if not self.ready:
            return _json(503, {"status": "not ready", "why": "the server is starting or stopping"})
        return await self._proof.get()

    async def _prove_writable(self) -> HttpResponse:
        try:
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                await run_async(self._parts.core.prove_writable())
        except (HeadwaterError, TimeoutError) as exc:
            why = exc.why if isinstance(exc, HeadwaterError) else f"no write got through in {PROBE_SECONDS_MAX:g} s"
            return _json(503, {"status": "not ready", "why": why})
        return _json(200, {"status": "ready"})


def _text(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode(), headers)


def _json(status: int, value: dict[str, str]) -> HttpResponse:
    return HttpResponse(status, "application/json", msgspec.json.encode(value) + b"\n")
