"""The bytes of all connections: which may grow, which wait, and which are closed."""

from __future__ import annotations

from headwater.server.budget import MOVED_BYTES_MIN, SHARE_BYTES_MIN, STALLED_S, TURNS, Account, Budget

MAX = 10 * SHARE_BYTES_MIN


class OfOne(Account):
    owner = "one"

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.signals: list[str] = []
        self.moved = 0
        self.awaited = True

    def is_awaited(self) -> bool:
        return self.awaited

    def moved_bytes(self) -> int:
        return self.moved

    def on_room(self) -> None:
        self.signals.append("room")

    def on_stalled(self) -> None:
        self.signals.append("stalled")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def accounts(budget: Budget, *sizes: int) -> list[OfOne]:
    made = [OfOne(budget) for _ in sizes]
    for account, size in zip(made, sizes, strict=True):
        account.set(size)
    return made


def test_within_the_limit_all_may_grow() -> None:
    one, other = accounts(Budget(MAX), MAX - 1, 1)
    assert one.may_grow
    assert one.may_take
    assert other.fits(MAX)


def test_beyond_it_those_with_more_than_their_share_wait_but_for_the_first() -> None:
    *first, second, small = accounts(Budget(MAX), *[MAX] * TURNS, MAX, 100)
    assert all(each.may_grow for each in first), "or a frame that is half there could never be finished"
    assert not second.may_grow
    assert small.may_grow
    first[0].set(0)
    assert second.signals == ["room"]
    assert second.may_grow


def test_beyond_it_an_account_takes_more_only_in_its_turn_however_little_it_holds() -> None:
    """Or many that hold nothing yet would take as much as they like."""
    budget = Budget(MAX)
    [_, *empty] = accounts(budget, MAX + 1, *[0] * 100)
    assert [each.may_take for each in empty].count(True) == TURNS
    assert not empty[-1].fits(SHARE_BYTES_MIN + MAX)
    assert empty[-1].fits(100)


def test_one_owner_does_not_wait_for_another() -> None:
    budget = Budget(MAX)
    *many, other = accounts(budget, *[MAX] * 20, MAX)
    other.owner = "another"
    assert [each.may_take for each in many].count(True) == TURNS
    assert other.may_take


def test_all_go_on_when_there_is_room() -> None:
    *first, second, third = accounts(Budget(MAX), *[MAX] * TURNS, MAX // 2, MAX // 2)
    assert [each.may_take for each in (*first, second, third)] == [True] * TURNS + [False, False]
    for each in first:
        each.set(0)
    assert (second.signals[-1:], third.signals[-1:]) == (["room"], ["room"])
    assert second.may_take


def test_one_that_gets_below_its_share_is_reported() -> None:
    budget = Budget(MAX)
    *first, second, _ = accounts(budget, *[2 * MAX] * TURNS, MAX, 1)
    assert all(each.may_grow for each in first)
    assert not second.may_grow
    second.set(1)
    assert budget.is_exceeded
    assert second.signals == ["room"]


def test_a_turn_that_is_not_used_is_passed_on() -> None:
    budget = Budget(MAX)
    [_, *idle, last] = accounts(budget, MAX + 1, *[0] * TURNS, 0)
    for each in (*idle, last):
        each.awaited = False
    assert [each.may_take for each in (*idle, last)] == [True] * TURNS + [False]
    budget.sweep()
    assert last.signals == ["room"]
    assert last.may_take


def test_one_that_has_gone_stands_in_no_line() -> None:
    budget = Budget(MAX)
    [_, *gone, last] = accounts(budget, MAX + 1, *[0] * TURNS, 0)
    assert [each.may_take for each in (*gone, last)] == [True] * TURNS + [False]
    for each in gone:
        each.close()
    assert last.may_take


def test_clients_that_do_too_little_are_given_up_while_others_need_the_room() -> None:
    """Also those that hold no more than their share, of which there may be many."""
    clock = Clock()
    budget = Budget(MAX, clock)
    stalled, trickling, moving, small, answering = accounts(budget, MAX, MAX, MAX, 100, MAX)
    answering.awaited = False  # it waits for the server
    for _ in range(3):
        budget.sweep()
        clock.now_s += STALLED_S / 2
        trickling.moved += 1
        moving.moved += MOVED_BYTES_MIN
    budget.sweep()
    for each in (stalled, trickling, small):
        assert each.signals[-1:] == ["stalled"]
    assert (moving.signals, answering.signals) == ([], [])


def test_what_is_unfinished_for_long_is_given_up_in_any_case() -> None:
    clock = Clock()
    budget, patient = Budget(MAX, clock, patience_s=60), Budget(MAX, clock)
    [small], [unread] = accounts(budget, 100), accounts(patient, 100)
    for _ in range(6):
        budget.sweep()
        patient.sweep()
        assert small.signals == []
        clock.now_s += 10
        small.moved += 1
    budget.sweep()
    patient.sweep()
    assert (small.signals, unread.signals) == (["stalled"], [])
