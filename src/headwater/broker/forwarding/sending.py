"""A forwarder's end at the target: rounds of tries, with a circuit breaker around each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.broker.claims import Claimed
from headwater.broker.logger import logger
from headwater.delivery import breaker as circuit
from headwater.delivery.breaker import Breaker, BreakerPolicy, BreakerState
from headwater.delivery.forwarding import Tried, goes_on, judge, order_of_tries
from headwater.errors import Closed, HeadwaterError, InvalidInput
from headwater.ports.clock import Clock
from headwater.ports.transport import Transport


class Round(NamedTuple):
    """What became of a batch. `rest` is neither of the others, in its order; `error` the last there was."""

    sent: list[Claimed]
    unfit: list[tuple[Claimed, str]]
    suspects: list[tuple[Claimed, str]]
    rest: list[Claimed]
    error: Exception | None


class Sender:
    def __init__(self, transport: Transport, policy: BreakerPolicy, clock: Clock) -> None:
        self._transport = transport
        self._policy = policy
        self._clock = clock
        self._breaker = Breaker()
        self._turn: int | None = None

    @property
    def name(self) -> str:
        return self._transport.name

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    @property
    def recognises_ids(self) -> bool:
        return self._transport.recognises_ids

    @property
    def target_answers(self) -> bool:
        return self._transport.connected

    def may_try(self) -> bool:
        """Begins a round, which must come next, unless the circuit is open."""
        breaker, self._turn = circuit.ask(self._policy, self._breaker, self._clock.now_ms())
        self._become(breaker)
        return self._turn is not None

    @property
    def open_until_ms(self) -> int | None:
        return circuit.until_ms(self._policy, self._breaker)

    def send(self, hand: Sequence[Claimed], rounds_in_vain: int) -> Round:
        """All together; if that fails, one by one, so that one that is refused does not keep the others back."""
        tried, error = self.try_all(hand)
        if tried == "sent":
            made = Round(list(hand), [], [], [], None)
        elif len(hand) == 1:
            unfit = [(hand[0], said(error))] if tried == "unfit" else []
            made = Round([], unfit, [], [] if unfit else list(hand), error)
        else:
            made = self._one_by_one(hand, rounds_in_vain, error)
        self._report(made)
        return made

    def try_all(self, messages: Sequence[Claimed]) -> tuple[Tried, Exception | None]:
        try:
            self._transport.publish_many([claimed.message for claimed in messages])
        except Closed:
            raise
        except InvalidInput as exc:
            return "unfit", exc
        except Exception as exc:  # whatever a transport raises, it did not take them
            return "failed", exc
        return "sent", None

    def _one_by_one(self, hand: Sequence[Claimed], rounds_in_vain: int, error: Exception | None) -> Round:
        order = order_of_tries(len(hand), rounds_in_vain)
        tries: list[Tried] = []
        errors: dict[int, Exception | None] = {}
        for position in order:
            tried, errors[position] = self.try_all([hand[position]])
            tries.append(tried)
            error = errors[position] or error
            if not goes_on(tries, target_answers=self._transport.connected, rounds_in_vain=rounds_in_vain):
                break
        for position in judge(order, tries).suspects:  # once more, now that others got through: an outage may be over
            tries[order.index(position)], errors[position] = self.try_all([hand[position]])
        verdict = judge(order, tries)
        gone = {*verdict.sent, *verdict.unfit, *verdict.suspects}
        return Round(
            [hand[position] for position in verdict.sent],
            [(hand[position], said(errors[position])) for position in verdict.unfit],
            [(hand[position], said(errors[position])) for position in verdict.suspects],
            [claimed for position, claimed in enumerate(hand) if position not in gone],
            error,
        )

    def _report(self, made: Round) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        now_ms = self._clock.now_ms()
        if made.sent:
            self._become(circuit.succeeded(self._breaker, turn, now_ms))
        elif made.rest:
            self._become(circuit.failed(self._policy, self._breaker, turn, now_ms))
        else:
            self._become(circuit.not_tried(self._policy, self._breaker, turn))

    def _become(self, breaker: Breaker) -> None:
        before, self._breaker = self._breaker, breaker
        if "open" in (before.state, breaker.state) and before.state != breaker.state:
            logger.info("%s: circuit %s", self.name, breaker.state)


def said(error: Exception | None) -> str:
    """An error as status and dead letters show it."""
    if isinstance(error, HeadwaterError):
        return str(error)
    return f"{type(error).__name__}: {error}"
