"""What a subscription delivers, in short."""

from typing import Any


def seqs(messages: Any) -> list[int]:
    return [message.seq for message in messages]


def attempts(messages: Any) -> list[tuple[int, int]]:
    return [(message.seq, message.attempt) for message in messages]


def everything(log: Any, **options: Any) -> list[Any]:
    """All messages of a log, read without leaving a trace."""
    with log.subscribe("look", ">", mode="ephemeral", **{"start": "first", **options}) as look:
        return look.fetch(10_000)  # type: ignore[no-any-return]


def drain(subscription: Any) -> list[tuple[int, int]]:
    """Fetch and ack all that is deliverable now. Returns the seq and attempt of each."""
    received = []
    while found := subscription.fetch():
        received += attempts(found)
        subscription.ack_many(found)
    return received


def drain_seqs(subscription: Any) -> list[int]:
    return [seq for seq, _ in drain(subscription)]
