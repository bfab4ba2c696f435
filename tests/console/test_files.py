"""The console's files: served with the right types and under a strict policy, and fit for it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from served import ServerOnThread

import headwater
import headwater.console
from headwater.console import console_files
from headwater.server.methods import METHODS

ROOM = Path(headwater.console.__file__).parent
FILES = {
    path.name: path.read_text() for path in sorted(ROOM.iterdir()) if path.suffix in (".html", ".css", ".js", ".svg")
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"
LINES_MAX = {".html": 400, ".css": 400, ".js": 400, ".svg": 20}

TYPES = {
    "/": "text/html; charset=utf-8",
    "/console/chart.js": "text/javascript; charset=utf-8",
    "/console/console.css": "text/css; charset=utf-8",
    "/console/console.js": "text/javascript; charset=utf-8",
    "/console/dead_letters.js": "text/javascript; charset=utf-8",
    "/console/connection.js": "text/javascript; charset=utf-8",
    "/console/lake.js": "text/javascript; charset=utf-8",
    "/console/messages.js": "text/javascript; charset=utf-8",
    "/console/over_time.js": "text/javascript; charset=utf-8",
    "/console/replicas.js": "text/javascript; charset=utf-8",
    "/console/subscriptions.js": "text/javascript; charset=utf-8",
    "/console/show.js": "text/javascript; charset=utf-8",
    "/console/mark.svg": "image/svg+xml",
}


def get(
    server: ServerOnThread, path: str, accept: str = BROWSER, method: str = "GET"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, headers={"Accept": accept})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


# --- how they are served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "content_type"), TYPES.items())
def test_a_browser_gets_each_file_with_its_type(server: ServerOnThread, path: str, content_type: str) -> None:
    response, body = get(server, path)
    assert response.status == 200
    assert response.headers["Content-Type"] == content_type
    assert body == (ROOM / (path.rsplit("/", 1)[1] or "index.html")).read_bytes()


@pytest.mark.parametrize("path", TYPES)
def test_every_file_comes_under_a_strict_policy(server: ServerOnThread, path: str) -> None:
    headers = get(server, path)[0].headers
    policy = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-cache"


def test_a_head_request_gets_the_headers_alone(server: ServerOnThread) -> None:
    response, body = get(server, "/", method="HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.headers["Content-Length"]) == len(FILES["index.html"].encode())


@pytest.mark.parametrize("accept", ["*/*", "", "application/json"])
def test_a_program_at_the_root_is_reported_in_a_line(server: ServerOnThread, accept: str) -> None:
    response, body = get(server, "/", accept)
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert body.count(b"\n") == 1


def test_without_the_console_there_is_nothing_for_browsers(serve: Callable[..., ServerOnThread]) -> None:
    server = serve(console=False)
    response, _ = get(server, "/")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert get(server, "/console/console.js")[0].status == 404


@pytest.mark.parametrize(
    "path", ["/console/", "/console/__init__.py", "/console/../__init__.py", "/console/%2e%2e/__init__.py"]
)
def test_nothing_else_of_the_room_is_served(server: ServerOnThread, path: str) -> None:
    assert get(server, path)[0].status == 404


def test_every_file_of_the_room_is_given_out() -> None:
    given = {body for _, body in console_files().values()}
    assert given == {text.encode() for text in FILES.values()}
    assert len(given) == len(TYPES)


# --- what is in them ------------------------------------------------------------------------------------------------

ADDRESS = re.compile(r"""\b[a-z]+://[^\s"'`)]*|["'(=]//[^\s"'`)]*|@import|url\(""")
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, never fetched


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_an_address(name: str) -> None:
    assert [found for found in ADDRESS.findall(FILES[name]) if found != NAMESPACE] == []


def test_an_address_is_recognised() -> None:
    samples = ['src="https://cdn.example.org/a.js"', "href='//example.org'", "url(x.png)", "@import 'x'", "ws://here/"]
    assert all(ADDRESS.search(sample) for sample in samples)


FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|document\.write|DOMParser|setHTML|srcdoc"
    r"|\beval\b|new Function|localStorage|sessionStorage|indexedDB|document\.cookie|history\."
    r"|setAttribute\(\"(?!points|aria|viewBox)"
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_and_keep_nothing(name: str) -> None:
    assert FORBIDDEN.findall(SCRIPTS[name]) == []


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.script_text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            self.script_text += data.strip()

    @property
    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.seen if "id" in attributes]


PAGE = Tags(FILES["index.html"])


def test_the_page_has_no_inline_script_or_style() -> None:
    assert [attributes.get("src") for tag, attributes in PAGE.seen if tag == "script"] == ["console/console.js"]
    assert PAGE.script_text == ""
    assert [tag for tag, attributes in PAGE.seen if tag == "style" or "style" in attributes] == []
    assert [name for _, attributes in PAGE.seen for name in attributes if name.startswith("on")] == []


def test_no_field_has_a_name_so_that_nothing_typed_can_get_into_the_address() -> None:
    fields = [attributes for tag, attributes in PAGE.seen if tag in ("input", "textarea", "select", "button")]
    assert len(fields) > 10
    assert [each for each in fields if "name" in each] == []


def test_every_element_that_a_script_asks_for_is_in_the_page_once() -> None:
    wanted = {id for text in SCRIPTS.values() for id in re.findall(r'(?:\$|complain|tell)\("([\w-]+)"', text)}
    assert len(wanted) > 40
    assert wanted - set(PAGE.ids) == set()
    assert len(PAGE.ids) == len(set(PAGE.ids))


def test_the_methods_suggested_exist_and_take_the_params_shown() -> None:
    suggested = dict(re.findall(r"^  \"(rpc\.[\w.]+)\": (?:'(.*)'|\"\"),$", SCRIPTS["console.js"], re.MULTILINE))
    assert len(suggested) > 10
    for name, params in suggested.items():
        shape = METHODS[name].params
        assert shape is not None
        msgspec.json.decode(params or "{}", type=shape)


@pytest.mark.parametrize("name", FILES)
def test_files_are_short(name: str) -> None:
    lines = FILES[name].splitlines()
    assert len(lines) <= LINES_MAX[Path(name).suffix]
    assert max(map(len, lines)) <= 120
