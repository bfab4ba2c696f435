"""The checker itself: it is silent on a good history and speaks up on each kind of bad one."""

from __future__ import annotations

import pytest
from crash_checker import Ending, Row, check
from crash_witness import (
    ACK_WAIT_S,
    AnyEvent,
    Closing,
    Failed,
    Held,
    Published,
    Received,
    Refused,
    Settled,
    Settling,
    Trying,
)

WAIT_NS = round(ACK_WAIT_S * 1e9)


class Play:
    """Writes a history down, with a clock that ticks once a line."""

    def __init__(self) -> None:
        self.now = 0
        self.events: list[AnyEvent] = []
        self.rows: list[Row] = []
        self.lags = {"ex": 0, "sh": 0, "mix": 0, "hd": 0}
        self.integrity = "ok"
        self.dead = 0

    def tick(self, ns: int = 1_000) -> int:
        self.now += ns
        return self.now

    def publish(self, *tokens: str, actor: str = "p", topic: str = "work.b", ids: bool = False) -> list[int]:
        self.try_to_publish(*tokens, actor=actor, ids=ids)
        first = len(self.rows) + 1
        seqs = [*range(first, first + len(tokens))]
        self.rows += [Row(seq, topic, token, token if ids else None) for seq, token in zip(seqs, tokens, strict=True)]
        self.events.append(Published(actor=actor, t=self.tick(), tokens=tokens, seqs=tuple(seqs)))
        return seqs

    def try_to_publish(self, *tokens: str, actor: str = "p", ids: bool = False) -> None:
        self.events.append(Trying(actor=actor, t=self.tick(), tokens=tokens, with_ids=ids))

    def hold(self, subscription: str, holder: str) -> None:
        self.events.append(Held(actor=holder, t=self.tick(), subscription=subscription, holder=holder))

    def receive(self, subscription: str, holder: str, *found: tuple[int, int]) -> None:
        began = self.tick()
        reported = tuple((seq, attempt, self.rows[seq - 1].token) for seq, attempt in found)
        self.events.append(
            Received(actor=holder, subscription=subscription, holder=holder, began=began, t=self.tick(), found=reported)
        )

    def hand_out(self, subscription: str, holder: str, thread: str, seq: int, attempt: int = 1) -> None:
        """To one of the threads that share a subscription; it was fetched ahead, at an unknown time."""
        found = ((seq, attempt, self.rows[seq - 1].token),)
        about = {"subscription": subscription, "holder": holder, "began": 0, "fetched_ahead": True}
        self.events.append(Received(actor=thread, t=self.tick(), found=found, **about))

    def settle(self, subscription: str, holder: str, *keys: tuple[int, int], how: str = "ack") -> None:
        began = self.begin_to_settle(subscription, holder, *keys, how=how)
        self.end_settling(subscription, holder, *keys, began=began, how=how)

    def begin_to_settle(self, subscription: str, holder: str, *keys: tuple[int, int], how: str = "ack") -> int:
        t = self.tick()
        self.events.append(Settling(actor=holder, t=t, subscription=subscription, holder=holder, how=how, keys=keys))
        return t

    def end_settling(
        self, subscription: str, holder: str, *keys: tuple[int, int], began: int, how: str = "ack"
    ) -> None:
        self.events.append(
            Settled(
                actor=holder, t=self.tick(), subscription=subscription, holder=holder, how=how, keys=keys, began=began
            )
        )

    def refuse(self, subscription: str, holder: str, *keys: tuple[int, int]) -> None:
        self.begin_to_settle(subscription, holder, *keys)
        self.events.append(
            Refused(
                actor=holder, t=self.tick(), subscription=subscription, holder=holder, how="ack", keys=keys, error=""
            )
        )

    def close(self, subscription: str, holder: str) -> None:
        self.events.append(Closing(actor=holder, t=self.tick(), subscription=subscription, holder=holder))

    def consume(self, subscription: str, holder: str, *seqs: int) -> None:
        self.receive(subscription, holder, *((seq, 1) for seq in seqs))
        self.settle(subscription, holder, *((seq, 1) for seq in seqs))

    def problems(self) -> list[str]:
        """A consumer of `hd` handles everything and is of no interest here."""
        mine = [row for row in self.rows if row.topic.startswith("work.")]
        keys = tuple((row.seq, 1) for row in mine)
        bystander = Settling(actor="H", t=self.now, subscription="hd", holder="H", how="ack", keys=keys)
        return check([*self.events, bystander], Ending(self.rows, self.lags, self.dead, self.integrity))


@pytest.fixture
def play() -> Play:
    """Three messages, delivered and acked everywhere, then room for more."""
    play = Play()
    play.publish("one", ids=True)
    play.publish("two", "three")
    play.hold("ex", "E1")
    play.hold("sh", "S1")
    play.consume("ex", "E1", 1, 2, 3)
    play.consume("sh", "S1", 1, 2, 3)
    return play


def only(play: Play, *words: str) -> None:
    found = play.problems()
    assert found, "the checker saw nothing"
    assert all(any(word in problem for word in words) for problem in found), found
    assert all(any(word in problem for problem in found) for word in words), found


def test_a_good_history_has_no_violations(play: Play) -> None:
    assert play.problems() == []


def test_crashes_nacks_and_late_holders_are_no_reason_to_complain(play: Play) -> None:
    play.publish("four", "five", "six")
    play.try_to_publish("lost, and never confirmed", ids=True)
    play.receive("ex", "E1", (4, 1), (5, 1), (6, 1))
    play.settle("ex", "E1", (5, 1))
    play.begin_to_settle("ex", "E1", (6, 1))  # killed here; the ack may hold or not
    play.hold("ex", "E2")
    play.receive("ex", "E2", (4, 2))
    play.settle("ex", "E2", (4, 2), how="nack")
    play.receive("ex", "E2", (4, 3))
    play.refuse("ex", "E1", (4, 1))
    play.settle("ex", "E2", (4, 3))
    play.hold("sh", "S2")
    play.receive("sh", "S1", (4, 1), (5, 1))
    play.tick(WAIT_NS)
    play.receive("sh", "S2", (4, 2))
    play.settle("sh", "S2", (4, 2))
    play.refuse("sh", "S1", (4, 1))
    play.close("sh", "S1")
    play.receive("sh", "S2", (5, 2))
    play.settle("sh", "S2", (5, 2))
    play.consume("sh", "S2", 6)
    play.publish("one again")  # the clock of seqs goes on
    play.consume("ex", "E2", 7)
    play.consume("sh", "S2", 7)
    assert play.problems() == []


def test_threads_that_share_a_subscription_are_no_reason_to_complain(play: Play) -> None:
    play.publish("four", "five", "six")
    play.consume("sh", "S1", 4, 5, 6)
    play.hand_out("ex", "E1", "thread 1", 5)  # the others have been quicker to get theirs, and slower to say so
    play.hand_out("ex", "E1", "thread 2", 4)
    play.settle("ex", "E1", (5, 1))
    play.hold("ex", "E2")
    play.receive("ex", "E2", (4, 2), (6, 2))
    play.hand_out("ex", "E1", "thread 1", 6)  # late: it was fetched ahead before the other one came
    play.refuse("ex", "E1", (6, 1))
    play.settle("ex", "E2", (4, 2), (6, 2))
    assert play.problems() == []


def test_a_thread_of_several_gets_messages_out_of_order(play: Play) -> None:
    play.publish("four", "five")
    play.consume("sh", "S1", 4, 5)
    play.hand_out("ex", "E1", "thread 1", 5)
    play.hand_out("ex", "E1", "thread 1", 4)
    play.settle("ex", "E1", (4, 1), (5, 1))
    only(play, "message 4 came first to E1 after 5")


def test_a_message_goes_to_two_threads_of_one_holder(play: Play) -> None:
    play.publish("four")
    play.consume("sh", "S1", 4)
    play.hand_out("ex", "E1", "thread 1", 4)
    play.hand_out("ex", "E1", "thread 2", 4)
    play.settle("ex", "E1", (4, 1))
    only(play, "both as attempt 1", "at the same time")


def test_a_late_holder_that_settles_what_it_had_fetched_ahead(play: Play) -> None:
    play.publish("four")
    play.consume("sh", "S1", 4)
    play.hold("ex", "E2")
    play.receive("ex", "E2", (4, 2))
    play.hand_out("ex", "E1", "thread 1", 4)
    play.settle("ex", "E1", (4, 1))
    play.settle("ex", "E2", (4, 2))
    only(play, "at the same time", "acked 2 times", "though attempt 1 was acked")


def test_a_published_message_that_is_gone(play: Play) -> None:
    play.publish("four")
    play.rows.pop()
    only(play, "not in the log")


def test_a_published_message_at_another_place(play: Play) -> None:
    play.publish("four", topic="noise.c")
    play.rows[-1] = play.rows[-1]._replace(seq=5)
    only(play, "published as 4 and stands at 5")


def test_a_message_that_was_not_published(play: Play) -> None:
    play.rows.append(Row(4, "noise.c", "from nowhere", None))
    only(play, "never published")


def test_an_id_that_is_there_twice(play: Play) -> None:
    play.rows.append(Row(4, "noise.c", "one", "one"))
    only(play, "2 times", "stands at 4")


def test_a_seq_given_twice(play: Play) -> None:
    play.publish("four", topic="noise.c", actor="q")
    play.publish("five", topic="noise.c", actor="r")
    play.rows[-1] = play.rows[-1]._replace(seq=4)
    play.events[-1] = Published(actor="r", t=play.now, tokens=("five",), seqs=(4,))
    only(play, "seq 4 was given 2 times")


def test_half_a_batch(play: Play) -> None:
    play.try_to_publish("four", "five")
    play.rows.append(Row(4, "noise.c", "four", None))
    only(play, "only 1 of 2")


def test_a_batch_out_of_order(play: Play) -> None:
    play.try_to_publish("four", "five")
    play.rows += [Row(4, "noise.c", "five", None), Row(5, "noise.c", "four", None)]
    only(play, "not in order")


def test_seqs_that_shrink(play: Play) -> None:
    play.try_to_publish("four")
    play.try_to_publish("five")
    play.rows += [Row(4, "noise.c", "four", None), Row(5, "noise.c", "five", None)]
    play.events.append(Published(actor="p", t=play.tick(), tokens=("five",), seqs=(5,)))
    play.events.append(Published(actor="p", t=play.tick(), tokens=("four",), seqs=(4,)))
    only(play, "got seq 4 for four after 5")


def test_a_repeat_keeps_its_first_seq(play: Play) -> None:
    play.try_to_publish("one", ids=True)
    play.events.append(Published(actor="p", t=play.tick(), tokens=("one",), seqs=(1,)))
    assert play.problems() == []
    play.events.append(Published(actor="p", t=play.tick(), tokens=("one",), seqs=(9,)))
    only(play, "published as 9 and stands at 1")


def test_a_message_never_delivered(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    only(play, "message 4 was never acked in sh, and delivered 0 times")


def test_a_message_delivered_and_never_again_though_not_acked(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    only(play, "never acked in sh, and delivered 1 times")


def test_a_refused_ack_is_no_ack(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    play.refuse("sh", "S1", (4, 1))
    only(play, "never acked in sh")


def test_lag_dead_letters_and_integrity(play: Play) -> None:
    play.lags["ex"], play.dead, play.integrity = 1, 2, "row 3 missing from index"
    only(play, "a lag of 1", "2 dead letters", "integrity_check")


def test_the_wrong_message(play: Play) -> None:
    play.publish("four", topic="noise.c")
    play.receive("ex", "E1", (4, 1))
    only(play, "did not ask for")
    play.rows[-1] = play.rows[-1]._replace(token="other")
    only(play, "the log has", "not in the log", "never published")


def test_a_delivery_after_the_ack(play: Play) -> None:
    play.tick(WAIT_NS)
    play.receive("ex", "E1", (2, 2))
    only(play, "though attempt 1 was acked")


def test_two_acks(play: Play) -> None:
    play.publish("four", topic="work.b")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    play.tick(WAIT_NS)
    play.receive("sh", "S2", (4, 2))
    play.settle("sh", "S1", (4, 1))
    play.settle("sh", "S2", (4, 2))
    only(play, "acked 2 times", "though attempt 1 was acked", "at the same time")


def test_the_same_attempt_twice(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    play.tick(WAIT_NS)
    play.consume("sh", "S2", 4)
    only(play, "both as attempt 1")


def test_a_repeat_without_reason(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    play.receive("sh", "S2", (4, 2))
    play.settle("sh", "S2", (4, 2))
    only(play, "still had it")


def test_attempts_that_run_backwards(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 2))
    play.tick(WAIT_NS)
    play.receive("sh", "S2", (4, 1))
    play.settle("sh", "S2", (4, 1))
    only(play, "before it came as attempt 1", "still had it", "though attempt 1 was acked")


def test_first_deliveries_out_of_order(play: Play) -> None:
    play.publish("four", "five")
    play.consume("ex", "E1", 5, 4)
    play.consume("sh", "S1", 4, 5)
    only(play, "message 4 came first to E1 after 5")


def test_first_deliveries_out_of_order_across_holders(play: Play) -> None:
    play.publish("four", "five")
    play.consume("ex", "E1", 5)
    play.hold("ex", "E2")
    play.consume("ex", "E2", 4)
    play.consume("sh", "S1", 4)
    play.consume("sh", "S2", 5)
    only(play, "message 4 came first to E2 after 5")


def test_a_holder_that_was_frozen_in_a_fetch_is_late(play: Play) -> None:
    play.publish("four", "five")
    began = play.tick()
    play.hold("ex", "E2")
    play.receive("ex", "E2", (4, 2), (5, 1))
    found = ((4, 1, play.rows[3].token),)
    about = {"subscription": "ex", "holder": "E1", "began": began}
    play.events.append(Received(actor="E1", t=play.tick(), found=found, **about))
    play.refuse("ex", "E1", (4, 1))
    play.settle("ex", "E2", (4, 2), (5, 1))
    play.consume("sh", "S1", 4, 5)
    assert not [problem for problem in play.problems() if "came first" in problem]


def test_two_holders(play: Play) -> None:
    play.publish("four")
    play.receive("ex", "E1", (4, 1))
    play.hold("ex", "E2")
    play.settle("ex", "E1", (4, 1))
    play.consume("sh", "S1", 4)
    only(play, "E1 and E2 held ex at the same time")


def test_a_message_in_two_hands(play: Play) -> None:
    play.publish("four")
    play.consume("ex", "E1", 4)
    play.receive("sh", "S1", (4, 1))
    play.tick(WAIT_NS)
    play.receive("sh", "S2", (4, 2))
    play.settle("sh", "S1", (4, 1), how="nack")
    play.settle("sh", "S2", (4, 2))
    only(play, "had message 4 of sh at the same time")


def test_a_failure(play: Play) -> None:
    play.events.append(Failed(actor="p", t=play.tick(), error="KeyError"))
    only(play, "failed: KeyError")
