"""What operators do in the console with subscriptions and dead letters: each after a preview, each with its outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browser import Page
from steps import go, look, press, texts

import headwater
from headwater import Log
from headwater.broker.dead_letters import DeadLetters
from headwater.errors import CorruptError

GROUPS = "document.querySelectorAll('#letter-list > li').length"


# --- subscriptions ----------------------------------------------------------------------------------------------------


def shown(page: Page, log: Log) -> None:
    go(page, "subscriptions")
    look(page)
    page.until(f"document.querySelectorAll('#subscription-rows tr').length === {len(log.subscriptions())}")


def test_a_subscription_is_paused_and_resumed(page: Page, log: Log) -> None:
    log.subscribe("billing", "orders.>", mode="shared").close()
    shown(page, log)
    buttons = "[...document.querySelectorAll('#subscription-rows button')].filter((each) => each.checkVisibility())"
    assert page.evaluate(f"{buttons}.map((each) => each.textContent)") == ["Pause", "Seek…", "Delete…"]
    press(page, "#subscription-rows", "Pause")
    page.until("document.getElementById('subscriptions-done').textContent === 'billing is paused'")
    page.until("document.querySelector('#subscription-rows .badge')?.textContent.startsWith('paused since ')")
    assert log.subscription("billing").paused_at is not None
    assert page.evaluate(f"{buttons}.map((each) => each.textContent)") == ["Resume", "Seek…", "Delete…"]
    press(page, "#subscription-rows", "Resume")
    page.until("document.getElementById('subscriptions-done').textContent === 'billing goes on'")
    page.until("!document.querySelector('#subscription-rows .badge')")
    assert log.subscription("billing").paused_at is None


def test_a_shared_subscription_names_its_consumers(page: Page, log: Log) -> None:
    with log.subscribe("billing", "orders.>", mode="shared"):
        shown(page, log)
        page.until("document.querySelector('#subscription-rows td:nth-child(6)').textContent !== '–'")
        [one] = log.subscription("billing").consumers
        assert page.text("#subscription-rows td:nth-child(6)") == one


def test_two_consumers_unfold_and_stay_unfolded(page: Page, log: Log, server: Any) -> None:
    with (
        log.subscribe("billing", "orders.>", mode="shared"),
        headwater.open(server.url) as other,
        other.subscribe("billing", "orders.>", mode="shared"),
    ):
        shown(page, log)
        page.until("document.querySelector('.consumers summary')?.textContent === '2 consumers'")
        page.click(".consumers summary")
        assert texts(page, ".consumers li") == log.subscription("billing").consumers
        log.publish("orders.new", 1)
        look(page)
        page.until("document.querySelector('#subscription-rows td:nth-child(3)').textContent === '1'")
        assert page.evaluate("document.querySelector('.consumers').open") is True


def test_a_seek_to_the_end_says_what_would_be_skipped(page: Page, log: Log) -> None:
    log.publish_many(("orders.new", {"n": n}) for n in range(8))
    with log.subscribe("billing", "orders.>", mode="shared", backoff=3_600) as billing:
        first, second = billing.fetch(2)
        first.ack()
        second.nack()
    shown(page, log)
    press(page, "#subscription-rows", "Seek…")
    page.until("document.getElementById('seek-would').textContent.includes('1 settled before, delivered again')")
    page.evaluate("document.getElementById('seek-kind').value = 'new'")
    page.evaluate("document.getElementById('seek-kind').dispatchEvent(new Event('change'))")
    page.until("document.getElementById('seek-would').textContent.includes('7 not settled yet, never delivered')")
    assert "0 settled before" in page.text("#seek-would")
    assert texts(page, "#seek-would .seq") == ["#2", "#3", "#4", "#5", "#6"]
    assert page.text("#seek-would code") == '{"n":1}'
    page.click("#ask-no")
    assert log.subscription("billing").lag == 7


def test_what_would_be_refused_is_said_in_the_preview(page: Page, log: Log) -> None:
    with log.subscribe("billing", "orders.>"):
        shown(page, log)
        press(page, "#subscription-rows", "Seek…")
        page.until("!document.getElementById('ask-problem').hidden")
        assert "active" in page.text("#ask-problem") or "held" in page.text("#ask-problem")
        assert page.evaluate("document.getElementById('ask-yes').disabled") is True
        page.click("#ask-no")
        press(page, "#subscription-rows", "Delete…")
        page.click("#ask-yes")
        page.until("!document.getElementById('subscriptions-problem').hidden")


# --- dead letters -----------------------------------------------------------------------------------------------------


def test_subscriptions_can_be_filtered_and_what_is_left_out_is_said(page: Page, log: Log) -> None:
    for number in range(201):
        log.subscribe(f"worker-{number}", "orders.>" if number else "mails.>").close()
    log.publish("orders.new", 1)
    go(page, "subscriptions")
    look(page)
    page.until("document.querySelectorAll('#subscription-rows tr').length === 200")
    page.until("document.getElementById('subscriptions-note').textContent === 'the 200 with the greatest lag of 201'")
    page.fill("subscription-filter", "mails")
    page.until("document.querySelectorAll('#subscription-rows tr').length === 1")
    assert page.text("#subscription-rows strong") == "worker-0"
    assert page.text("#subscriptions-note") == ""
    page.fill("subscription-filter", "nothing")
    page.until("document.getElementById('no-subscriptions').checkVisibility()")
    assert page.text("#no-subscriptions") == "No subscription contains nothing"


def kill(page: Page, log: Log, id: str, errors: list[str], groups: int) -> None:
    """Dead letters with these errors, shown in so many groups."""
    with log.subscribe(id, f"{id}.*", max_attempts=1) as subscription:
        log.publish_many((f"{id}.new", {"number": number}) for number in range(len(errors)))
        for message, error in zip(subscription.fetch(len(errors)), errors, strict=True):
            message.nack(error=error)
    go(page, "dead-letters")
    look(page)
    page.until(f"{GROUPS} === {groups}")


def run_failing(log: Log, id: str, errors: list[Exception]) -> None:
    """A handler that raises each of these once."""

    @log.on(f"{id}.*", id=id, max_attempts=1)
    def on_order(message: Any) -> None:
        if message.data < len(errors):
            raise errors[message.data]
        log.stop()

    log.publish_many((f"{id}.new", number) for number in range(len(errors) + 1))
    log.run()


def group(at: int) -> str:
    return f"#letter-list > li:nth-child({at})"


def answered(page: Page, says: str, yes: str) -> None:
    page.until("document.getElementById('ask').open")
    assert says in page.text("#ask-text")
    assert page.text("#ask-yes") == yes
    page.click("#ask-yes")


def test_letters_are_grouped_by_error_with_counts_and_stack(page: Page, log: Log) -> None:
    run_failing(log, "billing", [*(KeyError(f"order {n}") for n in range(60)), *2 * [TimeoutError("the bank")]])
    go(page, "dead-letters")
    look(page)
    page.until(f"{GROUPS} === 2")
    assert page.text("#letters-note") == "62 letters in 2 groups"
    assert texts(page, "#letter-list .group .number") == ["60", "2"]
    assert texts(page, "#letter-list .group .error") == ["KeyError: 'order #'", "TimeoutError: the bank"]
    assert page.text(f"{group(2)} .whose").startswith("billing · ")
    assert page.text(f"{group(2)} .whose").endswith("on_order")
    page.click(f"{group(1)} summary")
    page.until(f"document.querySelectorAll('{group(1)} .letter').length === 50")
    page.until(f"document.querySelector('{group(1)} .stack').textContent.endsWith(\"KeyError: 'order 59'\\n\")")
    assert "in on_order" in page.text(f"{group(1)} .stack")
    press(page, group(1), "Show more")
    page.until(f"document.querySelectorAll('{group(1)} .letter').length === 60")
    page.click(f"{group(1)} .letter:nth-child(3) summary")
    page.until(f"document.querySelectorAll('{group(1)} .letter pre').length === 3")
    error, stack, data = texts(page, f"{group(1)} .letter pre")
    assert error == "KeyError: 'order 2'"
    assert stack.startswith("Traceback")
    assert json.loads(data) == 2
    press(page, f"{group(1)} .letter:nth-child(3)", "Show message")
    page.until("document.getElementById('message-heading').textContent === 'Message #3'")
    page.until("document.querySelector('#message-body pre')")
    assert not page.evaluate("document.getElementById('page-messages').hidden")


def test_a_group_shows_its_letters_among_many_others(page: Page, log: Log) -> None:
    kill(page, log, "billing", [f"{'KeyError' if number % 3 else 'TimeoutError'}: x" for number in range(180)], 2)
    look(page)  # they became letters one by one
    page.until(f"document.querySelector('{group(2)} .number').textContent === '60'")
    page.click(f"{group(2)} summary")
    page.until(f"document.querySelectorAll('{group(2)} .letter').length === 50")
    press(page, group(2), "Show more")
    page.until(f"document.querySelectorAll('{group(2)} .letter').length === 60")
    page.until(f"!document.querySelector('{group(2)} .letters + button').checkVisibility()")


def test_letters_that_cannot_be_read_say_so_until_they_can(
    page: Page, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise CorruptError("the letters are damaged")

    go(page, "dead-letters")
    with monkeypatch.context() as patched:
        patched.setattr(DeadLetters, "groups", fail)
        kill(page, log, "billing", ["KeyError: 1"], 0)
        page.until("document.getElementById('letters-problem').textContent.includes('damaged')")
        assert page.evaluate("document.getElementById('overview-problem').hidden") is True
    look(page)
    page.until(f"{GROUPS} === 1 && document.getElementById('letters-problem').hidden")


def test_a_group_is_redriven_after_a_dry_run(page: Page, log: Log) -> None:
    kill(page, log, "billing", ["KeyError: 1", "KeyError: 2", "TimeoutError: x"], 2)
    page.click(f"{group(1)} summary")
    page.until(f"document.querySelectorAll('{group(1)} .letter').length === 2")
    press(page, group(1), "Redrive group…")
    page.until("document.getElementById('ask').open")
    assert log.dead_letters.statistics().redriving == 0  # the dry run has changed nothing
    answered(page, "2 dead letters would be delivered again.", "Redrive 2")
    page.until("document.getElementById('letters-done').textContent === '2 letters redriven'")
    assert [letter.redriving for letter in log.dead_letters.list()] == [True, True, False]
    page.until(f"document.querySelector('{group(1)} .badge')?.textContent === '2 redriving'")
    press(page, group(1), "Redrive group…")
    page.until("document.getElementById('ask').open")
    assert page.evaluate("document.getElementById('ask-yes').disabled") is True  # nothing is left to redrive
    page.click("#ask-no")


def test_selected_letters_are_redriven_and_what_cannot_be_says_why(page: Page, log: Log) -> None:
    kill(page, log, "billing", ["KeyError: 1", "KeyError: 2", "KeyError: 3"], 1)
    kill(page, log, "mails", ["ValueError"], 2)
    log.delete_subscription("mails")
    for at in (1, 2):
        page.click(f"{group(at)} summary")
        page.until(f"document.querySelector('{group(at)} .letter')")
    page.click(f"{group(1)} .letter:nth-child(2) input")
    page.click(f"{group(2)} .letter input")
    page.until("document.getElementById('chosen-note').textContent === '2 letters selected'")
    press(page, "#chosen", "Redrive selected…")
    page.until("document.getElementById('ask').open")
    assert "1 letter would stay: subscription 'mails' is gone" in page.text("#ask-text")
    answered(page, "1 dead letter would be delivered again.", "Redrive 1")
    page.until("document.getElementById('letters-done').textContent === '1 letter redriven, 1 letter stayed'")
    assert [letter.redriving for letter in log.dead_letters.list()] == [False, True, False, False]
    assert page.evaluate("document.getElementById('chosen').hidden") is True
    press(page, "#letters", "Redrive all…")
    page.until("document.getElementById('ask').open")
    assert texts(page, "#ask-text .facts dt") == ["billing", "mails"]
    answered(page, "2 dead letters would be delivered again.", "Redrive 2")
    page.until("document.getElementById('letters-done').textContent === '2 letters redriven, 1 letter stayed'")


def test_a_group_and_selected_letters_are_purged_after_a_dry_run(page: Page, log: Log) -> None:
    kill(page, log, "billing", ["KeyError: 1", "KeyError: 2", "TimeoutError", "TimeoutError", "TimeoutError"], 2)
    page.click(f"{group(1)} summary")
    page.until(f"document.querySelectorAll('{group(1)} .letter').length === 3")
    page.click(f"{group(1)} .letter:nth-child(2) input")
    press(page, "#chosen", "Purge selected…")
    answered(page, "1 dead letter would be deleted.", "Purge 1")
    page.until("document.getElementById('letters-done').textContent === '1 letter purged'")
    page.until(f"document.querySelectorAll('{group(1)} .letter').length === 2")
    press(page, group(1), "Purge group…")
    answered(page, "2 dead letters would be deleted.", "Purge 2")
    page.until(f"{GROUPS} === 1")
    assert log.dead_letters.statistics().by_error == {"KeyError: 1": 1, "KeyError: 2": 1}
