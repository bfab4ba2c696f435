"""Bad luck that can be had again: a seed gives a sequence of faults."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from fault_lane import Direction
from fault_proxy import FaultProxy

LATENCY_S_MAX = 0.02
THROTTLE_BYTES_PER_S = (20_000, 200_000)
CUT_BYTES_MAX = 2_000
HELD_BYTES_MAX = 500


class Kind(enum.Enum):
    LATENCY = "latency"
    THROTTLE = "throttle"
    RESET = "reset"
    CUT = "cut"
    BLACKHOLE = "blackhole"
    REFUSE = "refuse"
    CLOSE = "close"
    DUPLICATE = "late duplicate"


LASTING = frozenset({Kind.LATENCY, Kind.THROTTLE, Kind.BLACKHOLE, Kind.REFUSE})
DIRECTED = (Kind.LATENCY, Kind.THROTTLE, Kind.CUT, Kind.BLACKHOLE)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    direction: Direction | None = None
    amount: float = 0
    """Seconds of latency, bytes per second, or bytes to wait for: as the kind has it."""

    @property
    def lasts(self) -> bool:
        """Until `heal`; the others pass by themselves."""
        return self.kind in LASTING

    def strike(self, proxy: FaultProxy) -> None:
        match self.kind:
            case Kind.LATENCY:
                proxy.latency(self.amount, self.amount, self.direction)
            case Kind.THROTTLE:
                proxy.throttle(self.amount, self.direction)
            case Kind.RESET:
                proxy.reset()
            case Kind.CUT:
                assert self.direction is not None
                proxy.cut_after(int(self.amount), self.direction)
            case Kind.BLACKHOLE:
                proxy.blackhole(self.direction)
            case Kind.REFUSE:
                proxy.refuse()
                proxy.reset()  # or it would go unnoticed
            case Kind.CLOSE:
                proxy.close_cleanly()
            case Kind.DUPLICATE:
                proxy.duplicate_late(int(self.amount))
            case _:
                assert_never(self.kind)

    def __str__(self) -> str:
        where = self.direction.value if self.direction else "both ways"
        return f"{self.kind.value}, {where}, {self.amount:g}" if self.amount else f"{self.kind.value}, {where}"


def schedule(seed: int, kinds: Sequence[Kind] = tuple(Kind)) -> Iterator[Fault]:
    """Without end. In each round every kind comes once, in an order and with amounts that the seed decides."""
    dice = random.Random(seed)
    while True:
        for kind in dice.sample(kinds, len(kinds)):
            direction = dice.choice(tuple(Direction)) if kind in DIRECTED else None
            if kind is Kind.BLACKHOLE and dice.random() < 0.5:
                direction = None
            yield Fault(kind, direction, _amount(kind, dice))


def _amount(kind: Kind, dice: random.Random) -> float:
    match kind:
        case Kind.LATENCY:
            return dice.uniform(0, LATENCY_S_MAX)
        case Kind.THROTTLE:
            return dice.randint(*THROTTLE_BYTES_PER_S)
        case Kind.CUT:
            return dice.randint(1, CUT_BYTES_MAX)
        case Kind.DUPLICATE:
            return dice.randint(1, HELD_BYTES_MAX)
        case _:
            return 0
