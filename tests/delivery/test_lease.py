from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.lease import Lease, release, renew, take

owners = st.sampled_from(["a", "b", "c"])
nows = st.integers(min_value=0, max_value=100)
spans = st.integers(min_value=1, max_value=50)
leases = st.builds(Lease, st.sampled_from(["", "a", "b", "c"]), st.integers(0, 50), st.integers(0, 100))


def test_a_lease_runs_out_at_its_end_not_after_it() -> None:
    lease = Lease("a", 1, until_ms=10)
    assert lease.live(9)
    assert not lease.live(10)


@given(lease=leases, owner=owners, now_ms=nows, span=spans)
def test_taking_is_refused_exactly_while_anothers_is_alive(lease: Lease, owner: str, now_ms: int, span: int) -> None:
    taken = take(lease, owner, now_ms, span)
    if lease.live(now_ms) and lease.owner != owner:
        assert taken is None
    else:
        assert taken == Lease(owner, lease.fence + 1, now_ms + span)


@given(lease=leases, owner=owners, now_ms=nows, span=spans)
def test_taking_it_fences_the_last_holder(lease: Lease, owner: str, now_ms: int, span: int) -> None:
    taken = take(lease, owner, now_ms, span)
    if taken is not None:
        assert taken.held_by(owner, taken.fence)
        assert not taken.held_by(lease.owner, lease.fence)


@given(lease=leases, now_ms=nows, span=spans)
def test_renewing_never_shortens_and_changes_no_hands(lease: Lease, now_ms: int, span: int) -> None:
    renewed = renew(lease, now_ms, span)
    assert renewed.held_by(lease.owner, lease.fence)
    assert renewed.until_ms >= max(lease.until_ms, now_ms + span)


@given(lease=leases, owner=owners, now_ms=nows, span=spans)
def test_a_released_lease_is_free_and_keeps_its_fence(lease: Lease, owner: str, now_ms: int, span: int) -> None:
    free = release(lease)
    assert not free.live(now_ms)
    taken = take(free, owner, now_ms, span)
    assert taken is not None
    assert taken.fence > lease.fence


@given(lease=leases, now_ms=nows)
def test_an_expired_lease_is_still_its_holders_until_it_is_taken(lease: Lease, now_ms: int) -> None:
    assert lease.held_by(lease.owner, lease.fence)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "renew", "release", "wait"]), owners, spans), max_size=40),
)
def test_at_most_one_live_holder_and_fences_only_grow(steps: list[tuple[str, str, int]]) -> None:
    lease, now_ms = Lease(), 0
    fences = {"a": 0, "b": 0, "c": 0}
    for verb, owner, span in steps:
        before = lease
        if verb == "take":
            taken = take(lease, owner, now_ms, span)
            if taken is not None:
                lease = taken
                fences[owner] = taken.fence
        elif verb == "renew" and lease.held_by(owner, fences[owner]):
            lease = renew(lease, now_ms, span)
        elif verb == "release" and lease.held_by(owner, fences[owner]):
            lease = release(lease)
        else:
            now_ms += span
        assert lease.fence >= before.fence
        holders = [name for name, fence in fences.items() if fence and lease.held_by(name, fence)]
        assert len(holders) <= 1
