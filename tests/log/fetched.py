"""What a subscription delivers, in short."""

from typing import Any


def seqs(messages: Any) -> list[int]:
    return [message.seq for message in messages]


def drain(subscription: Any) -> list[tuple[int, int]]:
    """Fetch and ack all that is deliverable now. Returns the seq and attempt of each."""
    received = []
    while found := subscription.fetch():
        received += [(message.seq, message.attempt) for message in found]
        subscription.ack_many(found)
    return received
