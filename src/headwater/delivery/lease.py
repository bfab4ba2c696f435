"""A time-limited right with an owner and a fencing token: for exclusive subscriptions, maintenance and push claims."""

from __future__ import annotations

import msgspec

_RELEASED = "released by "


class Lease(msgspec.Struct, frozen=True):
    """`fence` grows whenever the lease is taken, which sets a late owner apart from the present one."""

    owner: str = ""
    fence: int = 0
    until_ms: int = 0

    def live(self, now_ms: int) -> bool:
        return bool(self.owner) and now_ms < self.until_ms

    @property
    def last_owner(self) -> str:
        """The owner, or after a release the last one."""
        return self.owner.removeprefix(_RELEASED)

    def held_by(self, owner: str, fence: int) -> bool:
        """True until another owner takes it, even if it ran out: until then its work is not given to others."""
        return self.owner == owner and self.fence == fence


def take(lease: Lease, owner: str, now_ms: int, lease_ms: int) -> Lease | None:
    """The lease with this owner, or None while that of another owner is alive."""
    if lease.live(now_ms) and lease.owner != owner:
        return None
    return Lease(owner, lease.fence + 1, now_ms + lease_ms)


def renew(lease: Lease, now_ms: int, lease_ms: int) -> Lease:
    return Lease(lease.owner, lease.fence, max(lease.until_ms, now_ms + lease_ms))


def release(lease: Lease) -> Lease:
    """Free at once. The fence stays, so that the next owner gets a higher one; the last owner stays known."""
    return Lease(f"{_RELEASED}{lease.last_owner}" if lease.owner else "", lease.fence, 0)
