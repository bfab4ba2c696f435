"""Messages in the console: searched in pages, shown with what became of them, published again."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from browser import Page
from steps import go, look, press, texts

from headwater import Log
from headwater.broker import browse
from headwater.errors import CorruptError

ROWS = "[...document.querySelectorAll('#found-rows tr')].map((row) => Number(row.dataset.key))"
FIELDS = ("topic", "where", "header", "value", "after", "upto", "since", "until")


def seqs_become(page: Page, *expected: int) -> None:
    page.until(f"JSON.stringify({ROWS}) === {json.dumps(json.dumps(expected, separators=(',', ':')))}")


def search(page: Page, order: str = "newest", **fields: str) -> None:
    go(page, "messages")
    for name in FIELDS:
        page.evaluate(f"document.getElementById('find-{name}').value = {json.dumps(fields.get(name, ''))}")
    page.evaluate(f"document.getElementById('find-order').value = '{order}'")
    page.click("#find-form button")


def test_pages_go_from_the_newest_down_and_back(page: Page, log: Log) -> None:
    log.publish_many(("a", {"n": n}) for n in range(120))
    go(page, "messages")
    seqs_become(page, *range(120, 70, -1))
    assert page.text("#found-note") == "50 messages, seq 120 to 71"
    assert texts(page, "#found-rows tr:first-child td")[2:] == ["a", '{"n":119}', "9 B"]
    assert page.evaluate("document.getElementById('find-back').disabled") is True
    press(page, "#find", "Older")
    seqs_become(page, *range(70, 20, -1))
    press(page, "#find", "Older")
    seqs_become(page, *range(20, 0, -1))
    assert page.evaluate("document.getElementById('find-next').disabled") is True
    press(page, "#find", "Newer")
    seqs_become(page, *range(70, 20, -1))
    press(page, "#find", "Newer")
    seqs_become(page, *range(120, 70, -1))
    log.publish("a", {"n": 120})
    look(page)
    page.until("!document.getElementById('find-back').disabled")  # what came since is a page further up
    press(page, "#find", "Newer")
    seqs_become(page, *range(121, 71, -1))


def test_pages_go_up_from_a_position(page: Page, log: Log) -> None:
    log.publish_many(("a", n) for n in range(120))
    search(page, order="oldest", after="11")
    seqs_become(page, *range(11, 61))
    press(page, "#find", "Newer")
    seqs_become(page, *range(61, 111))
    press(page, "#find", "Older")
    seqs_become(page, *range(11, 61))


def test_messages_are_found_by_pattern_header_where_seq_and_time(page: Page, log: Log) -> None:
    hour = timedelta(hours=1)
    now = datetime.now().astimezone().replace(microsecond=0)
    log.publish("orders.old", {"n": 0}, published_at=now - 2 * hour)
    log.publish("orders.new", {"n": 1}, headers={"tenant": "acme", "try": 3}, type="Order")
    log.publish("orders.paid", {"n": 2}, headers={"tenant": "globex"})
    log.publish("mails.new", {"n": 3}, headers={"tenant": "acme"})
    search(page, topic="orders.*")
    seqs_become(page, 3, 2, 1)
    search(page, header="tenant", value="acme")
    seqs_become(page, 4, 2)
    search(page, header="try", value="3")  # a number, as it was published
    seqs_become(page, 2)
    search(page, header="tenant", topic="orders.>")
    seqs_become(page, 3, 2)
    search(page, header="type", value="Order")
    seqs_become(page, 2)
    search(page, where="data.n >= 1 and data.n < 3")
    seqs_become(page, 3, 2)
    search(page, where="data.n == 1 or data.n == 2", header="tenant", value="globex")
    seqs_become(page, 3)
    search(page, after="2", upto="3")
    seqs_become(page, 3, 2)
    at = (now - hour).strftime("%Y-%m-%dT%H:%M:%S")
    search(page, until=at)
    seqs_become(page, 1)
    search(page, since=at)
    seqs_become(page, 4, 3, 2)
    search(page, where="data.n = 1")
    page.until("!document.getElementById('find-problem').hidden")
    assert "where" in page.text("#find-problem")


def test_a_search_that_finds_nothing_says_how_far_it_looked_and_goes_on(
    page: Page, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish("rare", "needle")
    log.publish_many(("a", n) for n in range(99))
    monkeypatch.setattr(browse, "SEARCH_S", -1.0)  # one look
    monkeypatch.setattr(browse, "LOOK_SEQS", 60)
    search(page, topic="rare")
    page.until("!document.getElementById('find-on').hidden")
    assert page.text("#found-note").startswith("No message matches so far: looked down to seq 41, ")
    press(page, "#find", "Search on")
    seqs_become(page, 1)
    assert page.evaluate("document.getElementById('find-on').hidden") is True


def deliveries(page: Page) -> dict[str, list[str]]:
    rows: Any = page.evaluate(
        "[...document.querySelectorAll('.deliveries tbody tr')]"
        ".map((row) => ['strong', '.badge', '.number', '.sub'].map((each) => row.querySelector(each).textContent))"
    )
    return {name: rest for name, *rest in rows}


def test_a_message_shows_its_deliveries_attempts_and_dead_letters(page: Page, log: Log) -> None:
    log.publish("orders.new", {"order": 17}, headers={"tenant": "acme"}, type="Order", priority=3)
    log.publish("orders.new", {"order": 18})
    log.subscribe("archive", ">").close()
    log.subscribe("mailing", "mails.>").close()
    with (
        log.subscribe("billing", "orders.>", max_attempts=1) as billing,
        log.subscribe("stock", "orders.>", mode="shared", backoff=3_600, jitter=0) as stock,
    ):
        billing.fetch(1)[0].nack(error="KeyError: 'price'")
        [first, _] = stock.fetch(2)
        first.nack()
        go(page, "messages")
        seqs_become(page, 2, 1)
        page.click("#found-rows a[href='#messages/1']")
        page.until("document.querySelector('#message-body .deliveries')")
        assert page.text("#message-heading") == "Message #1"
        assert '"order": 17' in page.text("#message-body pre")
        assert {"orders.new", "Order", "3"} <= {*texts(page, "#message-body .facts dd")}
        found = deliveries(page)
        assert found["billing"] == ["dead letter", "1", ""]
        assert found["archive"] == ["not yet delivered", "", ""]
        assert "mailing" not in found
        page.click("#message-body .more summary")
        page.until("document.querySelector('#message-body .more tbody')")
        assert deliveries(page)["mailing"] == ["not matching", "", ""]
        assert found["stock"][:2] == ["waiting", "1"]
        assert found["stock"][2].startswith("due ")
        assert page.text("#message-body .items summary strong") == "billing"
        page.click("#message-body .items summary")
        page.until("document.querySelector('#message-body .items pre')")
        assert texts(page, "#message-body .items pre") == ["KeyError: 'price'"]
        page.click("#found-rows a[href='#messages/2']")
        page.until("document.getElementById('message-heading').textContent === 'Message #2'")
        page.until("document.querySelector('#message-body pre').textContent.includes('18')")
        state, attempts, note = deliveries(page)["stock"]
        assert (state, attempts) == ("in flight", "1")
        [consumer] = log.subscription("stock").consumers
        assert note.startswith(f"with {consumer}, until ")
        assert page.evaluate("document.querySelector('#found-rows tr[aria-current]').dataset.key") == "2"
        press(page, "#message", "Close")
        page.until("document.getElementById('message').hidden")


def test_a_copy_is_edited_and_published(page: Page, log: Log) -> None:
    log.publish("orders.new", {"order": 17}, id="once", headers={"tenant": "acme"}, type="Order", ttl=3_600)
    go(page, "messages")
    seqs_become(page, 1)
    page.click("#found-rows a[href='#messages/1']")
    page.until("document.querySelector('#message-body pre')")
    press(page, "#message", "Publish a copy…")
    assert page.evaluate("document.getElementById('topic').value") == "orders.new"
    assert json.loads(page.evaluate("document.getElementById('data').value")) == {"order": 17}
    assert json.loads(page.evaluate("document.getElementById('options').value")) == {
        "headers": {"tenant": "acme"},
        "type": "Order",
    }
    assert log.last_seq() == 1  # nothing is sent yet
    page.fill("topic", "orders.again")
    page.fill("data", '{"order": 18}')
    page.click("#publish-form button")
    page.until("document.getElementById('published').textContent === 'Stored as seq 2'")
    with log.subscribe("test", "orders.again") as subscription:
        [copy] = subscription.fetch(1)
        assert (copy.data, copy.headers, copy.type) == ({"order": 18}, {"tenant": "acme"}, "Order")
    page.fill("options", "[]")
    page.click("#publish-form button")
    page.until("document.getElementById('publish-problem').textContent.includes('no JSON object')")
    assert log.last_seq() == 2


def test_a_topic_of_the_overview_shows_its_messages(page: Page, log: Log) -> None:
    log.publish_many([("a", 1), ("b", 2), ("a", 3)])
    look(page)
    page.until("document.querySelectorAll('#topic-rows tr').length === 2")
    page.click("#topic-rows button")
    seqs_become(page, 3, 1)


def test_the_address_names_the_message_for_back_and_reload(page: Page, log: Log) -> None:
    log.publish_many([("a", "one"), ("b", "two")])
    go(page, "messages")
    seqs_become(page, 2, 1)
    heading = "document.getElementById('message-heading').textContent"
    for seq in (1, 2):
        page.click(f"#found-rows a[href='#messages/{seq}']")
        page.until(f"{heading} === 'Message #{seq}'")
    page.evaluate("history.back()")
    page.until(f"{heading} === 'Message #1' && document.querySelector('#message-body pre').textContent === '\"one\"'")
    page.command("Page.reload")
    page.until(f"{heading} === 'Message #1' && document.querySelector('#message-body pre').textContent === '\"one\"'")
    assert page.evaluate("document.querySelector('#pages [aria-current]').textContent") == "Messages"
    page.evaluate("location.hash = 'subscriptions'")
    page.until("!document.getElementById('page-subscriptions').hidden")
    page.evaluate("history.back()")
    page.until("document.getElementById('message').checkVisibility()")
    press(page, "#message", "Close")
    page.until("document.getElementById('message').hidden && location.hash === '#messages'")
    page.evaluate("location.hash = 'messages/99'")
    page.until("document.getElementById('message-body').textContent.includes('never published')")


def test_a_wrong_condition_is_marked_at_its_place(page: Page, log: Log) -> None:
    log.publish("a", 1)
    search(page, where="data.n > 1 and")
    page.until("document.querySelector('#find-problem pre')")
    written, mark = page.text("#find-problem pre").split("\n")
    assert written.lstrip() == "data.n > 1 and"
    assert mark.strip() == "^"
    assert page.evaluate("document.querySelector('#find .empty').checkVisibility()") is False


def test_a_message_that_could_not_be_read_is_read_again(page: Page, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise CorruptError("the message is damaged")

    log.publish("a", "one")
    go(page, "messages")
    seqs_become(page, 1)
    with monkeypatch.context() as patched:
        patched.setattr(browse, "inspect", fail)
        page.click("#found-rows a[href='#messages/1']")
        page.until("document.getElementById('message-problem').textContent.includes('damaged')")
    page.click("#found-rows a[href='#messages/1']")
    page.until("document.querySelector('#message-body pre')?.textContent === '\"one\"'")
    assert page.evaluate("document.getElementById('message-problem').hidden") is True


def test_an_address_that_names_no_message_shows_the_page(page: Page, log: Log) -> None:
    log.publish("a", "one")
    page.evaluate("location.hash = 'messages/007'")
    page.command("Page.reload")
    page.until("document.readyState === 'complete'")
    seqs_become(page, 1)
    page.until("document.getElementById('messages').textContent === '1'")
    assert page.evaluate("document.getElementById('message').hidden") is True
