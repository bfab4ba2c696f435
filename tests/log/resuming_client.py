"""A client as a server sees it: it lives on while its connections come and go, and keeps its messages in flight."""

from collections.abc import Callable
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
        self.in_flight: dict[int, Claimed] = {}
        self.settled: list[int] = []  # what the last resume found settled
        self.name = f"client-{id(self)}"
        self.connection = self._subscribe(Resume(self.name))

    def _subscribe(self, resume: Resume | None, **more: Any) -> DurableConsumer:
        subscriber = run_blocking(self.log._core.subscribe("s", "a", resume=resume, **self.options, **more))
        assert isinstance(subscriber, DurableConsumer)
        return subscriber

    def fetch(self, limit: int = 100, *, arriving: int = 100) -> Pairs:
        """What the server delivers; only `arriving` of them reach the client."""
        found = run_blocking(self.connection.take(limit, 0.0))
        self.in_flight.update({claimed.message.seq: claimed for claimed in found[:arriving]})
        return pairs(found)

    def ack(self, *seqs: int, answered: bool = True) -> None:
        """Unless answered, the client does not know that it got through."""
        done(self.connection.ack([self.in_flight[seq] for seq in seqs]))
        if answered:
            self._drop(seqs)

    def nack(self, *seqs: int, delay_ms: int = 0, answered: bool = True) -> None:
        for seq in seqs:
            run_blocking(self.connection.nack(self.in_flight[seq], delay_ms, Failure("processing_error")))
        if answered:
            self._drop(seqs)

    def reject(self, *seqs: int, answered: bool = True) -> None:
        for seq in seqs:
            run_blocking(self.connection.reject(self.in_flight[seq], Failure("rejected")))
        if answered:
            self._drop(seqs)

    def _drop(self, seqs: tuple[int, ...]) -> None:
        for seq in seqs:
            del self.in_flight[seq]

    def vanish(self) -> None:
        """The server notices that the connection is broken."""
        run_blocking(self.connection.close(vanished=True))

    def proof(self) -> Resume:
        return Resume(self.name, pairs(self.in_flight.values()))

    def resume(self, log: Any = None, *, proof: Resume | None = None, **more: Any) -> Pairs:
        """Connect again and claim what is in flight; returns what is still the client's, which is all it keeps."""
        self.log = log or self.log
        self.connection = self._subscribe(proof or self.proof(), **more)
        resumed = self.connection.resumed
        self.in_flight = {claimed.message.seq: claimed for claimed in resumed.held}
        self.settled = resumed.settled
        return pairs(resumed.held)


def done(completion: Completion[Any]) -> Any:
    assert completion.wait(30)
    return completion.result()


def pairs(claimed: Any) -> Pairs:
    return [(each.message.seq, each.attempt) for each in claimed]


Break = Callable[[Client], None]
BREAKS: dict[str, Break] = {"noticed": Client.vanish, "unnoticed": lambda client: None}
"""How the connection ends for the server: it sees it break, or it still believes in it when the client is back. A
server that died leaves the same behind as one that noticed nothing."""
