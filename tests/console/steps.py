"""What one does with the console, and what one waits for."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

from browser import Page

import headwater
from headwater import Log


def go(page: Page, name: str) -> None:
    """Show one of the console's pages."""
    page.evaluate(f"location.hash = {json.dumps(name)}")
    page.until(f"!document.getElementById('page-{name}').hidden")


def listening(page: Page) -> None:
    """Wait until the server has heard that the page listens: what is published from now on is shown."""
    page.until("document.getElementById('state').textContent === 'Connected'")
    go(page, "api")
    page.fill("method", "rpc.last_seq")
    page.click("#call-form button")  # calls are begun in order, and the page subscribed before
    page.until("document.querySelector('#answer pre')")
    go(page, "messages")


def publish(page: Page, topic: str, data: str) -> None:
    go(page, "messages")
    page.fill("topic", topic)
    page.fill("data", data)
    page.click("#publish-form button")


def look(page: Page) -> None:
    """The page looks at the log every two seconds, and when its tab comes to the front."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def dead_letter(page: Page, log: Log, id: str, count: int) -> Any:
    """A subscription whose messages are dead letters, and a page that has been made to look."""
    subscription = log.subscribe(id, f"{id}.*")
    log.publish_many((f"{id}.new", {"number": number}) for number in range(count))
    for message in subscription.fetch(count):
        message.reject("no address")
    look(page)
    return subscription


def push(page: Page, name: str, message: str = "", token: str | None = None) -> None:
    """Another row in a database of the test's, and the next version of it on the page's server."""
    with closing(sqlite3.connect("app.db")) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS orders (at TEXT DEFAULT CURRENT_TIMESTAMP)")
        database.execute("INSERT INTO orders DEFAULT VALUES")
    host = page.evaluate("location.host")
    headwater.sync("app.db", f"ws://{host}/{name}", message=message, token=token)


def press(page: Page, selector: str, text: str) -> None:
    """Click the button with this text."""
    page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector + ' button')})]"
        f".find((each) => each.textContent === {json.dumps(text)}).click()"
    )


def texts(page: Page, selector: str) -> list[str]:
    return list(
        page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")
    )
