"""A server that wants a token: the console asks for one, and keeps it nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Page
from running import Running
from steps import go, publish

from headwater.server.auth import EVERYTHING, Scopes, TokenFile


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    file = TokenFile(tmp_path / "tokens.json")
    file.create("somebody else", EVERYTHING, now_ms=0)
    return file


def give(page: Page, token: str) -> None:
    page.until("!document.getElementById('token').hidden")
    page.fill("token-text", token)
    page.click("#token-form button")


def test_a_token_lets_in_and_is_kept_nowhere(
    serve: Callable[..., Running], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    server = serve(tokens=str(tmp_path / "tokens.json"))
    page = open_page(server.page)
    page.until("!document.getElementById('token').hidden")
    assert page.text("#token-problem") == ""
    give(page, "hw_00000000_" + 64 * "0")
    page.until("!document.getElementById('token-problem').hidden")
    assert "unknown or expired" in page.text("#token-problem")
    assert page.evaluate("document.getElementById('token-text').value") == ""
    token = tokens.create("console", EVERYTHING, now_ms=0)
    give(page, token)
    page.until("main.dataset.sight === 'all'")
    assert page.evaluate("document.getElementById('token').hidden")
    kept = page.evaluate(
        "[location.href, document.cookie, ...Object.values(localStorage), ...Object.values(sessionStorage),"
        " document.documentElement.outerHTML, ...[...document.querySelectorAll('input')].map((each) => each.value)]"
    )
    assert not any(token in each for each in kept)
    page.command("Page.reload")
    page.until("!document.getElementById('token').hidden")  # it was in the memory of the page alone


def test_a_revoked_token_is_asked_for_again(
    serve: Callable[..., Running], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    page = open_page(serve(tokens=str(tmp_path / "tokens.json")).page)
    token = tokens.create("console", EVERYTHING, now_ms=0)
    give(page, token)
    page.until("main.dataset.sight === 'all'")
    tokens.revoke(token.split("_")[1])
    page.until("!document.getElementById('token').hidden")
    assert "unknown or expired" in page.text("#token-problem")


def test_a_token_without_the_manage_right_shows_what_it_may(
    serve: Callable[..., Running], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    server = serve(tokens=str(tmp_path / "tokens.json"))
    page = open_page(server.page)
    give(page, tokens.create("console", Scopes(publish=("orders.>",), read=("orders.>",), consume=("*",)), now_ms=0))
    page.until("main.dataset.sight === 'rate'")
    assert "manage right" in page.text("#overview-problem")
    page.until("document.getElementById('live-problem').textContent.includes('read right')")
    links = "[...document.querySelectorAll('#pages a')].filter((each) => each.checkVisibility())"
    assert page.evaluate(f"{links}.map((each) => each.textContent)") == ["Overview", "Messages", "API"]
    page.evaluate("location.hash = 'subscriptions'")
    page.until("!document.getElementById('page-overview').hidden")
    assert page.evaluate("document.getElementById('page-subscriptions').hidden")
    go(page, "messages")
    page.fill("pattern", "orders.*")
    page.click("#live-form button")
    page.until("document.getElementById('live-problem').hidden")
    publish(page, "orders.new", "1")
    page.until("document.querySelector('#tail strong').textContent === 'orders.new'")
    page.until("document.getElementById('rate').textContent.endsWith('/s')")
