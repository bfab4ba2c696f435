"""Figures over time in the console: of days that passed before the server that shows them was started."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from browser import Page
from served import ServerOnThread
from steps import look, texts

import headwater
from headwater.broker.history import MINUTE_MS, RINGS
from headwater.errors import CorruptError
from headwater.ports.records import Sample, SubscriptionRecord, SubscriptionSample, SubscriptionSpec
from headwater.server import methods
from headwater.stores.sqlite import SqliteStore

NAMES = ("billing", "mails", "search")
DOWN = range(20, 30)  # minutes ago: no server ran


def remember(path: Path, minutes: Sequence[int], *, names: Sequence[str] = NAMES) -> None:
    """A log in which a server recorded figures so many minutes ago: 120 messages and 60 acks a minute."""
    now_ms = int(time.time() * 1000)
    store = SqliteStore(path)
    with store.write() as writer:
        for name in names:
            writer.save_subscription(SubscriptionRecord(name, SubscriptionSpec(f"{name}.>"), created_ms=0, active_ms=0))
        for ago in minutes:
            at_ms = now_ms - ago * MINUTE_MS
            each = {name: SubscriptionSample(100 * at, 60 * (20_000 - ago)) for at, name in enumerate(names, 1)}
            sample = Sample(at_ms, 120 * (20_000 - ago), 7, 50 * 2**20, 4 * 2**20, each)
            for step_ms, rows in RINGS:
                writer.save_sample(step_ms, at_ms // step_ms % rows, sample)
    store.close()


CHARTS = ["Published per second", "Acked per second", "Lag", "Dead letters", "Size of the log", "Write-ahead log"]


def chart(title: str) -> str:
    return f"[...document.querySelectorAll('#charts .figure')][{CHARTS.index(title)}]"


def lines(page: Page, title: str) -> list[int]:
    """How many parts the line of each series has."""
    count = "(each) => each.querySelectorAll('polyline').length"
    return list(page.evaluate(f"[...{chart(title)}.querySelectorAll('.series')].map({count})"))


def legend(page: Page, title: str) -> dict[str, str]:
    pairs = "(each) => [each.children[0].textContent, each.children[1].textContent]"
    return dict(page.evaluate(f"[...{chart(title)}.querySelectorAll('.legend li')].map({pairs})"))


def colours(page: Page, title: str) -> dict[str, str]:
    pairs = "(each) => [each.children[0].textContent, getComputedStyle(each, '::before').backgroundColor]"
    return dict(page.evaluate(f"[...{chart(title)}.querySelectorAll('.legend li')].map({pairs})"))


@pytest.fixture
def page(tmp_path: Path, serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]) -> Page:
    """Two hours of minutes with a gap in it."""
    remember(tmp_path / "events.db", [ago for ago in range(1, 121) if ago not in DOWN])
    opened = open_page(serve().page)
    size = {"width": 1400, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    opened.command("Emulation.setDeviceMetricsOverride", **size)
    opened.until(f"{chart('Lag')}.querySelector('.series')")
    return opened


def test_what_was_recorded_before_the_server_started_is_shown(page: Page) -> None:
    shown = "[...document.querySelectorAll('#charts .figure:not([hidden]) h2')].map((each) => each.textContent)"
    assert page.evaluate(shown) == CHARTS
    assert legend(page, "Lag").keys() == {*NAMES}
    assert page.text("#charts .figure:nth-child(4) .now") == "0"  # the server has taken a sample of its own by now
    assert page.evaluate(f"{chart('Size of the log')}.querySelector('.now').textContent").endswith("iB")


def test_the_time_without_a_server_is_a_gap(page: Page) -> None:
    assert lines(page, "Lag") == [2, 2, 2]  # of each subscription, before and after
    assert len(lines(page, "Dead letters")) == 1


def test_zooming_shows_a_day_and_a_week(page: Page) -> None:
    widths = {}
    for span in ("Hour", "Day", "Week"):
        page.evaluate(f"[...document.querySelectorAll('#zoom button')].find((e) => e.textContent === '{span}').click()")
        page.until(f"document.querySelector('#zoom [aria-pressed=true]').textContent === '{span}'")
        first = f"{chart('Dead letters')}.querySelector('polyline').getBBox()"
        page.until(f"{first}.width > 0 && {first}.width !== {widths.get('before', 0)}")
        widths["before"] = widths[span] = page.evaluate(f"{first}.width")
    assert widths["Week"] < widths["Day"] < widths["Hour"]  # two hours are a small part of a week
    axis = f"[...{chart('Lag')}.querySelectorAll('.axes text')].map((each) => each.textContent)"
    assert any(text[:1].isdigit() and text[-3:].isalpha() for text in page.evaluate(axis))  # days: 17 Nov


def point(page: Page, title: str, share: float) -> None:
    box = f"{chart(title)}.querySelector('.chart').getBoundingClientRect()"
    x, y, width = page.evaluate(f"(({{ x, y, width }}) => [x, y, width])({box})")
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=x + share * width, y=y + 40)


def test_the_pointer_reads_the_values_of_all_charts_at_that_moment(page: Page) -> None:
    point(page, "Lag", 0.5)
    page.until(f"{chart('Lag')}.querySelector('.now').textContent.includes(':')")
    assert legend(page, "Lag") == {"billing": "100", "mails": "200", "search": "300"}
    assert legend(page, "Acked per second") == dict.fromkeys(NAMES, "1/s")
    when = page.evaluate(f"{chart('Lag')}.querySelector('.now').textContent")
    others = page.evaluate("[...document.querySelectorAll('#charts .now')].map((each) => each.textContent)")
    assert all(text.startswith(when) for text in others)
    assert others[0].endswith("2/s")
    assert others[3].endswith("7")
    assert page.evaluate("document.querySelectorAll('#charts .cursor line').length") == 6
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.until("document.querySelectorAll('#charts .cursor line').length === 0")


def test_the_keyboard_reads_them_too(page: Page) -> None:
    page.evaluate(f"{chart('Lag')}.querySelector('.chart').focus()")
    for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        for kind in ("keyDown", "keyUp"):
            page.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)
    label = f"{chart('Lag')}.querySelector('.chart').getAttribute('aria-label')"
    page.until(f"/^Lag at .*: billing 100, mails 200, search 300$/.test({label})")


def test_a_subscription_keeps_its_colour(page: Page, tmp_path: Path) -> None:
    before = colours(page, "Lag")
    assert len({*before.values()}) == 3
    assert colours(page, "Acked per second") == before
    url = page.evaluate("location.origin").replace("http", "ws")
    with headwater.open(url) as log:
        log.delete_subscription("billing")
    page.evaluate("document.querySelector('#zoom button').click()")  # which looks again
    page.until(f"{chart('Lag')}.querySelectorAll('.legend li').length === 2")
    assert colours(page, "Lag") == {name: before[name] for name in ("mails", "search")}


def test_of_many_subscriptions_the_greatest_are_drawn(
    tmp_path: Path, serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]
) -> None:
    names = [f"s{number:02}" for number in range(1, 11)]
    remember(tmp_path / "events.db", range(1, 50), names=names)
    page = open_page(serve().page)
    page.until(f"{chart('Lag')}.querySelector('.series')")
    assert [*legend(page, "Lag")] == [*names[4:], "and 4 more"]
    assert len({*colours(page, "Lag").values()}) == 7


def test_a_new_log_says_when_there_will_be_something(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]
) -> None:
    page = open_page(serve().page)
    page.until("main.dataset.sight === 'all'")
    said = json.dumps("No figures yet: the server records them every minute.")
    page.until(f"{chart('Published per second')}.querySelector('.no-data').textContent === {said}")
    assert page.evaluate(f"{chart('Published per second')}.querySelector('.no-data').checkVisibility()")
    page.until(f"{chart('Size of the log')}.querySelector('circle, polyline')")  # a sample was taken at the start


def test_a_subscription_without_a_sample_is_not_called_missing(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]
) -> None:
    page = open_page(serve().page)
    said = f"{chart('Lag')}.querySelector('.no-data').textContent"
    page.until(f"{said} === 'There are no durable subscriptions yet.'")
    with headwater.open(page.evaluate("location.origin").replace("http", "ws")) as log:
        log.subscribe("billing", "orders.>").close()
    page.until("document.getElementById('subscription-count').textContent === '1'")
    page.evaluate("document.querySelector('#zoom button').click()")  # which looks again
    page.until(f"{said}.startsWith('No figures yet')")


def test_no_two_ticks_of_an_axis_of_two_days_read_the_same(page: Page) -> None:
    script = """
    import("/console/chart.js").then(({ timeTicks }) => {
      const until = new Date(2026, 0, 3, 21, 0).getTime();
      return timeTicks(until - 47 * 3600_000, until, 560).map(({ text }) => text);
    })
    """
    assert page.evaluate(script) == ["2 Jan", "12:00", "3 Jan", "12:00"]


def test_a_long_time_has_no_more_ticks_than_there_is_room_for(page: Page) -> None:
    script = """
    import("/console/chart.js").then(({ timeTicks }) => {
      const day = 86_400_000, until = new Date(2026, 10, 18).getTime();
      return [7, 14, 90, 400, 1500].map((days) => timeTicks(until - days * day, until, 276).length);
    })
    """
    assert all(2 <= count <= 4 for count in page.evaluate(script))


def test_an_axis_of_times_has_round_times(page: Page) -> None:
    script = """
    import("/console/chart.js").then(({ roundUp }) =>
      [0.4, 7, 420, 1_700, 45_000, 61_000, 3_000_000, 5e7, 86_400_000, 5e8].map((ms) => roundUp(ms, "ms")))
    """
    second, minute, hour, day = 1_000, 60_000, 3_600_000, 86_400_000
    expected = [0.5, 10, 500, 2 * second, minute, 2 * minute, hour, 24 * hour, day, 10 * day]
    assert page.evaluate(script) == expected


def no_history(*_: object) -> None:
    raise CorruptError("the figures are damaged")


def test_figures_that_cannot_be_read_say_so_until_they_can(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(methods, "log_history", no_history)
        page.click("[data-span=week]")
        page.until("!document.getElementById('over-time-problem').hidden")
        look(page)
        page.until("document.getElementById('over-time-problem').textContent.includes('damaged')")
        assert lines(page, "Lag") == []  # those of an hour are not called a week's
        assert texts(page, "#charts .no-data:not([hidden])") == 6 * ["No figures could be read."]
        assert page.evaluate("document.getElementById('overview-problem').hidden") is True
    page.click("[data-span=week]")
    page.until("document.getElementById('over-time-problem').hidden")
    assert len(lines(page, "Lag")) == len(NAMES)
