"""A client as a server sees it: it lives on while its connections come and go, and keeps what it has in its hands."""

from typing import Any

from headwater.broker.deliveries import Claimed, Failure
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.flow import Completion, run_blocking
from headwater.broker.subscribe import Resume

Pairs = list[tuple[int, int]]  # (seq, attempt)


class Client:
    def __init__(self, log: Any, **options: Any) -> None:
        self.log = log
        self.options = options
        self.hands: dict[int, Claimed] = {}
        self.settled: list[int] = []  # what the last resume found settled
        self.name = f"client-{id(self)}"
        self.connection = self._subscribe(Resume(self.name))

    def _subscribe(self, resume: Resume | None, **more: Any) -> DurableConsumer:
        subscriber = run_blocking(self.log._core.subscribe("s", "a", resume=resume, **self.options, **more))
        assert isinstance(subscriber, DurableConsumer)
        return subscriber

    def fetch(self, limit: int = 100, *, arriving: int = 100) -> Pairs:
        """What the server hands out; only so many of them get across."""
        found = run_blocking(self.connection.take(limit, 0.0))
        self.hands.update({claimed.message.seq: claimed for claimed in found[:arriving]})
        return pairs(found)

    def ack(self, *seqs: int, answered: bool = True) -> None:
        """Unless answered, the client does not know that it got through."""
        done(self.connection.ack([self.hands[seq] for seq in seqs]))
        if answered:
            self._drop(seqs)

    def nack(self, *seqs: int, delay_ms: int = 0, answered: bool = True) -> None:
        for seq in seqs:
            run_blocking(self.connection.nack(self.hands[seq], delay_ms, Failure("processing_error")))
        if answered:
            self._drop(seqs)

    def reject(self, *seqs: int, answered: bool = True) -> None:
        for seq in seqs:
            run_blocking(self.connection.reject(self.hands[seq], Failure("rejected")))
        if answered:
            self._drop(seqs)

    def _drop(self, seqs: tuple[int, ...]) -> None:
        for seq in seqs:
            del self.hands[seq]

    def vanish(self) -> None:
        """The server notices that the connection is broken."""
        run_blocking(self.connection.close(vanished=True))

    def proof(self) -> Resume:
        return Resume(self.name, pairs(self.hands.values()))

    def resume(self, log: Any = None, *, proof: Resume | None = None, **more: Any) -> Pairs:
        """Connect again and say what is in hand; what of it is still the client's is returned, and all it keeps."""
        self.log = log or self.log
        self.connection = self._subscribe(proof or self.proof(), **more)
        resumed = self.connection.resumed
        self.hands = {claimed.message.seq: claimed for claimed in resumed.held}
        self.settled = resumed.settled
        return pairs(resumed.held)


def done(completion: Completion[Any]) -> Any:
    assert completion.wait(30)
    return completion.result()


def pairs(claimed: Any) -> Pairs:
    return [(each.message.seq, each.attempt) for each in claimed]
