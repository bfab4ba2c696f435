"""The console in a real browser, in front of a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from served import ServerOnThread
from steps import dead_letter, go, listening, look, press, publish

from headwater import Log
from headwater.errors import InvalidTopicError

MARKUP = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
TOPIC = "&lt;b<img/src=x/onerror=window.hacked=1//"
TAIL_MAX = 200


# --- publishing and listening ---------------------------------------------------------------------------------------


def test_what_is_published_in_the_form_is_stored_counted_and_heard(page: Page, log: Log) -> None:
    assert page.text("#messages") == "0"
    listening(page)
    publish(page, "orders.new", '{"order": 17}')
    page.until("document.getElementById('published').textContent === 'Stored as seq 1'")
    page.until("document.querySelector('#tail summary code').textContent === '{\"order\":17}'")
    assert page.text("#tail summary strong") == "orders.new"
    page.until("document.getElementById('messages').textContent === '1'")
    page.until("document.querySelector('#topic-rows td').textContent === 'orders.new'")
    with log.subscribe("test", ">") as subscription:
        [message] = subscription.fetch(1)
        assert (message.topic, message.data) == ("orders.new", {"order": 17})


def test_a_message_unfolds_to_its_headers_and_data(page: Page, log: Log) -> None:
    listening(page)
    log.publish("orders.paid", {"order": 17, "paid": True}, type="payment", headers={"region": "eu"})
    page.until("document.querySelector('#tail summary')")
    page.click("#tail summary")
    page.until("document.querySelectorAll('#tail pre').length === 2")
    headers, data = page.evaluate("[...document.querySelectorAll('#tail pre')].map((pre) => pre.textContent)")
    assert json.loads(headers) == {"region": "eu", "type": "payment"}
    assert data == '{\n  "order": 17,\n  "paid": true\n}'


def test_numbers_keep_their_digits_both_ways(page: Page, log: Log) -> None:
    listening(page)
    publish(page, "a", '{"id": 12345678901234567890, "price": 1.10}')
    page.until(
        "document.querySelector('#tail summary code').textContent === '{\"id\":12345678901234567890,\"price\":1.10}'"
    )
    with log.subscribe("test", ">") as subscription:
        [message] = subscription.fetch(1)
        assert message.data == {"id": 12345678901234567890, "price": 1.1}


def test_what_is_not_json_is_not_sent(page: Page, log: Log) -> None:
    publish(page, "orders.new", "{nope")
    page.until("!document.getElementById('publish-problem').hidden")
    assert "not JSON" in page.text("#publish-problem")
    assert page.evaluate("document.getElementById('data').getAttribute('aria-invalid')") == "true"
    assert log.last_seq() == 0
    publish(page, "orders.new", "[]")
    page.until("document.getElementById('publish-problem').hidden && document.getElementById('published').textContent")
    assert page.evaluate("document.getElementById('data').getAttribute('aria-invalid')") is None


def test_a_refusal_says_why_and_what_next_where_it_happened(page: Page, log: Log) -> None:
    publish(page, "orders..new", "1")
    page.until("!document.getElementById('publish-problem').hidden")
    with pytest.raises(InvalidTopicError) as refused:
        log.publish("orders..new", 1)
    reported = page.text("#publish-problem").lower()
    assert refused.value.why.lower() in reported
    assert refused.value.next.lower() in reported
    listening(page)
    page.fill("pattern", "orders.*.>")
    page.click("#live-form button")
    page.until("!document.getElementById('live-problem').hidden")
    log.publish("orders.new", 1)
    page.until("document.querySelector('#tail summary')")  # a refused pattern leaves the old one in force


def test_a_pattern_narrows_what_is_heard(page: Page, log: Log) -> None:
    listening(page)
    log.publish("orders.new", 1)
    page.until("document.querySelectorAll('#tail li').length === 1")
    page.fill("pattern", "mails.*")
    page.click("#live-form button")
    listening(page)
    log.publish("orders.new", 2)
    log.publish("mails.welcome", 3)
    page.until("document.querySelectorAll('#tail li').length === 2")
    assert page.text("#tail strong") == "mails.welcome"
    assert page.evaluate("document.querySelectorAll('#answer pre').length") == 1  # nothing strays into the other box


def test_the_list_is_bounded_and_can_be_paused(page: Page, log: Log) -> None:
    listening(page)
    log.publish_many(("a", number) for number in range(TAIL_MAX + 100))
    page.until(f"document.getElementById('heard').textContent === '{TAIL_MAX + 100} heard'")
    page.until(f"document.querySelectorAll('#tail li').length === {TAIL_MAX}")
    assert page.text("#tail code") == str(TAIL_MAX + 99)  # the newest, on top
    page.click("#pause")
    log.publish_many(("b", number) for number in range(3))
    page.until("document.getElementById('pause').textContent === 'Resume (3 new)'")
    log.publish_many(("b", number) for number in range(TAIL_MAX))
    page.until(f"document.getElementById('pause').textContent === 'Resume ({TAIL_MAX}+ new)'")
    assert page.text("#tail strong") == "a"
    page.click("#pause")
    page.until("document.querySelector('#tail strong').textContent === 'b'")
    assert page.evaluate("document.querySelectorAll('#tail li').length") == TAIL_MAX


# --- other people's text --------------------------------------------------------------------------------------------


def test_markup_is_shown_as_text_wherever_it_comes_from(page: Page, log: Log) -> None:
    listening(page)
    with log.subscribe("test", TOPIC) as subscription:
        log.publish(TOPIC, {MARKUP: MARKUP}, type=MARKUP, headers={"x": MARKUP})
        [message] = subscription.fetch(1)
        message.reject(MARKUP)
        look(page)
        page.until("document.querySelector('#tail summary') && document.querySelector('#letter-list summary')")
        page.click("#tail summary")
        page.click("#letter-list summary")
        page.until("document.querySelector('#tail pre') && document.querySelector('#letter-list .letter summary')")
        page.click("#letter-list .letter summary")
        page.until("document.querySelector('#letter-list .letter pre')")
        page.click("#find-form button")
        page.until("document.querySelector('#found-rows tr')")
        page.click("#found-rows a")
        page.until("document.querySelector('#message-body .items summary')")
        page.click("#message-body .items summary")
        page.until("document.querySelector('#message-body details pre')")
        assert page.text("#found-rows td:nth-child(3)") == TOPIC
        assert page.text("#message-body details pre") == MARKUP  # the error
        assert page.text("#topic-rows td") == TOPIC
        assert page.text("#subscription-rows code") == TOPIC
        assert page.text("#tail summary strong") == TOPIC
        assert page.text("#letter-list summary code") == MARKUP.replace("1", "#")  # numbers do not tell groups apart
        assert page.text("#letter-list pre") == MARKUP  # the error
        assert json.loads(page.text("#tail pre")) == {"x": MARKUP, "type": MARKUP}
        assert json.loads(page.text("#tail pre:last-child")) == {MARKUP: MARKUP}
        page.click("#letter-list .letter button")
        page.until("document.getElementById('ask').open")
        assert TOPIC in page.text("#ask-title")
        page.click("#ask-no")
    publish(page, MARKUP, "1")
    page.until("document.getElementById('publish-problem').textContent.includes('<img')")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img').length") == 1  # the mark
    assert page.evaluate("document.querySelectorAll('script').length") == 1


# --- looking --------------------------------------------------------------------------------------------------------


def test_subscriptions_show_how_far_behind_they_are(page: Page, log: Log) -> None:
    log.publish_many(("orders.new", number) for number in range(5))
    with log.subscribe("billing", "orders.>", mode="shared") as billing:
        first, _ = billing.fetch(2)
        first.ack()
        look(page)
        page.until("document.querySelector('#subscription-rows td:nth-child(4)').textContent === '1'")
        row = page.evaluate("[...document.querySelectorAll('#subscription-rows td')].map((cell) => cell.textContent)")
        assert row[:3] == ["billingorders.>", "shared", "4"]
        assert row[6] == "0"
        assert page.text("#lag") == "4 behind"


def test_topics_can_be_filtered_and_listened_to(page: Page, log: Log) -> None:
    log.publish_many((topic, 1) for topic in ("mails.welcome", "orders.new", "orders.paid"))
    look(page)
    page.until("document.querySelectorAll('#topic-rows tr').length === 3")
    page.fill("topic-filter", "stock")
    page.until("document.getElementById('no-topics').checkVisibility()")
    assert page.text("#no-topics") == "No topic contains stock"
    page.fill("topic-filter", "orders")
    page.until("document.querySelectorAll('#topic-rows tr').length === 2")
    page.click("#topic-rows tr:last-child button")
    assert page.evaluate("document.getElementById('pattern').value") == "orders.paid"
    assert page.evaluate("document.getElementById('topic').value") == "orders.paid"


def test_the_rate_is_drawn(page: Page, log: Log) -> None:
    log.publish("a", 1)
    page.until("document.querySelector('#rate-curve polyline').getAttribute('points').split(' ').length >= 2")
    assert page.text("#rate").endswith("/s")


def test_the_rate_of_a_topic_is_unknown_at_the_first_look(page: Page, log: Log) -> None:
    page.evaluate("""
        window.shown = [];
        const note = () => shown.push(document.querySelector('#topic-rows td:nth-child(5)')?.textContent);
        new MutationObserver(note).observe(
            document.getElementById('topic-rows'), { childList: true, characterData: true, subtree: true });
    """)
    log.publish("a", 1)
    page.until("shown.some((text) => text?.endsWith('/s'))")
    assert next(filter(None, page.evaluate("shown"))) == "–"


# --- dead letters ---------------------------------------------------------------------------------------------------


def test_a_dead_letter_is_redriven_after_asking(page: Page, log: Log) -> None:
    with dead_letter(page, log, "mails", 1) as mails:
        page.until("document.getElementById('letter-count').textContent === '1'")
        assert page.text("#letter-list .reason") == "rejected"
        assert page.text("#letter-list summary code") == "no address"
        page.click("#letter-list summary")
        page.until("document.querySelector('#letter-list .letter summary')")
        page.click("#letter-list .letter summary")
        page.until("document.querySelector('#letter-list .letter button')")
        page.click("#letter-list .letter button")
        page.until("document.getElementById('ask').open")
        assert "1 dead letter would be delivered again." in page.text("#ask-text")
        page.click("#ask-no")
        page.until("!document.getElementById('ask').open")
        assert log.dead_letters.statistics().redriving == 0
        page.click("#letter-list .letter button")
        page.until("document.getElementById('ask').open")
        page.click("#ask-yes")
        page.until("document.getElementById('letters-done').textContent === '1 letter redriven'")
        [again] = mails.fetch(1)
        assert again.data == {"number": 0}
        again.ack()
        look(page)
        page.until("document.getElementById('letter-count').textContent === '0'")
        assert page.text("#letter-list") == ""


def test_escape_means_no(page: Page, log: Log) -> None:
    with dead_letter(page, log, "mails", 1):
        page.until("!document.getElementById('purge-all').disabled")
        page.click("#purge-all")
        page.until("document.getElementById('ask').open")
        for kind in ("keyDown", "keyUp"):
            page.command("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)
        page.until("!document.getElementById('ask').open")
        assert log.dead_letters.statistics().total == 1


def test_letters_of_one_subscription_are_purged_and_others_stay(page: Page, log: Log) -> None:
    with dead_letter(page, log, "mails", 3), dead_letter(page, log, "bills", 2):
        page.until("document.querySelectorAll('#letter-filter option').length === 3")
        page.evaluate("document.getElementById('letter-filter').value = 'mails'")
        page.evaluate("document.getElementById('letter-filter').dispatchEvent(new Event('change'))")
        page.until("document.querySelectorAll('#letter-list > li').length === 1")
        page.click("#purge-all")
        page.until("document.getElementById('ask').open")
        assert page.text("#ask-yes") == "Purge 3"
        assert "3 dead letters would be deleted." in page.text("#ask-text")
        page.click("#ask-yes")
        page.until("document.getElementById('letters-done').textContent === '3 letters purged'")
        assert log.dead_letters.statistics().by_subscription == {"bills": 2}


# --- subscriptions ----------------------------------------------------------------------------------------------------


def test_a_subscription_is_moved_and_deleted_after_asking(page: Page, log: Log) -> None:
    log.publish_many(("orders.new", number) for number in range(5))
    with log.subscribe("billing", "orders.>", mode="shared") as billing:
        for message in billing.fetch(5):
            message.ack()
    go(page, "subscriptions")
    look(page)
    page.until("document.querySelector('#subscription-rows td:nth-child(3)').textContent === '0'")
    press(page, "#subscription-rows", "Seek…")
    page.until("document.getElementById('ask').open")
    page.evaluate("document.getElementById('seek-kind').value = 'seq'")
    page.evaluate("document.getElementById('seek-kind').dispatchEvent(new Event('change'))")
    page.click("#ask-yes")
    assert page.evaluate("document.getElementById('ask').open")  # without a seq it is not sent
    page.fill("seek-at", "3")
    page.until("document.getElementById('seek-would').textContent.includes('3 settled before')")
    assert "0 not settled yet" in page.text("#seek-would")
    assert page.evaluate("[...document.querySelectorAll('#seek-would .seq')].map((e) => e.textContent)") == [
        "#3",
        "#4",
        "#5",
    ]
    assert log.subscription("billing").lag == 0  # until now nothing has moved
    page.click("#ask-yes")
    page.until("document.getElementById('subscriptions-done').textContent === 'billing goes on after seq 2'")
    page.until("document.querySelector('#subscription-rows td:nth-child(3)').textContent === '3'")
    press(page, "#subscription-rows", "Delete…")
    page.until("document.getElementById('ask').open")
    page.click("#ask-no")
    assert [each.id for each in log.subscriptions()] == ["billing"]
    press(page, "#subscription-rows", "Delete…")
    page.click("#ask-yes")
    page.until("document.getElementById('subscriptions-done').textContent === 'billing is deleted'")
    assert log.subscriptions() == []


# --- any method -----------------------------------------------------------------------------------------------------


def test_any_method_can_be_called(page: Page) -> None:
    go(page, "api")
    page.fill("method", "rpc.retain")
    page.fill("params", '{"topic": "logs.>", "max_count": 10}')
    page.click("#call-form button")
    page.until("document.querySelector('#answer pre')")
    request, answer = json.loads(page.text("#request pre")), json.loads(page.text("#answer pre"))
    assert request["method"] == "rpc.retain"
    assert answer == {"jsonrpc": "2.0", "id": request["id"], "result": {"ok": True}}
    page.fill("method", "rpc.nonsense")
    page.click("#call-form button")
    page.until("document.querySelector('#answer pre')?.textContent.includes('error')")
    assert json.loads(page.text("#answer pre"))["error"]["code"] == -32601


# --- connections that break -----------------------------------------------------------------------------------------


def test_a_lost_connection_comes_back_and_goes_on_listening(page: Page, server: ServerOnThread, log: Log) -> None:
    listening(page)
    log.publish("a", 1)
    page.until("document.querySelectorAll('#tail li').length === 1")

    async def drop_browsers() -> None:
        for connection in server._server.connections:
            connection.close(1001, "for a test")

    server.run(drop_browsers())
    page.until("document.querySelector('#tail .note')")
    listening(page)
    log.publish("a", 2)
    page.until("document.querySelectorAll('#tail li').length === 3")
    assert page.text("#tail code") == "2"


def test_a_server_that_went_away_is_found_again(
    serve: Callable[..., ServerOnThread], browser: Any, tmp_path: Path
) -> None:
    first = serve()
    page = browser.open(first.page)
    page.until("main.dataset.sight === 'all'")
    first.stop()
    page.until("document.getElementById('connection').dataset.state === 'waiting'")
    publish(page, "a", "1")
    page.until("document.getElementById('publish-problem').textContent.includes('no connection')")
    second = serve(port=first.port)
    page.click("#retry")
    page.until("document.getElementById('state').textContent === 'Connected'")
    publish(page, "a", "1")
    page.until("document.getElementById('published').textContent === 'Stored as seq 1'")
    page.close()  # a browser reports connections that are refused: here that is no error
    second.stop()
