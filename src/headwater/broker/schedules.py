"""Publishing on time: `@log.every(…)` and `@log.cron(…)`.

Each process that declares a schedule computes its occurrences. When one is due, a lease in the log lets one process
call the schedule's function; its message is stored in the transaction that notes the occurrence as done. So a process
that is killed, or outlives its lease, neither loses an occurrence nor stores it twice, and an idle schedule writes
nothing. The lease only saves calls of the function: the note decides.

The state of a schedule is in two tables that exist anyway, under `schedule:ID`: a row of `leases`, whose owner is the
publisher and the schedule as JSON, and a row of `sinks`, whose batch is the last occurrence in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from headwater.broker.committer import TransactionHooks, append
from headwater.broker.engine import Engine
from headwater.broker.flow import Call, Completion, Flow, WaitFor, complete
from headwater.broker.handlers import PASSING_ERRORS, RETRY_S, Running, Spawn
from headwater.broker.logger import from_the_function_on, logger
from headwater.delivery.lease import Lease, release, renew, take
from headwater.delivery.schedule import Schedule, local_time, next_after, plan
from headwater.errors import HeadwaterError, InvalidOptionError
from headwater.formats import datetime_of, iso
from headwater.message import make_draft
from headwater.ports.store import Reader, Writer
from headwater.topics import check_topic

if TYPE_CHECKING:
    from headwater.broker.verbs import LogVerbs

PREFIX = "schedule:"
LEASE_MS = 10_000  # after which another process tries, if this one is killed
RENEWALS_PER_LEASE = 3  # while a function runs
SCHEDULES_MAX = 1_000  # of one log
LOOK_S = 60.0  # a clock that was set, and a timetable that no process publishes any more, are noticed after this time
ABANDONED_MS = 120_000  # so late is no occurrence while a process publishes the timetable
BUSY_S = 1.0  # until a lease of another process is looked at again
FAILED_S, FAILED_S_MAX = 1.0, 60.0

Function = Callable[["Occurrence"], Any]
Allow = Callable[[Schedule], None]


class Occurrence(msgspec.Struct, frozen=True):
    """What the function of a schedule gets."""

    schedule: str
    """The schedule's id."""
    at: datetime
    """The time that the function is called for, in the time zone of the schedule."""


class ScheduleRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as stored. All occurrences up to `last_ms` are done. `publisher`: the process that declared or
    published it last."""

    schedule: Schedule
    last_ms: int
    publisher: str

    def info(self) -> ScheduleInfo:
        schedule, last_ms = self.schedule, self.last_ms
        is_occurrence = next_after(schedule, last_ms - 1) == last_ms  # or the time of its declaration
        next_ms = next_after(schedule, last_ms)
        return ScheduleInfo(
            schedule.id,
            schedule.text,
            schedule.topic,
            schedule.missed,
            datetime_of(last_ms) if is_occurrence else None,
            None if next_ms is None else datetime_of(next_ms),
            self.publisher,
        )


class ScheduleInfo(msgspec.Struct, frozen=True):
    """A schedule of a log. `next_at` lies in the past if no process runs the schedule. `publisher` is the process that
    declared or published it last: host, process id and a random part."""

    id: str
    timetable: str
    topic: str
    missed: str
    last_at: datetime | None
    next_at: datetime | None
    publisher: str


class ScheduleTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """`fence`: this process may publish what is due. `busy`: another process publishes it. `stored`: what the log has
    under the id. The timetable of another process is abandoned if its next occurrence is long due."""

    last_ms: int = 0
    fence: int | None = None
    busy: bool = False
    stored: Literal["this", "another", "abandoned", "nothing"] = "this"


class _Publisher(msgspec.Struct, frozen=True):
    """The owner of a schedule's lease, as JSON."""

    publisher: str
    schedule: Schedule


_publisher = msgspec.json.Decoder(_Publisher)


def _owner(publisher: str, schedule: Schedule) -> str:
    return msgspec.json.encode(_Publisher(publisher, schedule)).decode()


def _stored(lease: Lease) -> _Publisher | None:
    try:
        return _publisher.decode(lease.last_owner) if lease.owner else None
    except msgspec.DecodeError:
        return None


# --- verbs of a log in this process -----------------------------------------------------------------------------------


def schedules(reader: Reader) -> list[ScheduleRecord]:
    found = []
    for resource, lease in reader.leases(PREFIX).items():
        stored, last_ms = _stored(lease), reader.sink_batch(resource)
        if stored is not None and last_ms is not None:
            found.append(ScheduleRecord(stored.schedule, last_ms, stored.publisher))
    return found


def declare_schedule(
    engine: Engine, schedule: Schedule, publisher: str, allow: Allow | None = None
) -> Flow[ScheduleTurn]:
    """Store a schedule. A new one, or one with a new timetable, is done up to now. `allow` may refuse to replace what
    is stored under the id."""
    resource, owner = PREFIX + schedule.id, _owner(publisher, schedule)

    def work(writer: Writer, hooks: TransactionHooks) -> ScheduleTurn:
        lease = writer.lease(resource)
        stored, last_ms = _stored(lease), writer.sink_batch(resource)
        if stored is not None and allow is not None:
            allow(stored.schedule)
        if stored is None and len(writer.leases(PREFIX)) >= SCHEDULES_MAX:
            raise InvalidOptionError(
                f"the log has {SCHEDULES_MAX:,} schedules already",
                where=schedule.id,
                next="Remove one: headwater schedules rm LOG ID",
            )
        if stored is None or last_ms is None or not stored.schedule.is_same_timetable(schedule):
            last_ms = engine.clock.now_ms()
            writer.save_sink_batch(resource, last_ms, last_ms)
        if stored is None or stored.schedule != schedule:
            writer.save_lease(resource, release(Lease(owner, lease.fence + 1)))
        return ScheduleTurn(last_ms)

    return engine.write(work)


def take_schedule(engine: Engine, schedule: Schedule, publisher: str, due_ms: int) -> Flow[ScheduleTurn]:
    """Take the lease of a schedule, if this occurrence is not done and no other process publishes it. The holder renews
    it so."""
    resource, owner = PREFIX + schedule.id, _owner(publisher, schedule)

    def work(writer: Writer, hooks: TransactionHooks) -> ScheduleTurn:
        lease = writer.lease(resource)
        stored, last_ms = _stored(lease), writer.sink_batch(resource)
        if stored is None or last_ms is None:
            return ScheduleTurn(stored="nothing")
        now_ms = engine.clock.now_ms()
        if not stored.schedule.is_same_timetable(schedule):
            next_ms = None if lease.live(now_ms) else next_after(stored.schedule, last_ms)
            is_abandoned = next_ms is not None and next_ms + ABANDONED_MS < now_ms
            return ScheduleTurn(stored="abandoned" if is_abandoned else "another")
        if last_ms >= due_ms:
            return ScheduleTurn(last_ms)
        is_held = lease.owner == owner and lease.live(now_ms)
        taken = renew(lease, now_ms, LEASE_MS) if is_held else take(lease, owner, now_ms, LEASE_MS)
        if taken is None:
            return ScheduleTurn(last_ms, busy=True)
        writer.save_lease(resource, taken)
        return ScheduleTurn(last_ms, taken.fence)

    return engine.write(work)


def publish_occurrence(
    engine: Engine, schedule: Schedule, publisher: str, fence: int, at_ms: int, data: Any, *, ends: bool
) -> Flow[bool]:
    """Store the message, unless its data is None, and note the occurrence as done, in one transaction. `ends`: there
    are no more, so the lease is released. False if it is done already, or the schedule has changed. A lease that was
    lost meanwhile is no obstacle: the first process whose function ends stores the message."""
    resource, owner = PREFIX + schedule.id, _owner(publisher, schedule)
    now_ms = engine.clock.now_ms()
    drafts = []
    if data is not None:
        headers = {"schedule": schedule.id, "scheduled_at": iso(at_ms)}
        options: Any = {"id": schedule.message_id(at_ms), "headers": headers}
        drafts = [make_draft(check_topic(schedule.topic), data, options, now_ms)]

    def work(writer: Writer, hooks: TransactionHooks) -> bool:
        lease = writer.lease(resource)
        stored, last_ms = _stored(lease), writer.sink_batch(resource)
        if stored is None or last_ms is None or not stored.schedule.is_same_timetable(schedule) or last_ms >= at_ms:
            return False
        if lease.held_by(owner, fence):
            writer.save_lease(resource, release(lease) if ends else renew(lease, now_ms, LEASE_MS))
        writer.save_sink_batch(resource, at_ms, now_ms)
        if drafts:
            append(writer, hooks, drafts, now_ms, engine.dedupe)
        return True

    return engine.write(work)


def delete_schedule(engine: Engine, id: str, allow: Allow | None = None) -> Flow[bool]:
    """Processes that run it no longer publish. Returns whether there was one."""

    def work(writer: Writer, hooks: TransactionHooks) -> bool:
        stored = _stored(writer.lease(PREFIX + id))
        if stored is not None and allow is not None:
            allow(stored.schedule)
        writer.delete_lease(PREFIX + id)
        writer.delete_sink(PREFIX + id)
        return stored is not None

    return engine.write(work)


# --- running ----------------------------------------------------------------------------------------------------------


class ScheduleRegistration(NamedTuple):
    """A schedule as declared with `@log.every(…)` or `@log.cron(…)`."""

    schedule: Schedule
    function: Function

    @property
    def id(self) -> str:
        return PREFIX + self.schedule.id

    @property
    def pattern(self) -> str:
        return self.schedule.topic

    @property
    def described(self) -> str:
        return f"the schedule {self.schedule.id!r}"

    def make_running(
        self, log: LogVerbs, spawn: Spawn, failed: Callable[[], None], former: Running | None
    ) -> RunningSchedule:
        return RunningSchedule(log, self, spawn, failed, former)


class RunningSchedule(Running):
    """One schedule in one process: a thread or a task that waits for the next occurrence."""

    def __init__(
        self,
        log: LogVerbs,
        registration: ScheduleRegistration,
        spawn: Spawn,
        failed: Callable[[], None],
        former: Running | None = None,
    ) -> None:
        super().__init__(log, registration.id, spawn, failed, former)
        self._schedule, self._function = registration
        self._woken: Completion[None] = Completion()
        self._failures = 0
        self._other: str | None = None  # the timetable that is stored, as it was seen last
        log.clock.on_advance(self._wake)

    def start(self) -> Flow[None]:
        try:
            turn = yield from self.declare()
        except BaseException as exc:
            self._fail(exc)
            yield from self._close()
            raise
        self._state = "running"
        self._begin_worker(self._work(turn), "publisher")

    def ask_to_stop(self) -> None:
        super().ask_to_stop()
        self._wake()

    def _wake(self) -> None:
        complete([(self._woken, None, None)])

    def _work(self, turn: ScheduleTurn) -> Flow[None]:
        last_ms, wait_s = turn.last_ms, 0.0
        while not self._stopped.done:
            self._woken = Completion()
            try:
                last_ms, wait_s = yield from self.publish_due(last_ms)
                self._state = "standby" if self._other else "running"
            except PASSING_ERRORS as exc:
                self._state = "restarting"
                logger.warning("schedule %s tries again: %s", self._schedule.id, exc)
                wait_s = RETRY_S
            if wait_s == math.inf:
                return
            if wait_s and not self._stopped.done:
                yield WaitFor(self._woken, min(LOOK_S, wait_s))

    def declare(self) -> Flow[ScheduleTurn]:
        return self._log.declare_schedule(self._schedule)

    def publish_due(self, last_ms: int) -> Flow[tuple[int, float]]:
        """Publish what is due. Returns the last occurrence that is done, and after how many seconds to look again: 0 if
        more may be due, infinite if there is nothing more to publish here."""
        now_ms = self._log.clock.now_ms()
        due = plan(self._schedule, last_ms, now_ms)
        if due.upto_ms is None:
            return last_ms, LOOK_S if due.next_ms is None else (due.next_ms - now_ms) / 1000
        turn = yield from self._log.take_schedule(self._schedule, due.upto_ms)
        if turn.stored == "nothing":
            logger.warning("schedule %s was deleted; this process publishes it no more", self._schedule.id)
            return last_ms, math.inf
        if turn.stored == "abandoned" and self._other == "abandoned":  # a minute ago, too: its process had the time
            logger.warning("no process publishes schedule %s as it is stored; this one declares it", self._schedule.id)
            self._other = None
            return (yield from self.declare()).last_ms, 0.0
        if turn.stored != "this":
            if self._other is None:
                logger.warning("schedule %s was declared anew elsewhere; this process stands by", self._schedule.id)
            self._other = turn.stored
            return last_ms, LOOK_S
        self._other = None
        if turn.busy:
            return last_ms, BUSY_S
        if turn.fence is None:
            return turn.last_ms, 0.0
        return (yield from self._publish(turn.last_ms, turn.fence))

    def _call(self, at_ms: int) -> Flow[Any]:
        """Call the function, and renew the lease while it runs. The lease is short, so that the occurrence of a process
        that is killed is soon another's."""
        returned: Completion[None] = Completion()
        self._spawn(self._renew(at_ms, returned), f"headwater-{self.id}-renewal")
        try:
            return (yield Call(self._function, Occurrence(self._schedule.id, local_time(self._schedule, at_ms))))
        finally:
            complete([(returned, None, None)])

    def _renew(self, at_ms: int, returned: Completion[None]) -> Flow[None]:
        while not (yield WaitFor(returned, LEASE_MS / 1000 / RENEWALS_PER_LEASE)):
            try:
                yield from self._log.take_schedule(self._schedule, at_ms)
            except HeadwaterError as exc:
                logger.warning("the lease of schedule %s could not be renewed: %s", self._schedule.id, exc)

    def _failed(self, exc: Exception) -> float:
        """Returns how long to wait."""
        self._failures += 1
        wait_s = min(FAILED_S * 2.0 ** (self._failures - 1), FAILED_S_MAX)
        logger.error("schedule %s failed; the next try is in %g s", self._schedule.id, wait_s, exc_info=exc)
        return wait_s

    def _publish(self, last_ms: int, fence: int) -> Flow[tuple[int, float]]:
        """Publish all that is due. Returns the last occurrence that is done, and how long to wait after a failure."""
        schedule = self._schedule
        due = plan(schedule, last_ms, self._log.clock.now_ms())
        if due.skipped:
            logger.warning("schedule %s skips occurrences that it missed (missed=%r)", schedule.id, schedule.missed)
        upto_ms = due.upto_ms or last_ms
        for at_ms in due.publish:
            try:
                data = yield from self._call(at_ms)
            except PASSING_ERRORS:
                raise
            except Exception as exc:
                return last_ms, self._failed(from_the_function_on(exc))
            try:
                ends = at_ms == upto_ms or self._stopped.done
                done = yield from self._log.publish_occurrence(schedule, fence, at_ms, data, ends)
            except PASSING_ERRORS:
                raise
            except Exception as exc:
                return last_ms, self._failed(exc)
            self._failures = 0
            if not done:
                logger.warning("schedule %s took too long; another process has published it", schedule.id)
                return last_ms, BUSY_S
            last_ms = at_ms
            if self._stopped.done:
                return last_ms, 0.0
        if not due.publish:
            yield from self._log.publish_occurrence(schedule, fence, upto_ms, None, True)
            last_ms = upto_ms
        return last_ms, 0.0
