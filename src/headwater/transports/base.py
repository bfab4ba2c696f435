"""What all transports have in common: the verbs of `ports.transport.Transport`, for whatever holds a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from headwater.errors import InvalidMessage
from headwater.message import Message


class Holder(Protocol):
    """Something with a message in it: a `ReceivedMessage`, an `AsyncReceivedMessage`, a `DeadLetter`."""

    @property
    def message(self) -> Message: ...


class BaseTransport(ABC):
    name: str
    recognises_ids: bool

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def publish(self, message: Message | Holder) -> None:
        self.publish_many([message])

    def publish_many(self, messages: Iterable[Message | Holder]) -> None:
        """In their order. What was fetched from a log goes as it is there; whether it is acked is another matter."""
        self._publish([self._message_of(each) for each in messages])

    @abstractmethod
    def _publish(self, messages: Sequence[Message]) -> None: ...

    def _message_of(self, given: Message | Holder) -> Message:
        message = given if isinstance(given, Message) else getattr(given, "message", None)
        if not isinstance(message, Message):
            raise InvalidMessage(
                f"expected a message, got {type(given).__name__}",
                where=self.name,
                next="Publish what a subscription gives, or make one with headwater.transports.lines.make_message",
            )
        return message
