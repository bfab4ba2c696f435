"""Plain HTTP to a server of replicas: a list of versions, an error report. Blocking."""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from headwater.errors import Unreachable
from headwater.replication.link import key_header, refusal_of, tls_context, unreachable
from headwater.replication.names import PREFIX, Remote

ANSWER_S_MAX = 10.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
WHY_BYTES_MAX = 16 * 1024  # of a refusal


def versions_url(remote: Remote) -> str:
    return _url(remote, f"{PREFIX}versions/")


def report_url(remote: Remote) -> str:
    """The server knows a replica by its id and by its name."""
    return _url(remote, PREFIX)


def _url(remote: Remote, prefix: str) -> str:
    scheme, host, *_ = urlsplit(remote.url_base)
    return urlunsplit(("https" if scheme == "wss" else "http", host, f"{prefix}{remote.name.path}", "", ""))


def ask(url: str, *, key: str | None, ca: str | None, body: bytes | None = None) -> bytes:
    """A GET, or a POST of JSON."""
    headers = key_header(key, url) | ({"Content-Type": "application/json"} if body else {})
    request = urllib.request.Request(url, data=body, headers=headers)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoDetours()]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=tls_context(ca)))
    try:
        with contextlib.closing(urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_S_MAX)) as answer:
            said: bytes = answer.read(ANSWER_BYTES_MAX + 1)
    except urllib.error.HTTPError as exc:
        raise refusal_of(exc.code, _why(exc), url) from exc
    except urllib.error.URLError as exc:
        cause = exc.reason if isinstance(exc.reason, OSError) else exc
        raise unreachable(cause, url) from exc
    except (OSError, http.client.HTTPException, UnicodeError) as exc:  # the last one: no name of a host
        raise unreachable(exc, url) from exc
    if len(said) > ANSWER_BYTES_MAX:
        raise Unreachable(f"the answer has more than {ANSWER_BYTES_MAX} bytes", where=url)
    return said


class _NoDetours(urllib.request.HTTPRedirectHandler):
    """The key is for this server, not for another that it may point to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _why(refusal: urllib.error.HTTPError) -> bytes:
    try:
        return refusal.read(WHY_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return b""
