"""What people see of messages: a search, one message with its deliveries, and what a seek would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater import Log, ManualClock
from headwater.broker import browse
from headwater.broker.flow import run_blocking
from headwater.delivery.filters import parse_where
from headwater.errors import SubscriptionActiveError, UnknownSubscriptionError
from headwater.ports.records import Selection
from headwater.topics import parse_pattern

pytestmark = pytest.mark.usefixtures("engine_here")


def search(log: Log, pattern: str = ">", where: str | None = None, **options: Any) -> browse.FoundMessages:
    selection = Selection(parse_pattern(pattern), where=None if where is None else parse_where(where))
    return run_blocking(browse.search(log._core.engine, selection, **options))  # type: ignore[attr-defined]


def seqs(found: browse.FoundMessages) -> list[int]:
    return [each.seq for each in found.messages]


# --- searching --------------------------------------------------------------------------------------------------------


def test_pages_from_the_newest_down_and_from_a_position_up(log: Log) -> None:
    log.publish_many([("a", n, {"type": "T"}) for n in range(10)])
    page = search(log, limit=4)
    assert (seqs(page), page.looked_to, page.more) == ([10, 9, 8, 7], 6, True)
    assert (page.messages[0].topic, page.messages[0].preview, page.messages[0].type) == ("a", "9", "T")
    page = search(log, limit=4, upto=page.looked_to)
    assert seqs(page) == [6, 5, 4, 3]
    page = search(log, limit=4, upto=page.looked_to)
    assert (seqs(page), page.more) == ([2, 1], False)
    page = search(log, limit=4, after=3, newest_first=False)
    assert (seqs(page), page.looked_to, page.more) == ([4, 5, 6, 7], 7, True)
    assert search(log, after=10).messages == []


def test_by_pattern_header_where_and_time(log: Log, clock: ManualClock) -> None:
    log.publish("orders.new", {"n": 1}, headers={"tenant": "acme"})
    clock.advance(60)
    since_ms = clock.now_ms()
    log.publish("orders.new", {"n": 2}, headers={"tenant": "other"})
    log.publish("mails.new", {"n": 3}, type="Mail")
    clock.advance(60)
    log.publish("orders.paid", {"n": 4})
    assert seqs(search(log, "orders.*")) == [4, 2, 1]
    assert seqs(search(log, where="headers.tenant == 'acme'")) == [1]
    assert seqs(search(log, where="type == 'Mail'")) == [3]
    assert seqs(search(log, where="data.n >= 2 and data.n < 4")) == [3, 2]
    assert seqs(search(log, since_ms=since_ms)) == [4, 3, 2]
    assert seqs(search(log, since_ms=since_ms, until_ms=since_ms + 1)) == [3, 2]


def test_a_search_that_finds_nothing_ends_says_how_far_it_looked_and_goes_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish_many([("a", n) for n in range(100)])
    monkeypatch.setattr(browse, "LOOK_SEQS", 30)
    monkeypatch.setattr(browse, "SEARCH_S", -1.0)  # one look
    first = search(log, "never")
    assert (seqs(first), first.looked_to, first.more) == ([], 70, True)
    second = search(log, "never", upto=first.looked_to)
    assert (second.looked_to, second.more) == (40, True)
    assert (search(log, "never", upto=30).looked_to, search(log, "never", upto=30).more) == (0, False)
    upwards = search(log, "never", newest_first=False)
    assert (upwards.looked_to, upwards.more) == (30, True)


def test_large_data_is_not_in_a_list(log: Log) -> None:
    log.publish("a", "x" * browse.PREVIEWED_BYTES_MAX)
    log.publish("a", "y" * 1_000)
    small, large = search(log).messages
    assert small.preview == '"' + "y" * (browse.PREVIEW_CHARS - 1)
    assert (large.preview, large.size) == (None, browse.PREVIEWED_BYTES_MAX + 2)


def test_what_retention_deleted_at_the_front_is_not_looked_at(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.publish_many([("a", n) for n in range(100)])
    log.retain("a", max_count=5)
    log.run_maintenance()
    monkeypatch.setattr(browse, "SEARCH_S", -1.0)
    monkeypatch.setattr(browse, "LOOK_SEQS", 10)
    found = search(log)
    assert (seqs(found), found.more) == ([100, 99, 98, 97, 96], False)
    assert search(log, newest_first=False, limit=1).messages[0].seq == 96
    gone = run_blocking(browse.inspect(log._core.engine, 17))  # type: ignore[attr-defined]
    assert (gone.message, gone.pruned) == (None, True)
    never = run_blocking(browse.inspect(log._core.engine, 170))  # type: ignore[attr-defined]
    assert (never.message, never.pruned) == (None, False)


# --- one message ------------------------------------------------------------------------------------------------------


def delivery(log: Log, seq: int) -> Callable[[str], browse.DeliveryInfo]:
    found = run_blocking(browse.inspect(log._core.engine, seq))  # type: ignore[attr-defined]
    by_id = {each.subscription: each for each in found.deliveries}
    return by_id.__getitem__


def test_the_state_of_a_message_in_each_subscription(log: Log, clock: ManualClock, mode: Any) -> None:
    log.publish_many([("a", {"n": n}) for n in range(4)])
    elsewhere = log.subscribe("elsewhere", "b", mode=mode)
    choosy = log.subscribe("choosy", "a", mode=mode, where="data.n == 3")
    s = log.subscribe("s", "a", mode=mode, backoff=60, jitter=0, max_attempts=2, ack_wait=30)
    settled, failed, flying = s.fetch(3)
    settled.ack()
    failed.nack()
    assert delivery(log, 1)("s").state == "settled"
    waiting = delivery(log, 2)("s")
    assert (waiting.state, waiting.attempts, waiting.due_ms) == ("waiting", 1, clock.now_ms() + 60_000)
    in_flight = delivery(log, 3)("s")
    assert (in_flight.state, in_flight.attempts) == ("in_flight", 1)
    assert in_flight.due_ms is not None
    assert in_flight.due_ms > clock.now_ms()
    info = log.subscription("s")
    assert in_flight.holder in [info.holder, *info.consumers]
    assert delivery(log, 4)("s").state == "undelivered"
    assert [delivery(log, seq)("choosy").state for seq in (3, 4)] == ["not_matching", "undelivered"]
    assert delivery(log, 3)("elsewhere").state == "not_matching"
    clock.advance(61)
    [again] = [each for each in s.fetch(10) if each.seq == 2]
    again.nack(error="KeyError: 'x'")
    found = run_blocking(browse.inspect(log._core.engine, 2))  # type: ignore[attr-defined]
    assert [(each.subscription, each.error) for each in found.dead_letters] == [("s", "KeyError: 'x'")]
    assert delivery(log, 2)("s").state == "dead"
    log.dead_letters.redrive()
    redriven = delivery(log, 2)("s")
    assert (redriven.state, redriven.redriving) == ("waiting", True)
    log.pause("s")
    assert delivery(log, 2)("s").paused
    for each in (s, choosy, elsewhere):
        each.close()
    assert flying.seq == 3
    log.seek("s", "first")
    assert delivery(log, 2)("s").state == "undelivered", "its dead letter is of an earlier delivery"


def test_the_consumer_of_a_shared_subscription_that_has_a_message_is_named(open_log: Any, clock: ManualClock) -> None:
    log, other = open_log(), open_log()
    log.publish_many([("a", n) for n in range(4)])
    first = log.subscribe("s", "a", mode="shared", backoff=0, jitter=0)
    [name] = log.subscription("s").consumers
    second = other.subscribe("s", "a", mode="shared", backoff=0, jitter=0)
    [other_name] = {*log.subscription("s").consumers} - {name}
    mine, theirs, failed = first.fetch(1)[0], second.fetch(1)[0], first.fetch(1)[0]
    assert [delivery(log, each.seq)("s").holder for each in (mine, theirs)] == [name, other_name]
    failed.nack()
    assert delivery(log, failed.seq)("s").holder is None, "it waits for its next attempt"
    [again] = second.fetch(1)
    assert (again.seq, delivery(log, again.seq)("s").holder) == (failed.seq, other_name)
    clock.advance(16)  # longer than the lease of a consumer, which has no heartbeat here
    gone = delivery(log, mine.seq)("s")
    assert (gone.state, gone.holder) == ("in_flight", None), "a consumer that shows no life is not named"


def test_rights_decide_what_is_seen_of_a_message(log: Log) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a") as s:
        s.fetch(1)[0].reject("no")
    engine = log._core.engine  # type: ignore[attr-defined]
    no: Callable[[Any], bool] = lambda _: False  # noqa: E731
    hidden = run_blocking(browse.inspect(engine, 1, may_read=no))
    assert (hidden.message, hidden.pruned, hidden.deliveries, hidden.dead_letters) == (None, False, [], [])
    bare = run_blocking(browse.inspect(engine, 1, may_use=no, manages=no))
    assert bare.message is not None
    assert (bare.deliveries, bare.dead_letters) == ([], [])


# --- what a seek would do ---------------------------------------------------------------------------------------------


def preview(log: Log, start: Any) -> browse.SeekPreview:
    return run_blocking(browse.preview_seek(log._core.engine, "s", start))  # type: ignore[attr-defined]


def test_a_preview_counts_what_comes_again_and_what_is_skipped(log: Log, mode: Any) -> None:
    log.publish_many([(topic, n) for n in range(10) for topic in ("a", "b")])  # a: the odd seqs
    with log.subscribe("s", "a", mode=mode, backoff=60) as s:
        fetched = s.fetch(6)  # 1, 3, 5, 7, 9, 11
        for each in fetched:
            if each.seq in (1, 3, 7, 9):
                each.ack()
        fetched[2].nack()  # 5 waits; 11 is in flight
    first = preview(log, "first")
    assert (first.sequence_id, first.again, first.skipped) == (0, 4, 0)
    assert [each.seq for each in first.next] == [1, 3, 5, 7, 9]
    after_three = preview(log, 4)
    assert (after_three.again, after_three.skipped) == (2, 0)
    after_eight = preview(log, 9)
    assert (after_eight.again, after_eight.skipped) == (1, 1)
    assert [each.seq for each in after_eight.first_skipped] == [5]
    new = preview(log, "new")
    assert (new.again, new.skipped, new.next) == (0, 6, [])
    assert [each.seq for each in new.first_skipped] == [5, 11, 13, 15, 17]
    assert not (new.again_is_least)
    assert not (new.skipped_is_least)
    assert log.subscription("s").lag == 6, "a preview moves nothing"
    assert log.seek("s", "first") == 0
    assert log.subscription("s").lag == 6 + first.again


def test_a_preview_of_much_says_at_least(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.publish_many([("a", n) for n in range(20)])
    log.subscribe("s", "a").close()
    monkeypatch.setattr(browse, "LAG_LOOKED_AT_MAX", 7)
    new = preview(log, "new")
    assert (new.skipped, new.skipped_is_least) == (7, True)


def test_a_preview_is_refused_as_the_seek_would_be(log: Log) -> None:
    with pytest.raises(UnknownSubscriptionError):
        preview(log, "first")
    with log.subscribe("s", "a"), pytest.raises(SubscriptionActiveError):
        preview(log, "first")
