"""What the two APIs need of a log, wherever it is: in this process, or behind a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from headwater.broker.consumer import Consumer
from headwater.broker.dead_letters import PAGE, Exported, LetterFilter, LetterStatistics, RedriveResult
from headwater.broker.deliveries import Claimed
from headwater.broker.flow import Flow, Pending
from headwater.broker.live import LiveVerbs
from headwater.broker.maintenance import MaintenanceReport
from headwater.broker.publish import Outgoing
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.broker.subscribe import Start, SubscribeOptions
from headwater.broker.transaction import OwnTransaction
from headwater.delivery.retention import Limits
from headwater.delivery.schedule import Schedule
from headwater.message import PublishOptions
from headwater.ports.clock import Clock
from headwater.ports.records import Appended, DeadLetter, RetentionPolicy, TopicCount
from headwater.topics import Dialect

if TYPE_CHECKING:
    from headwater.broker.schedules import ScheduleRecord, ScheduleTurn


class DeadLetterVerbs(Protocol):
    def find(self, after: int = 0, limit: int = 100, **given: Unpack[LetterFilter]) -> Flow[list[DeadLetter]]: ...

    def get(self, id: int) -> Flow[DeadLetter]: ...

    def statistics(self, **given: Unpack[LetterFilter]) -> Flow[LetterStatistics]: ...

    def redrive(
        self, to_topic: str | None = None, dry_run: bool = False, **given: Unpack[LetterFilter]
    ) -> Flow[RedriveResult]: ...

    def purge(self, dry_run: bool = False, **given: Unpack[LetterFilter]) -> Flow[int]: ...

    def export(self, after: int = 0, limit: int = PAGE, **given: Unpack[LetterFilter]) -> Flow[Exported]:
        """A page."""

    def import_(self, lines: Iterable[str]) -> Flow[int]: ...


class RemoteVerbs(Protocol):
    """The connection to a server: calls in both directions, and how it is."""

    @property
    def state(self) -> str:
        """disconnected, connecting, connected, reconnecting or failed."""

    def on_state(self, callback: Callable[[str], None]) -> None: ...

    def call(self, method: str, params: Any, timeout_s: float | None) -> Flow[Any]: ...

    def notify(self, method: str, params: Any) -> None: ...

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        """Let the server call this function."""


class ExternalTxVerbs(Protocol):
    def publish(self, tx: Any, topic: str, data: Any, options: PublishOptions) -> Flow[int]: ...

    def ack(self, tx: Any, consumer: Consumer, claimed: Claimed) -> Flow[None]: ...


class LogVerbs(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def dead_letters(self) -> DeadLetterVerbs: ...

    @property
    def live(self) -> LiveVerbs: ...

    @property
    def remote(self) -> RemoteVerbs:
        """The connection, if there is one; InvalidStateError if the log is here."""

    def publish(self, topic: str, data: Any, options: PublishOptions) -> Pending[int]: ...

    def publish_many(self, messages: Iterable[Outgoing]) -> Pending[list[int]]: ...

    def append(self, messages: Iterable[Outgoing]) -> Pending[Appended]:
        """As `publish_many`, and reports which of them are duplicates."""

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        """A transaction of the user's own, which acks the message in hand if there is one; InvalidStateError if the log
        is elsewhere."""

    @property
    def external_tx(self) -> ExternalTxVerbs:
        """Verbs inside a transaction on the user's own connection; InvalidStateError if the log is elsewhere."""

    def subscribe(self, id: str, pattern: str, **options: Unpack[SubscribeOptions]) -> Flow[Consumer]: ...

    def delete_subscription(self, id: str) -> Flow[None]: ...

    def seek(self, id: str, start: Start) -> Flow[int]: ...

    def pause(self, id: str) -> Flow[None]: ...

    def resume(self, id: str) -> Flow[None]: ...

    def describe(self, consumer: Consumer) -> Flow[SubscriptionInfo]: ...

    def subscription_infos(self) -> Flow[list[SubscriptionInfo]]: ...

    def subscription_info(self, id: str) -> Flow[SubscriptionInfo]: ...

    def topics(self) -> Flow[list[TopicCount]]: ...

    def topic_max_seq(self, topic: str) -> Flow[int]: ...

    def last_seq(self) -> Flow[int]: ...

    def statistics(self) -> Flow[LogStatistics]: ...

    def health(self) -> Flow[dict[str, Any]]: ...

    def retain(self, pattern: str, limits: Limits, dialect: Dialect) -> Flow[None]: ...

    def delete_retention(self, pattern: str, dialect: Dialect) -> Flow[bool]: ...

    def retention(self) -> Flow[list[RetentionPolicy]]: ...

    def run_maintenance(self) -> Flow[MaintenanceReport]: ...

    @property
    def clock(self) -> Clock: ...

    def schedules(self) -> Flow[list[ScheduleRecord]]: ...

    def declare_schedule(self, schedule: Schedule) -> Flow[ScheduleTurn]: ...

    def take_schedule(self, schedule: Schedule, due_ms: int) -> Flow[ScheduleTurn]: ...

    def publish_occurrence(self, schedule: Schedule, fence: int, at_ms: int, data: Any, ends: bool) -> Flow[bool]: ...

    def delete_schedule(self, id: str) -> Flow[bool]: ...

    def close(self) -> None: ...
