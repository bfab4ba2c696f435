"""A server that wants a token: the console asks for one, and keeps it nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Page
from served import ServerOnThread
from steps import go, listening, press, publish, texts

import headwater
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
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
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


def signed_in(page: Page, token: str) -> Page:
    give(page, token)
    page.until("main.dataset.sight === 'all'")
    return page


def test_a_revoked_token_leads_back_to_the_sign_in_with_the_reason(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    page = open_page(serve(tokens=str(tmp_path / "tokens.json")).page)
    token = tokens.create("console", EVERYTHING, now_ms=0)
    signed_in(page, token)
    listening(page)
    publish(page, "orders.new", "1")
    page.until("document.querySelector('#tail li')")
    tokens.revoke(token.split("_")[1])
    page.until("!document.getElementById('token').hidden")
    assert page.text("#token-problem") == "The token was revoked.Sign in with another one."
    assert page.evaluate("document.querySelector('#tail li')") is None
    assert page.evaluate("document.activeElement.id") == "token-text"
    assert not page.evaluate("document.getElementById('sign-out').checkVisibility()")
    give(page, token)  # later it is a token like any that the server does not know
    page.until("document.getElementById('token-problem').textContent.includes('unknown or expired')")


def test_an_expired_token_leads_back_to_the_sign_in_with_the_reason(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    page = open_page(serve(tokens=str(tmp_path / "tokens.json")).page)
    now_ms = int(time.time() * 1000)
    signed_in(page, tokens.create("console", EVERYTHING, now_ms=now_ms, expires_ms=now_ms + 4_000))
    page.until("!document.getElementById('token').hidden")
    assert page.text("#token-problem").startswith("The token has expired.")


def test_signing_out_forgets_the_token_and_what_it_showed(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    page = open_page(serve(tokens=str(tmp_path / "tokens.json")).page)
    signed_in(page, tokens.create("the console of ops", EVERYTHING, now_ms=0))
    assert page.text("#label") == "the console of ops"
    assert page.text("#log") == "events.db"
    listening(page)
    publish(page, "orders.new", "1")
    page.until("document.querySelector('#tail li')")
    page.click("#sign-out")
    page.until("!document.getElementById('token').hidden && !document.querySelector('#tail li')")
    assert page.text("#token-problem") == ""


def test_without_tokens_there_is_nothing_to_sign_out_of(page: Page) -> None:
    assert not page.evaluate("document.getElementById('sign-out').checkVisibility()")


SEEN = "[...document.querySelectorAll('#pages a')].filter((each) => each.checkVisibility()).map((each) => each.hash)"
ALL = ["#overview", "#messages", "#subscriptions", "#dead-letters", "#lake", "#api"]


@pytest.mark.parametrize(
    ("scopes", "links", "missing"),
    [
        (EVERYTHING, ALL, []),
        (Scopes(publish=(">",)), ["#messages", "#api"], ["live"]),
        (Scopes(read=("orders.>",)), ["#overview", "#messages", "#api"], ["letter-tile", "publish"]),
        (Scopes(manage=(">",)), ["#overview", "#subscriptions", "#dead-letters", "#lake", "#api"], []),
        (Scopes(manage=("orders.>",)), ["#overview", "#subscriptions", "#dead-letters", "#api"], []),
        (Scopes(consume=("*",)), ["#subscriptions", "#api"], ["letter-tile"]),
        (Scopes(admin=True), ["#lake", "#api"], []),
        (Scopes(call=(">",)), ["#api"], []),
    ],
)
def test_what_the_token_may_not_do_is_not_shown(
    serve: Callable[..., ServerOnThread],
    open_page: Callable[[str], Page],
    tokens: TokenFile,
    tmp_path: Path,
    scopes: Scopes,
    links: list[str],
    missing: list[str],
) -> None:
    """And not asked for: a refusal would be shown, and be in the server's audit trail."""
    server = serve(tokens=str(tmp_path / "tokens.json"), audit=str(tmp_path / "audit.jsonl"))
    page = signed_in(open_page(server.page), tokens.create("console", scopes, now_ms=0))
    assert page.evaluate(SEEN) == links
    for link in ALL:
        page.evaluate(f"location.hash = {link!r}")
        shown = link if link in links else links[0]
        page.until(f"!document.getElementById('page-{shown[1:]}').hidden")
        assert page.evaluate("document.querySelectorAll('.page:not([hidden])').length") == 1
        seen = "[...document.querySelectorAll('[id]')].filter((each) => each.checkVisibility()).map((each) => each.id)"
        assert not {*missing} & {*page.evaluate(seen)}
    go(page, "api")
    page.fill("method", "rpc.hello")  # which every token may call: what was asked before it has an answer
    page.click("#call-form button")
    page.until("document.querySelector('#answer pre')")
    assert page.evaluate("[...document.querySelectorAll('.problem:not([hidden])')].map((e) => e.textContent)") == []
    assert "right.refused" not in (tmp_path / "audit.jsonl").read_text()


def test_a_token_for_some_topics_shows_those(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    server = serve(tokens=str(tmp_path / "tokens.json"))
    everything = tokens.create("everything", EVERYTHING, now_ms=0)
    narrow = Scopes(publish=("orders.>",), read=("orders.>",), consume=("*",))
    with headwater.open(server.url, token=everything) as log:
        log.publish("mails.new", 1)
        log.publish("orders.old", 1)
        page = signed_in(open_page(server.page), tokens.create("console", narrow, now_ms=0))
        page.until("document.querySelector('#topic-rows td')")
        assert page.evaluate("[...document.querySelectorAll('#topic-rows .link')].map((each) => each.textContent)") == [
            "orders.old"
        ]
        go(page, "messages")
        assert page.evaluate("document.getElementById('pattern').value") == "orders.>"
        listening(page)
        log.publish("mails.new", 1)
        publish(page, "orders.new", "1")
        page.until("document.querySelector('#tail strong').textContent === 'orders.new'")
        assert page.evaluate("document.querySelectorAll('#tail li').length") == 1


def test_messages_and_subscriptions_show_what_the_token_may(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    server = serve(tokens=str(tmp_path / "tokens.json"))
    everything = tokens.create("everything", EVERYTHING, now_ms=0)
    with headwater.open(server.url, token=everything) as log:
        log.publish_many([("mails.new", 1), ("orders.new", 2), ("orders.paid", 3)])
        with log.subscribe("billing", "orders.*") as billing:
            billing.fetch(1)[0].reject("no")
        reader = signed_in(open_page(server.page), tokens.create("reader", Scopes(read=("orders.>",)), now_ms=0))
        go(reader, "messages")
        reader.until("document.querySelectorAll('#found-rows tr').length === 2")  # those of its pattern
        reader.click("#found-rows tr:last-child a")
        reader.until("document.querySelector('#message-body pre')")
        assert reader.evaluate("document.getElementById('message-copy').checkVisibility()") is False
        assert reader.evaluate("document.querySelector('.deliveries, #message-body .items')") is None
        reader.fill("find-topic", "mails.new")
        reader.click("#find-form button")
        reader.until("document.getElementById('find-problem').textContent.includes('read right')")
        assert reader.evaluate("document.querySelectorAll('#found-rows tr').length") == 0
        scopes = Scopes(read=("orders.>",), publish=("orders.>",), manage=("orders.>",))
        manager = signed_in(open_page(server.page), tokens.create("manager", scopes, now_ms=0))
        go(manager, "messages")
        manager.until("document.querySelectorAll('#found-rows tr').length === 2")
        manager.click("#found-rows tr:last-child a")
        manager.until("document.querySelector('.deliveries .badge')?.textContent === 'dead letter'")
        assert manager.evaluate("document.getElementById('message-copy').checkVisibility()") is True
        assert manager.text("#message-body .items summary code") == "no"
        go(manager, "subscriptions")
        manager.until("document.querySelector('#subscription-rows .actions')?.checkVisibility()")


def test_a_manager_of_some_topics_sees_and_redrives_the_dead_letters_of_those_alone(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], tokens: TokenFile, tmp_path: Path
) -> None:
    server = serve(tokens=str(tmp_path / "tokens.json"), audit=str(tmp_path / "audit.jsonl"))
    everything = tokens.create("everything", EVERYTHING, now_ms=0)
    with headwater.open(server.url, token=everything) as log:
        log.publish_many([("mails.new", 1), ("orders.new", 2), ("orders.paid", 3), ("stock.full", 4), ("stock.low", 5)])
        with log.subscribe("all", ">") as subscription:
            for message in subscription.fetch(5):
                message.reject("the same for each")
        scopes = Scopes(manage=("orders.>", "stock.low"))
        page = signed_in(open_page(server.page), tokens.create("manager", scopes, now_ms=0))
        assert page.text("#letter-count") == "2"
        assert page.text("#redriving") == "of orders.>"
        assert len(texts(page, "#topic-rows td:first-child span")) == 3  # no links: it has no page of messages
        go(page, "dead-letters")
        page.until("document.querySelectorAll('#letter-list > li').length === 1")
        assert page.text("#letters-note") == "2 letters in 1 group"
        assert texts(page, "#letter-topics option") == ["orders.>", "stock.low"]
        page.click("#letter-list summary")
        page.until("document.querySelectorAll('#letter-list .letter').length === 2")
        assert texts(page, "#letter-list .letter strong") == ["orders.new", "orders.paid"]
        press(page, "#letter-list", "Redrive group…")
        page.until("document.getElementById('ask').open")
        page.click("#ask-yes")
        page.until("document.getElementById('letters-done').textContent === '2 letters redriven'")
        assert [letter.redriving for letter in log.dead_letters.list()] == [False, True, True, False, False]
        page.evaluate(
            "((choice) => { choice.value = 'stock.low'; choice.onchange(); })(document.getElementById('letter-topics'))"
        )
        page.until("document.getElementById('letters-note').textContent === '1 letter in 1 group'")
        page.click("#letter-list summary")
        page.until("document.querySelector('#letter-list .letter strong')?.textContent === 'stock.low'")
        press(page, "#letters", "Purge all…")
        page.until("document.getElementById('ask').open")
        page.click("#ask-yes")
        page.until("document.getElementById('letters-done').textContent === '1 letter purged'")
        left = [letter.message.topic for letter in log.dead_letters.list()]
        assert left == ["mails.new", "orders.new", "orders.paid", "stock.full"]
    assert "right.refused" not in (tmp_path / "audit.jsonl").read_text()
