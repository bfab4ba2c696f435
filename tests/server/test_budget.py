"""The bytes of all connections: who may go on, who waits, and who is given up."""

from __future__ import annotations

import logging

from headwater.server.budget import SHARE_BYTES_MIN, STALLED_S, Account, Budget
from headwater.server.logs import ALIKE_A_SECOND_MAX, LineLimit

MAX = 10 * SHARE_BYTES_MIN


class Holder:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.moved = 0

    def moved_bytes(self) -> int:
        return self.moved

    def on_room(self) -> None:
        self.told.append("room")

    def on_stalled(self) -> None:
        self.told.append("stalled")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def accounts(budget: Budget, *sizes: int) -> list[Account]:
    made = [Account(budget, Holder()) for _ in sizes]
    for account, size in zip(made, sizes, strict=True):
        account.set(size)
    return made


def told(account: Account) -> list[str]:
    assert isinstance(account.holder, Holder)
    return account.holder.told


def test_within_the_limit_all_may_grow() -> None:
    one, other = accounts(Budget(MAX), MAX - 1, 1)
    assert one.may_grow
    assert other.may_grow
    assert other.room_bytes == MAX // 2 - 1


def test_beyond_it_those_with_more_than_their_share_wait_but_for_the_first() -> None:
    first, second, small = accounts(Budget(MAX), MAX, MAX, 100)
    assert first.may_grow, "or a frame that is half there could never be finished"
    assert not second.may_grow
    assert small.may_grow
    assert small.room_bytes > 0
    first.set(0)
    assert told(second) == ["room"]
    assert second.may_grow


def test_all_go_on_when_there_is_room() -> None:
    first, second, third = accounts(Budget(MAX), MAX, MAX // 2, MAX // 2)
    assert [each.may_grow for each in (first, second, third)] == [True, False, False]
    first.set(0)
    assert (told(second), told(third)) == (["room"], ["room"])


def test_one_that_gets_below_its_share_is_told() -> None:
    budget = Budget(MAX)
    first, second, _ = accounts(budget, 2 * MAX, MAX, 1)
    assert first.may_grow
    assert not second.may_grow
    second.set(1)
    assert budget.is_exceeded
    assert told(second) == ["room"]


def test_one_that_does_not_move_is_given_up_while_others_need_the_room() -> None:
    clock = Clock()
    budget = Budget(MAX, clock)
    stalled, moving, small = accounts(budget, MAX, MAX, 100)
    for _ in range(3):
        budget.sweep()
        clock.now_s += STALLED_S / 2
        assert isinstance(moving.holder, Holder)
        moving.holder.moved += 1
    budget.sweep()
    assert (told(stalled)[-1:], told(moving), told(small)) == (["stalled"], [], [])
    stalled.set(0)
    moving.set(0)
    assert budget.total_bytes == 100


def test_lines_of_a_kind_are_limited_and_those_left_out_are_counted() -> None:
    clock = Clock()
    limit = LineLimit(clock)

    def passes(line: int = 1) -> logging.LogRecord | None:
        record = logging.LogRecord("headwater.server", logging.WARNING, "x.py", line, "again", None, None)
        return record if limit.filter(record) else None

    assert sum(passes() is not None for _ in range(100)) == ALIKE_A_SECOND_MAX
    assert passes(2) is not None, "another kind"
    clock.now_s += 1
    after = passes()
    assert after is not None
    assert after.__dict__["left_out"] == 100 - ALIKE_A_SECOND_MAX
