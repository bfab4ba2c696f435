"""The window against a model that keeps every seq by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.delivery.window import Window, WindowState

ACK_WAIT_MS = 100


class WindowMachine(RuleBasedStateMachine):
    """Commits that fail are part of the life of a window: after each one, memory must be as before."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(WindowState())
        self.now_ms = 0
        self.open: dict[int, int] = {}  # seq -> deadline
        self.matching: set[int] = set()  # every seq ever handed out
        self.scanned_to = 0

    @rule(steps=st.lists(st.integers(1, 3), max_size=5), beyond=st.integers(0, 2), fails=st.booleans())
    def deliver(self, steps: list[int], beyond: int, fails: bool) -> None:
        seqs, before = [], self.scanned_to
        for step in steps:
            seqs.append((seqs[-1] if seqs else before) + step)
        scanned_to = (seqs[-1] if seqs else before) + beyond
        self.window.deliver(seqs, scanned_to, self.now_ms + ACK_WAIT_MS)
        if fails:
            self.window.state()  # what was to be written down is asked for before the commit fails
            self.window.undeliver(seqs, before)
            return
        self.open.update(dict.fromkeys(seqs, self.now_ms + ACK_WAIT_MS))
        self.matching.update(seqs)
        self.scanned_to = scanned_to

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, unique=True))
        assert self.window.settle(seqs) == {seq: self.open.pop(seq) for seq in seqs}
        assert self.window.settle(seqs) == {}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.open)))
        self.open[seq] = self.now_ms + data.draw(st.integers(1, 3 * ACK_WAIT_MS))
        assert self.window.extend(seq, self.open[seq])

    @rule(seq=st.integers(0, 1_000))
    def extend_what_is_not_open(self, seq: int) -> None:
        if seq not in self.open:
            assert not self.window.extend(seq, self.now_ms + 1)

    @rule(ms=st.integers(0, ACK_WAIT_MS))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def give_up_overdue(self) -> None:
        late = sorted(seq for seq, deadline_ms in self.open.items() if deadline_ms <= self.now_ms)
        assert self.window.overdue(self.now_ms) == late
        self.window.settle(late)
        for seq in late:
            del self.open[seq]

    @invariant()
    def knows_what_is_open(self) -> None:
        assert len(self.window) == len(self.open)
        assert all(seq in self.window for seq in self.open)
        assert self.window.next_deadline_ms() == min(self.open.values(), default=None)

    @invariant()
    def writes_down_exactly_what_is_open(self) -> None:
        state = self.window.state()
        assert state.delivered == self.scanned_to
        assert {seq for seq in self.matching if not state.is_settled(seq)} == set(self.open)
        assert state.floor <= state.delivered
        assert all(state.floor < low <= high <= state.delivered for low, high in state.settled)


TestWindow = WindowMachine.TestCase


def in_flight(state: WindowState, seqs: list[int]) -> list[int]:
    return [seq for seq in seqs if seq <= state.delivered and not state.is_settled(seq)]


@given(data=st.data(), count=st.integers(1, 12))
def test_a_failed_commit_of_acks_leaves_everything_as_it_was(data: st.DataObject, count: int) -> None:
    seqs = list(range(1, count + 1))
    acked = data.draw(st.lists(st.sampled_from(seqs), unique=True))
    failing = data.draw(st.lists(st.sampled_from(seqs), unique=True))
    window = Window(WindowState())
    window.deliver(seqs, count, ACK_WAIT_MS)
    window.settle(acked)
    before = in_flight(window.state(), seqs)
    closed = window.settle(failing)
    window.state()
    window.reopen(closed)
    assert in_flight(window.state(), seqs) == before


def test_acks_in_order_leave_no_ranges() -> None:
    window = Window(WindowState())
    window.deliver(range(1, 1_001), 1_000, ACK_WAIT_MS)
    for seq in range(1, 1_001):
        window.settle([seq])
        assert window.state() == WindowState(seq, 1_000)


def test_acks_out_of_order_become_ranges_above_the_floor() -> None:
    window = Window(WindowState())
    window.deliver([1, 2, 3, 5, 8, 9], 10, ACK_WAIT_MS)
    window.settle([2, 3, 8])
    assert window.state() == WindowState(0, 10, ((2, 3), (8, 8)))
    window.settle([1])
    assert window.state() == WindowState(4, 10, ((8, 8),))
    window.settle([5, 9])
    assert window.state() == WindowState(10, 10)


@pytest.mark.parametrize(("seq", "settled"), [(4, True), (5, True), (6, False), (7, True), (9, True), (10, False)])
def test_settled_is_at_or_below_the_floor_or_in_a_range(seq: int, settled: bool) -> None:
    assert WindowState(5, 12, ((7, 9),)).is_settled(seq) is settled


def test_a_new_window_begins_where_the_stored_one_ended() -> None:
    window = Window(WindowState(7, 7))
    assert window.delivered == 7
    assert window.state() == WindowState(7, 7)
    assert window.overdue(10**12) == []
    assert window.next_deadline_ms() is None
