"""Publishers that number their messages may send everything twice, and it is stored once."""

from typing import Any

import pytest
from fetched import everything
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until_it_waits

import headwater
from headwater import Log, ManualClock
from headwater.broker import maintenance
from headwater.broker.flow import Completion, run_blocking
from headwater.broker.publish import PublisherBatch, make_drafts, submit_drafts
from headwater.delivery.publishing import Receipt
from headwater.errors import ClosedError, DiskFullError, InvalidStateError
from headwater.ports.records import Appended

pytestmark = pytest.mark.usefixtures("engine_here")

TIME_LIMIT_S = 30
DAY_MS = 24 * 3_600_000  # how long receipts are kept, as long as ids


def begin(
    log: Any, publisher: str | None, first: int, *data: Any, confirmed: int = 0, topic: str = "a"
) -> Completion[Appended]:
    """Send a frame; data that is a pair has options with it."""
    messages = [(topic, *each) if isinstance(each, tuple) else (topic, each) for each in data]
    numbered = None if publisher is None else PublisherBatch(publisher, first, confirmed)
    return submit_drafts(log._core.engine, make_drafts(messages, 0), numbered)


def send(log: Any, publisher: str | None, first: int, *data: Any, **options: Any) -> tuple[list[int], set[int]]:
    """The seqs, and the positions of what was known before."""
    completion = begin(log, publisher, first, *data, **options)
    assert completion.wait(TIME_LIMIT_S)
    appended = completion.result()
    return appended.seqs, set(appended.duplicates)


def receipts(log: Any, publisher: str) -> list[Receipt]:
    with log._core.engine.store.read() as reader:
        found: list[Receipt] = reader.receipts(publisher, 1, 10_000)
        return found


def stored(log: Log) -> list[Any]:
    return [message.data for message in everything(log)]


# --- sent again ---------------------------------------------------------------------------------------------------


def test_what_is_sent_again_keeps_its_seqs(log: Log) -> None:
    assert send(log, "p", 1, "one", "two", "three") == ([1, 2, 3], set())
    assert send(log, "p", 1, "one", "two", "three") == ([1, 2, 3], {0, 1, 2})
    assert send(log, "p", 2, "two") == ([2], {0})
    assert stored(log) == ["one", "two", "three"]
    assert log.last_seq() == 3


def test_of_what_is_partly_new_only_that_is_stored(log: Log) -> None:
    send(log, "p", 3, "three", "four")
    log.publish("b", "somebody else")
    assert send(log, "p", 2, "two", "three", "four", "five") == ([4, 1, 2, 5], {1, 2})
    assert send(log, "p", 1, "one", "two", "three", "four", "five") == ([6, 4, 1, 2, 5], {1, 2, 3, 4})
    assert send(log, "p", 1, "one", "two", "three", "four", "five") == ([6, 4, 1, 2, 5], {0, 1, 2, 3, 4})


def test_a_part_sent_again_takes_no_receipt_from_the_rest(log: Log) -> None:
    """Frames are cut anew when they are sent again: this one ends in the middle of one that was stored."""
    send(log, "p", 3, "three", "four", "five", "six")
    assert send(log, "p", 1, "one", "two", "three", "four") == ([5, 6, 1, 2], {2, 3})
    assert send(log, "p", 5, "five", "six") == ([3, 4], {0, 1})


def test_without_numbers_everything_is_new(log: Log) -> None:
    assert send(log, None, 0, "one") == ([1], set())
    assert send(log, None, 0, "one") == ([2], set())
    assert receipts(log, "") == []


def test_an_empty_frame(log: Log) -> None:
    assert send(log, "p", 1) == ([], set())
    assert receipts(log, "p") == []


def test_two_publishers_do_not_mix(log: Log) -> None:
    assert send(log, "p", 1, "p1", "p2") == ([1, 2], set())
    assert send(log, "q", 1, "q1", "q2", confirmed=3) == ([3, 4], set())
    assert send(log, "p", 1, "p1", "p2") == ([1, 2], {0, 1})
    assert stored(log) == ["p1", "p2", "q1", "q2"]


def test_what_retention_took_is_not_stored_again(log: Log) -> None:
    send(log, "p", 1, "one", "two")
    log.retain("a", max_count=0)
    log.run_maintenance()
    assert stored(log) == []
    assert send(log, "p", 1, "one", "two", "three") == ([1, 2, 3], {0, 1})
    assert stored(log) == ["three"]


def test_the_log_remembers_over_a_reopen(open_log: Any) -> None:
    first = open_log()
    send(first, "p", 1, "one", "two")
    first.close()
    second = open_log()
    assert send(second, "p", 1, "one", "two", "three") == ([1, 2, 3], {0, 1})
    assert send(open_log(), "p", 3, "three") == ([3], {0}), "and in another process"


def test_frames_that_follow_each_other_unanswered(log: Log) -> None:
    """The same frame over two connections, both at once: the second finds what the first has stored."""
    completions = [
        begin(log, "p", 1, "one", "two"),
        begin(log, "p", 1, "one", "two"),
        begin(log, "p", 2, "two", "three"),
    ]
    assert all(completion.wait(TIME_LIMIT_S) for completion in completions)
    assert [completion.result().seqs for completion in completions] == [[1, 2], [1, 2], [2, 3]]
    assert stored(log) == ["one", "two", "three"]


# --- with ids -----------------------------------------------------------------------------------------------------


def test_ids_and_numbers_each_do_their_part(log: Log) -> None:
    log.publish("a", "x", id="x")
    assert send(log, "p", 1, "one") == ([2], set())
    assert send(log, "p", 1, "one", ("x", {"id": "x"}), "three") == ([2, 1, 3], {0, 1})
    assert send(log, "p", 1, "one", ("x", {"id": "x"}), "three", "four") == ([2, 1, 3, 4], {0, 1, 2})
    assert send(log, "q", 1, ("x", {"id": "x"})) == ([1], {0}), "an id is the log's, not a publisher's"
    assert stored(log) == ["x", "one", "three", "four"]


def test_the_same_id_twice_in_a_frame(log: Log) -> None:
    frame = [("y", {"id": "y"}), ("y", {"id": "y"}), "three"]
    assert send(log, "p", 1, *frame) == ([1, 1, 2], {1})
    assert send(log, "p", 1, *frame) == ([1, 1, 2], {0, 1, 2})
    assert stored(log) == ["y", "three"]


class Model:
    """Numbers and ids, remembered for ever."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.by_number: dict[tuple[str, int], int] = {}
        self.by_id: dict[str, int] = {}

    def send(self, publisher: str, first: int, ids: list[str | None]) -> tuple[list[int], set[int]]:
        seqs, repeats = [], set()
        for at, id in enumerate(ids):
            known = self.by_number.get((publisher, first + at), None if id is None else self.by_id.get(id))
            if known is not None:
                repeats.add(at)
            else:
                self.last_seq = known = self.last_seq + 1
            seqs.append(self.by_number.setdefault((publisher, first + at), known))
            if id is not None:
                self.by_id.setdefault(id, known)
        return seqs, repeats


frames = st.lists(st.tuples(st.sampled_from(["p", "q"]), st.integers(1, 12), st.integers(1, 8)), max_size=15)
ids_by_number = st.dictionaries(st.integers(1, 20), st.sampled_from(["x", "y"]), max_size=6)


@settings(max_examples=50, deadline=None)
@given(script=frames, ids=ids_by_number)
def test_every_number_is_stored_once_however_frames_are_cut(script: Any, ids: dict[int, str]) -> None:
    model = Model()
    with headwater.open("memory:", clock=ManualClock(), maintenance_interval=None, heartbeats=False) as log:
        for publisher, first, count in script:
            given_ids = [ids.get(number) for number in range(first, first + count)]
            data = [(None, {} if id is None else {"id": id}) for id in given_ids]
            assert send(log, publisher, first, *data) == model.send(publisher, first, given_ids)
        assert log.last_seq() == model.last_seq


# --- what is forgotten --------------------------------------------------------------------------------------------


def test_what_the_publisher_has_heard_of_is_forgotten(log: Log) -> None:
    send(log, "p", 1, "one", "two")
    send(log, "p", 3, "three", "four", "five")
    send(log, "p", 6, "six", confirmed=3)
    assert receipts(log, "p") == [Receipt(3, 3, 3), Receipt(6, 1, 6)]
    send(log, "p", 6, "six", confirmed=5)
    assert [each.number for each in receipts(log, "p")] == [3, 6], "of a frame half heard of, all is kept"
    assert send(log, "p", 3, "three", "four", "five") == ([3, 4, 5], {0, 1, 2})
    send(log, "p", 7, confirmed=7)
    assert receipts(log, "p") == []


def test_an_unconfirmed_frame_forgets_nothing(log: Log) -> None:
    for number in range(1, 6):
        send(log, "p", number, number)
    assert len(receipts(log, "p")) == 5


def test_a_frame_is_one_receipt(log: Log) -> None:
    """That is what they are for: an id for each message costs a row and an index entry for each."""
    send(log, "p", 1, *range(1_000))
    assert receipts(log, "p") == [Receipt(1, 1_000, 1)]


def test_maintenance_forgets_what_is_older_than_ids_are_kept(log: Log, clock: ManualClock) -> None:
    send(log, "p", 1, "one")
    clock.advance(0.001)
    send(log, "p", 2, "two")
    clock.advance((DAY_MS - 1) / 1000)
    log.run_maintenance()
    assert send(log, "p", 1, "one") == ([1], {0}), "to the last moment"
    clock.advance(0.001)
    log.run_maintenance()
    assert [each.number for each in receipts(log, "p")] == [2]
    clock.advance(0.001)
    log.run_maintenance()
    assert receipts(log, "p") == []


def test_maintenance_forgets_page_by_page(log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "IDS_PAGE", 2)
    for number in range(1, 6):
        send(log, "p", number, number)
    clock.advance((DAY_MS + 1) / 1000)
    log.run_maintenance()
    assert receipts(log, "p") == []


# --- failing and waking -------------------------------------------------------------------------------------------


def test_a_commit_that_fails_leaves_no_receipt(log: Log) -> None:
    send(log, "p", 1, "one")
    with full_disk(log), pytest.raises(DiskFullError):
        send(log, "p", 1, "one", "two", confirmed=2)
    assert receipts(log, "p") == [Receipt(1, 1, 1)], "and takes none away"
    assert send(log, "p", 1, "one", "two") == ([1, 2], {0})
    assert stored(log) == ["one", "two"]


def test_a_neighbour_that_fails_costs_nothing(log: Log) -> None:
    """A group one of whose works fails is tried again, one by one."""

    def fail(writer: Any, hooks: Any) -> None:
        raise RuntimeError("broken")

    committer = log._core.engine.committer  # type: ignore[attr-defined]
    with log._core.engine.store.write():  # type: ignore[attr-defined]
        completions = [begin(log, "p", 1, "one"), committer.submit(fail), begin(log, "p", 1, "one", "two")]
    assert all(completion.wait(TIME_LIMIT_S) for completion in completions)
    assert [completion.result().seqs for completion in (completions[0], completions[2])] == [[1], [1, 2]]
    assert stored(log) == ["one", "two"]
    assert send(log, "p", 1, "one", "two") == ([1, 2], {0, 1})


def test_what_is_sent_twice_wakes_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[set[str], int, int]] = []
    monkeypatch.setattr(log._core.engine.wakeups, "published", lambda *news: reported.append(news))  # type: ignore[attr-defined]
    send(log, "p", 1, "one", "two")
    assert reported == [({"a"}, 1, 2)]
    send(log, "p", 1, "one", "two")
    assert len(reported) == 1, "nothing new, no wake-up"
    send(log, "p", 2, "two", "three")
    assert reported[1:] == [({"a"}, 3, 3)]
    log.publish("a", "x", id="x")
    send(log, "p", 4, ("x", {"id": "x"}))
    assert len(reported) == 3, "nor by an id that was known"


def test_a_waiting_reader_is_woken_once(log: Log) -> None:
    subscriber: Any = log.subscribe("s", "a")._consumer
    core: Any = log._core
    core.engine._notifier.stop()  # its first look for news of other processes may come at any time, and wakes too
    bell = until_it_waits(subscriber.take(10, None))
    send(log, "p", 1, "one")
    assert bell.done
    [claimed] = run_blocking(subscriber.take(10, None))
    assert claimed.message.data == "one"
    bell = until_it_waits(subscriber.take(10, None))
    send(log, "p", 1, "one")
    assert not bell.done


# --- refused ------------------------------------------------------------------------------------------------------


def test_a_closed_log_refuses(log: Log) -> None:
    log.close()
    with pytest.raises(ClosedError):
        send(log, "p", 1, "one")


def test_inside_a_transaction_it_would_wait_for_itself(log: Log) -> None:
    with log.transaction(), pytest.raises(InvalidStateError):
        send(log, "p", 1, "one")
