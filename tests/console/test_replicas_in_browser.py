"""The databases that a server keeps, as the console shows them: to clients that may see them, when there are any.

That nothing is written on the browser's console, not even about a refusal, is checked after each test by `open_page`.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from browser import Page
from served import ServerOnThread
from steps import go, listening, push
from websockets.sync.client import connect

from headwater.server.auth import EVERYTHING, Scopes, TokenFile

MARKUP = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
IS_HIDDEN = "[document.getElementById('replicas').hidden, document.getElementById('to-replicas').hidden]"


def has_got(file: str) -> str:
    return f"performance.getEntriesByType('resource').some(({{ name }}) => name.endsWith('/{file}'))"


def cells(page: Page) -> list[str]:
    script = "[...document.querySelectorAll('#replica-rows tr:first-child td')].map((cell) => cell.textContent)"
    return list(page.evaluate(script))


def settle(page: Page) -> None:
    """What the page asked for, it has an answer to; and what it asked then has come to the server."""
    listening(page)
    assert page.evaluate("fetch('healthz').then(({ status }) => status)") == 200


def listen_to(page: Page, pattern: str) -> None:
    page.fill("pattern", pattern)
    page.click("#live-form button")
    listening(page)


def test_a_pushed_database_appears_by_itself_and_so_does_its_next_version(page: Page) -> None:
    page.until(has_got("sapi/replicas"))
    settle(page)
    assert page.evaluate(IS_HIDDEN) == [True, True]
    listen_to(page, "replica.>")
    listen_to(page, "orders.>")  # which is not to take the news from the panel
    push(page, "shop/app.db", "before the move")
    page.until("!document.getElementById('replicas').hidden")
    assert page.evaluate(IS_HIDDEN) == [False, False]
    assert page.evaluate("document.querySelectorAll('#answer pre').length") == 1  # nothing strays into the other box
    name, newest, pushed, size, versions, stored, claimed = cells(page)
    assert (name, newest, versions, claimed) == ("shop/app.dbbefore the move", "1", "1", "–")
    assert pushed == "just now" or pushed.endswith(" ago")
    assert (size, stored) == ("8 KiB", "8 KiB")
    [listed] = page.evaluate("fetch('sapi/replicas').then((answer) => answer.json())")["replicas"]
    assert page.evaluate("document.querySelector('#replica-rows time').title") == listed["newest"]["at"]
    push(page, "shop/app.db", 121 * "m")
    page.until("document.querySelector('#replica-rows td:nth-child(2)').textContent === '2'")
    assert cells(page)[0] == "shop/app.db" + 119 * "m" + "…"
    assert cells(page)[4] == "2"
    go(page, "replicas")
    page.click("#replica-rows .link")
    page.until("document.querySelectorAll('#version-rows tr').length === 2")
    page.click("#version-rows tr:last-child button")
    restore = f"headwater replica restore ws://{page.evaluate('location.host')}/shop/app.db@1 restored-1-app.db"
    assert page.text("#restore code") == restore


def test_the_command_that_is_shown_restores_the_version(page: Page) -> None:
    for _ in range(3):
        push(page, "shop/app.db")
    page.until("document.querySelector('#replica-rows td:nth-child(5)')?.textContent === '3'")
    go(page, "replicas")
    page.click("#replica-rows .link")
    page.until("document.querySelectorAll('#version-rows tr').length === 3")
    page.click("#version-rows tr:nth-child(2) button")
    program, *words = page.text("#restore code").split()
    assert program == "headwater"
    subprocess.run([sys.executable, "-m", "headwater", *words], check=True, capture_output=True, timeout=60)
    with closing(sqlite3.connect("restored-2-app.db")) as restored:
        assert restored.execute("SELECT count(*) FROM orders").fetchone() == (2,)


def test_a_claim_is_shown_while_it_is_held(page: Page, server: ServerOnThread) -> None:
    push(page, "shop/app.db")
    page.until("document.querySelector('#replica-rows tr')")
    go(page, "replicas")
    headers = {"X-ClientID": "laptop"}
    claimed = "document.querySelector('#replica-rows td:nth-child(7)')"
    with connect(f"{server.url}/sapi/subscribe/shop/app.db", additional_headers=headers, proxy=None) as holder:
        holder.send('CONFIG={"coordinate": true}')
        holder.send("SQLRSYNC_CLAIM 50")
        while holder.recv(20) != "SQLRSYNC_CLAIM":
            pass
        page.until(f"{claimed}.children[0].textContent === 'laptop'")
        assert re.fullmatch(r"for [45]\d(\.\d+)? s", page.evaluate(f"{claimed}.children[1].textContent"))
        holder.send("SQLRSYNC_RELEASE")
        page.until(f"{claimed}.textContent === '–'")


def test_a_server_that_keeps_no_replicas_is_not_asked_for_them(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]
) -> None:
    page = open_page(serve("memory:").page)
    page.until(has_got("metrics"))
    settle(page)
    assert page.evaluate(IS_HIDDEN) == [True, True]
    assert not page.evaluate(has_got("sapi/replicas"))


def test_a_token_shows_what_it_may_pull(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    everything = tokens.create("everything", EVERYTHING, now_ms=0)
    server = serve(tokens=str(tmp_path / "tokens.json"))
    for token, may_see in (
        (tokens.create("other topics", Scopes(manage=(">",), read=("orders.>",), admin=True), now_ms=0), False),
        (everything, True),
    ):
        page = open_page(server.page)
        page.until("!document.getElementById('token').hidden")
        page.fill("token-text", token)
        page.click("#token-form button")
        page.until("main.dataset.sight === 'all'")
        settle(page)
        push(page, "shop/app.db", token=everything)
        if may_see:
            page.until("document.querySelector('#replica-rows .link').textContent === 'shop/app.db'")
        else:
            settle(page)
            assert page.evaluate(IS_HIDDEN) == [True, True]
            assert not page.evaluate(has_got("sapi/replicas"))


def test_names_and_messages_are_text_and_not_without_end(page: Page) -> None:
    """A server has no such names; the page need not rely on it."""
    page.until(has_got("sapi/replicas"))
    page.evaluate(
        f"""(() => {{
          const get = window.fetch;
          window.fetch = async (path, options) => {{
            const answer = await get(path, options), {{ replicas: [one] }} = await answer.json();
            const named = (_, at) => ({{ ...one, replica: {json.dumps(MARKUP)} + at }});
            return Response.json({{ replicas: Array.from({{ length: 250 }}, named), isCut: false }});
          }};
        }})()"""
    )
    push(page, "shop/app.db", MARKUP)
    page.until("document.querySelectorAll('#replica-rows tr').length === 200")
    assert cells(page)[0] == f"{MARKUP}0{MARKUP}"
    assert page.text("#more-replicas") == "and 50 more"
    go(page, "replicas")
    assert page.evaluate("document.getElementById('more-replicas').checkVisibility()")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, script').length") == 2  # the mark, and the page's own
