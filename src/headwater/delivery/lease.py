"""A time-limited right with an owner and a fencing token: for exclusive subscriptions, housekeeping and push claims."""

from __future__ import annotations

import msgspec

_RELEASED = "released by "


class Lease(msgspec.Struct, frozen=True):
    """`fence` grows with every change of hands, so that a late holder can be told from the present one."""

    owner: str = ""
    fence: int = 0
    until_ms: int = 0

    def live(self, now_ms: int) -> bool:
        return bool(self.owner) and now_ms < self.until_ms

    @property
    def last_owner(self) -> str:
        """Who has it, or had it last; nobody else has had it since."""
        return self.owner.removeprefix(_RELEASED)

    def held_by(self, owner: str, fence: int) -> bool:
        """True while nobody else has taken it, even if it ran out: its work is still nobody else's."""
        return self.owner == owner and self.fence == fence


def take(lease: Lease, owner: str, now_ms: int, lease_ms: int) -> Lease | None:
    """The lease in new hands, or None while another owner's is alive."""
    if lease.live(now_ms) and lease.owner != owner:
        return None
    return Lease(owner, lease.fence + 1, now_ms + lease_ms)


def renew(lease: Lease, now_ms: int, lease_ms: int) -> Lease:
    return Lease(lease.owner, lease.fence, max(lease.until_ms, now_ms + lease_ms))


def release(lease: Lease) -> Lease:
    """Free at once; the fence stays, so that the next holder gets a higher one. Who had it last stays known."""
    return Lease(f"{_RELEASED}{lease.last_owner}" if lease.owner else "", lease.fence, 0)
