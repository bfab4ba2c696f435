"""Dead letters out to JSON lines and back."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

import headwater
from headwater import Log, ManualClock
from headwater.errors import InvalidDataError


def dead_letter_two(log: Log) -> None:
    log.publish(
        "a.b", {"deep": [1, "é"]}, id="given", type="T", headers={"h": 1}, from_="me", priority=3, delay=0, ttl=9
    )
    log.publish("c", None)
    with log.subscribe("s", ">", max_attempts=1) as subscription:
        first, second = subscription.fetch()
        first.nack(error="went wrong\nTraceback …")
        second.reject("no use")


def plain(log: Log) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.dead_letters.export()]


def test_a_line_tells_everything(log: Log) -> None:
    dead_letter_two(log)
    first, second = plain(log)
    assert first["message"]["data"] == {"deep": [1, "é"]}
    assert (first["reason"], first["error"], first["attempts"]) == ("max_attempts", "went wrong\nTraceback …", 1)
    assert (first["message"]["id"], first["message"]["type"], first["message"]["from"]) == ("given", "T", "me")
    assert (second["reason"], second["message"]["topic"]) == ("rejected", "c")


def test_export_takes_a_filter(log: Log) -> None:
    dead_letter_two(log)
    assert [json.loads(line)["message"]["topic"] for line in log.dead_letters.export(reason="rejected")] == ["c"]


def test_out_and_back_is_the_same_but_for_the_ids(log: Log) -> None:
    dead_letter_two(log)
    before, lines = plain(log), list(log.dead_letters.export())
    log.dead_letters.purge()
    assert log.dead_letters.import_(lines) == 2
    assert plain(log) == before
    assert [letter.id for letter in log.dead_letters.list()] == [3, 4]


def test_imported_letters_can_be_redriven(log: Log) -> None:
    dead_letter_two(log)
    lines = list(log.dead_letters.export())
    log.dead_letters.purge()
    log.retain(">", max_count=0)
    log.run_maintenance()
    log.dead_letters.import_(lines)
    assert log.dead_letters.redrive().redriven == 2
    subscription = log.subscribe("s", ">", max_attempts=1)
    assert [message.data for message in subscription.fetch()] == [{"deep": [1, "é"]}, None]


def test_letters_of_another_log_are_redriven_to_a_topic_only(log: Log, clock: ManualClock) -> None:
    """A delivery goes by seq, and here that seq is another message."""
    with headwater.open("memory:", clock=clock, maintenance_interval=None, heartbeats=False) as elsewhere:
        dead_letter_two(elsewhere)
        lines = list(elsewhere.dead_letters.export(reason="rejected"))
    log.publish_many([("a", "mine"), ("a", "mine too")])
    subscription = log.subscribe("s", ">")
    subscription.ack_many(subscription.fetch())
    log.dead_letters.import_(lines)
    redriven = log.dead_letters.redrive()
    assert (redriven.redriven, list(redriven.failed)) == (0, [1])
    assert subscription.fetch() == []
    assert log.dead_letters.redrive(to_topic="again").redriven == 1
    assert [(message.topic, message.data) for message in subscription.fetch()] == [("again", None)]


def test_a_letter_of_another_log_is_known_by_its_topic_too(log: Log, clock: ManualClock) -> None:
    with headwater.open("memory:", clock=clock, maintenance_interval=None, heartbeats=False) as elsewhere:
        dead_letter_two(elsewhere)
        lines = list(elsewhere.dead_letters.export(reason="max_attempts"))
    log.publish("orders.new", "ours", id="given")
    log.subscribe("s", ">").close()
    log.dead_letters.import_(lines)
    assert log.dead_letters.redrive().redriven == 0


def test_empty_lines_do_not_matter(log: Log) -> None:
    dead_letter_two(log)
    first, second = log.dead_letters.export()
    assert log.dead_letters.import_(["", first + "\n", "   \n", second, ""]) == 2
    assert log.dead_letters.import_([]) == 0


BROKEN = ["{", "[]", "5", "null", '{"subscription": "s"}', '{"message": {}}']


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_line_is_named_and_nothing_is_imported(log: Log, broken: str) -> None:
    dead_letter_two(log)
    first, second = log.dead_letters.export()
    with pytest.raises(InvalidDataError) as refused:
        log.dead_letters.import_([first, "", broken, second])
    assert refused.value.where == "line 3"
    assert len(log.dead_letters.list()) == 2


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize(
    "change",
    [
        {"died_at": "yesterday"},
        {"died_at": 5},
        {"message": 5},
        {"attempts": "many"},
        {"subscription": 5},
        {"reason": "boredom"},
        {"redrives": "x"},
        {"message.seq": "x"},
        {"message.topic": "a..b"},
        {"message.topic": 5},
        {"message.id": 5},
        {"message.priority": "x"},
        {"subscription": "x" * 129},
        {"attempts": 2**64},
        {"redrives": -1},
        {"message.seq": -1},
        {"message.id": "x" * 129},
        {"message.type": "x" * 257},
        {"message.from": "x" * 257},
        {"message.headers": {"x": "x" * 65_536}},
        {"message.data": "x" * 1_048_576},
        {"message.priority": 10**9},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_line_with_a_value_that_cannot_be_is_named(log: Log, change: dict[str, Any]) -> None:
    dead_letter_two(log)
    line = plain(log)[0]
    for name, value in change.items():
        *inside, name = name.split(".")
        (line["message"] if inside else line)[name] = value
    with pytest.raises(InvalidDataError) as refused:
        log.dead_letters.import_([json.dumps(line)])
    assert refused.value.where == "line 1"
    assert len(log.dead_letters.list()) == 2


def test_what_a_line_tells_of_its_failure_is_cut_and_its_size_counted(log: Log) -> None:
    dead_letter_two(log)
    line = plain(log)[0]
    line |= {"error": "x" * 100_000, "stack": "y" * 100_000, "handler": "z" * 1_000}
    line["message"]["size"] = 10**15
    log.dead_letters.import_([json.dumps(line)])
    letter = log.dead_letters.list()[-1]
    reported = (letter.error or "", letter.stack or "", letter.handler or "")
    assert [len(text) for text in reported] == [2_000, 8_000, 256]
    assert letter.message.size == len(letter.message.raw)


def test_lines_come_in_by_pages(log: Log) -> None:
    """Of a page with a broken line nothing is imported; the pages before it are, and the error says so."""
    dead_letter_two(log)
    first, _ = log.dead_letters.export()
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for taken in range(1, 1_201):  # noqa: B007
            yield first

    assert log.dead_letters.import_(lines()) == taken == 1_200
    with pytest.raises(
        InvalidDataError, match="The lines before line 1001 are imported; fix the line and import the rest"
    ):
        log.dead_letters.import_([*lines(), "{"])
    assert log.dead_letters.statistics().total == 2 + 1_200 + 1_000
