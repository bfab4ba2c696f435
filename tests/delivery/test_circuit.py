"""Telling a target that is away from a message that it refuses."""

import hypothesis.strategies as st
from hypothesis import given

from headwater.delivery.circuit import (
    MISSES_AWAY_MAX,
    MISSES_THERE_MAX,
    PATIENT_ROUNDS,
    PROBE_ROUNDS,
    Suspect,
    Tried,
    begin_to_suspect,
    failed_again,
    goes_on,
    is_refused,
    judge,
    order_of_tries,
    others_got_through,
)
from headwater.delivery.retry import RetryPolicy

POLICY = RetryPolicy(max_attempts=3, base_ms=1_000, factor=2.0, cap_ms=8_000, jitter=0.0)
_tries = st.lists(st.sampled_from(["sent", "unfit", "failed"]), max_size=20)


def test_the_one_that_failed_while_others_behind_it_got_through_is_suspected() -> None:
    assert judge([0, 1, 2, 3], ["sent", "failed", "sent", "failed"]) == ([0, 2], [], [1])


def test_when_nothing_gets_through_no_message_is_suspected() -> None:
    assert judge([0, 1, 2], ["failed", "failed", "failed"]) == ([], [], [])


def test_what_is_unfit_needs_no_witness() -> None:
    assert judge([0, 1], ["failed", "unfit"]) == ([], [1], [])


def test_those_that_were_tried_last_because_of_a_late_start_are_judged_by_their_place() -> None:
    assert judge([2, 3, 0, 1], ["sent", "sent", "failed", "failed"]) == ([2, 3], [], [0, 1])


@given(_tries)
def test_every_message_has_one_fate_and_none_is_suspected_without_a_witness(tries: list[Tried]) -> None:
    verdict = judge(range(len(tries)), tries)
    fates = [*verdict.sent, *verdict.unfit, *verdict.suspects]
    assert len(set(fates)) == len(fates)
    assert all(tries[position] == "failed" for position in verdict.suspects)
    assert all(any(sent > position for sent in verdict.sent) for position in verdict.suspects)
    assert [position for position in range(len(tries)) if tries[position] == "sent"] == verdict.sent


def test_a_round_ends_after_some_failures_in_a_row_and_later_if_the_target_is_there() -> None:
    assert goes_on(["failed"] * (MISSES_AWAY_MAX - 1), target_answers=False)
    assert not goes_on(["failed"] * MISSES_AWAY_MAX, target_answers=False)
    assert goes_on(["failed"] * (MISSES_THERE_MAX - 1), target_answers=True)
    assert not goes_on(["failed"] * MISSES_THERE_MAX, target_answers=True)
    assert goes_on(["sent", *["failed"] * (MISSES_THERE_MAX - 1)], target_answers=False)
    assert not goes_on(["sent", *["failed"] * MISSES_THERE_MAX], target_answers=False)
    assert goes_on(["unfit"] * 50, target_answers=False)


def test_at_first_a_target_that_seems_to_be_away_is_not_asked_for_others() -> None:
    for rounds_in_vain in range(PROBE_ROUNDS + 1):
        goes = goes_on(["failed"], target_answers=False, rounds_in_vain=rounds_in_vain)
        assert goes == (rounds_in_vain == PROBE_ROUNDS)
    assert goes_on(["failed"], target_answers=True, rounds_in_vain=0)
    assert goes_on(["sent", "failed"], target_answers=False, rounds_in_vain=0)
    assert goes_on(["unfit"], target_answers=False, rounds_in_vain=0)


@given(st.integers(1, 200), st.integers(0, 1_000))
def test_all_have_their_turn_and_from_the_front_unless_that_was_in_vain_for_long(count: int, in_vain: int) -> None:
    order = order_of_tries(count, in_vain)
    assert sorted(order) == list(range(count))
    if in_vain <= PATIENT_ROUNDS:
        assert order == list(range(count))


def test_a_batch_that_begins_with_many_refused_ones_is_got_through_in_the_end() -> None:
    count, refused = 100, 40
    reached = {
        position
        for in_vain in range(PATIENT_ROUNDS + count)
        for position in order_of_tries(count, in_vain)[:MISSES_AWAY_MAX]
    }
    assert max(reached) > refused


def test_a_suspect_is_refused_when_others_got_through_after_each_of_its_failures() -> None:
    suspect = begin_to_suspect(POLICY, 0, 0.0)
    assert suspect == Suspect(due_ms=1_000, refusals=1)
    assert not is_refused(suspect, POLICY)
    suspect = others_got_through(failed_again(suspect, POLICY, 1_000, 0.0))
    assert suspect == Suspect(due_ms=3_000, refusals=2)
    suspect = others_got_through(failed_again(suspect, POLICY, 3_000, 0.0))
    assert is_refused(suspect, POLICY)


@given(st.integers(1, 100))
def test_however_often_it_fails_it_is_not_refused_while_nothing_gets_through(failures: int) -> None:
    suspect = begin_to_suspect(POLICY, 0, 0.0)
    for at_ms in range(failures):
        suspect = failed_again(suspect, POLICY, at_ms, 0.0)
    assert suspect.refusals == 1


@given(st.integers(1, 100))
def test_however_many_get_through_they_count_once_for_a_failure(others: int) -> None:
    suspect = failed_again(begin_to_suspect(POLICY, 0, 0.0), POLICY, 0, 0.0)
    for _ in range(others):
        suspect = others_got_through(suspect)
    assert suspect.refusals == 2
