"""Which old versions go. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.errors import InvalidOption
from headwater.replication.host.records import Version

KEEP_LAST = 100


class Policy(msgspec.Struct, frozen=True):
    """A version goes when it is beyond either limit. The newest never goes."""

    keep_last: int | None = KEEP_LAST
    keep_age_ms: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise InvalidOption("keep_last is at least 1: the newest version always stays")
        if self.keep_age_ms is not None and self.keep_age_ms < 1:
            raise InvalidOption("keep_age is longer than nothing; the newest version stays in any case")

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_age_ms is None


def surplus(versions: Sequence[Version], policy: Policy, now_ms: int) -> list[int]:
    """The numbers of those that go, from versions in ascending order.

    Only ever the oldest in one piece: an older version is rebuilt by way of all those after it, so none may go from
    the middle, whatever its clock said. One that was not announced yet stays until it is.
    """
    gone: list[int] = []
    for position, version in enumerate(versions[:-1]):
        beyond_last = policy.keep_last is not None and len(versions) - position > policy.keep_last
        beyond_age = policy.keep_age_ms is not None and now_ms - version.at_ms > policy.keep_age_ms
        if not version.announced or not (beyond_last or beyond_age):
            break
        gone.append(version.number)
    return gone
