"""The numbers of a client's messages: pure."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.client.outbox import CONFIRM_EVERY, LATE_COPY_S, Numbering, Request
from headwater.protocol.methods import PlainBatch


def request(count: int = 1) -> Request:
    return Request("rpc.publish.batch", PlainBatch([]), lambda raw: raw, count=count)


def sent(numbering: Numbering, count: int = 1) -> Request:
    made = request(count)
    numbering.assign(made)
    return made


def highest_confirmed(numbering: Numbering) -> int:
    """The highest number confirmed to the server while a thousand more are sent and answered."""
    most = 0
    for _ in range(CONFIRM_EVERY):
        one = sent(numbering)
        numbering.settle(one, 0)
        most = max(most, one.params.confirmed)
    return most


def test_numbers_count_messages_and_are_given_once() -> None:
    numbering = Numbering()
    first, second, third = sent(numbering), sent(numbering, 10), sent(numbering)
    assert [each.number for each in (first, second, third)] == [1, 2, 12]
    numbering.assign(second)
    assert second.params.number == 2
    assert sent(numbering).number == 13


def test_what_was_answered_is_confirmed() -> None:
    assert highest_confirmed(Numbering()) == CONFIRM_EVERY


def test_what_was_not_answered_is_not_confirmed() -> None:
    numbering = Numbering()
    numbering.settle(sent(numbering), 0)
    sent(numbering)
    assert highest_confirmed(numbering) == 0


def test_what_was_sent_twice_is_confirmed_when_no_copy_can_come_any_more() -> None:
    numbering = Numbering()
    twice = sent(numbering)
    numbering.broken([twice])
    numbering.assign(twice)
    numbering.settle(twice, 100)
    numbering.confirm_late(100 + LATE_COPY_S - 1)
    assert highest_confirmed(numbering) == 0
    numbering.confirm_late(100 + LATE_COPY_S)
    assert highest_confirmed(numbering) >= CONFIRM_EVERY


def test_what_was_given_up_is_confirmed_when_it_cannot_come_any_more() -> None:
    numbering = Numbering()
    numbering.settle(sent(numbering), 100, given_up=True)
    assert highest_confirmed(numbering) == 0
    numbering.confirm_late(100 + LATE_COPY_S)
    assert highest_confirmed(numbering) >= CONFIRM_EVERY


def test_what_has_no_number_is_no_matter() -> None:
    numbering = Numbering()
    numbering.settle(request(0), 0, given_up=True)
    numbering.broken([request(0)])
    assert highest_confirmed(numbering) == CONFIRM_EVERY


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans(), st.booleans()), max_size=60))
def test_never_is_a_number_confirmed_of_which_a_copy_may_come(requests: list[tuple[int, bool, bool]]) -> None:
    numbering = Numbering()
    open_numbers: set[int] = set()
    for count, breaks, answered in requests:
        made = sent(numbering, count)
        assert made.params.confirmed <= min(open_numbers, default=made.number)
        if breaks:
            numbering.broken([made])
        if answered:
            numbering.settle(made, 0)
        if breaks or not answered:
            open_numbers.add(made.number)
