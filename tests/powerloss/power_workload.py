"""A life of a log, recorded once, with marks for what its user knew; and the check of what a cut left of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import apsw
from power_disk import Mark, Recorder, Step

import headwater
from headwater.api._sync import Log
from headwater.broker.committer import Committer
from headwater.broker.engine import Engine
from headwater.broker.log import LocalLog
from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.store import PUBLISHING
from headwater.stores.sqlite import Durability, SqliteStore

NAME = "log.db"
MODES = {"ex": "exclusive", "sh": "shared"}
OPTIONS: dict[str, Any] = {"max_attempts": 100, "ack_wait": 60, "lease": 60}
START_MS = 1_700_000_000_000
AN_HOUR_MS = 3_600_000
IN_FLIGHT_MAX = 8

Unsynced = Literal["publish", "ack"]


def record(
    directory: Path, durability: Durability, rounds: int, seed: int, *, without_sync: Unsynced | None = None
) -> list[Step]:
    """`without_sync`: publishes or acks are committed as claims are, which is a mistake."""
    recorder = Recorder(f"recorder-{durability}-{seed}")
    try:
        clock = headwater.ManualClock(START_MS)
        store = SqliteStore(directory / NAME, durability=durability, vfs=recorder.name)
        engine = Engine(store, clock, dedupe=DedupeWindow())
        if without_sync is not None:
            _leave_out_syncs(engine.committer, without_sync)
        log = Log(LocalLog(engine, maintenance_s=None, heartbeats=False))
        recorder.mark("open")
        _Workload(log, store, clock, recorder, random.Random(seed)).run(rounds)
        log.close()
        recorder.mark("closed")
        return recorder.steps
    finally:
        recorder.unregister()


def _leave_out_syncs(committer: Committer, of: Unsynced) -> None:
    submit = committer.submit

    def unsynced(work: Any, *arguments: Any, touching: str | None = None, **options: Any) -> Any:
        is_ack = getattr(getattr(work, "func", None), "__name__", "") == "ack_in"
        if is_ack if of == "ack" else touching == PUBLISHING:
            options["synced"] = False
        return submit(work, *arguments, touching=touching, **options)

    committer.submit = unsynced  # type: ignore[method-assign, assignment]


class _Workload:
    def __init__(
        self,
        log: Log,
        store: SqliteStore,
        clock: headwater.ManualClock,
        recorder: Recorder,
        dice: random.Random,
    ) -> None:
        self._log, self._store, self._clock, self._mark, self._dice = log, store, clock, recorder.mark, dice
        self._count = 0

    def run(self, rounds: int) -> None:
        log = self._log
        log.retain("old.>", max_count=10)
        subscriptions = {id: log.subscribe(id, "work.>", mode=mode, **OPTIONS) for id, mode in MODES.items()}
        in_flight: dict[str, list[headwater.ReceivedMessage]] = {id: [] for id in MODES}
        for number in range(rounds):
            self._clock.advance(0.007)
            self._publish()
            for id, subscription in subscriptions.items():
                room = IN_FLIGHT_MAX - len(in_flight[id])
                if room > 0:
                    found = subscription.fetch(room)
                    self._mark("claimed", (id, {message.seq: message.attempt for message in found}))
                    in_flight[id] += found
                self._settle(id, subscription, in_flight[id])
            if number % 16 == 9:
                self._store.checkpoint()  # the next commit begins the WAL anew
            if number % 24 == 20:
                self._mark("pruning")
                log.run_maintenance()

    def _publish(self) -> None:
        roll = self._dice.random()
        if roll < 0.5:
            self._publish_these([self._draft("work.one")])
        elif roll < 0.75:
            plain = self._dice.random() < 0.5
            self._publish_these([self._draft("work.many", plain=plain) for _ in range(self._dice.randint(2, 20))])
        else:
            self._publish_these([self._draft("old.stuff", self._dice.randint(500, 9_000)) for _ in range(4)])

    def _draft(self, topic: str, size: int | None = None, *, plain: bool = False) -> tuple[str, Any, dict[str, str]]:
        self._count += 1
        data = {"n": self._count, "text": "x" * (self._dice.randint(1, 300) if size is None else size)}
        return topic, data, {} if plain or self._count % 3 else {"id": f"id-{self._count}"}

    def _publish_these(self, drafts: list[tuple[str, Any, dict[str, str]]]) -> None:
        self._mark("publishing", drafts)
        seqs: Sequence[int] | None = None
        if not any(options for _, _, options in drafts):
            # As a thread without consumers does; with a clock that is moved, the log would never do so by itself.
            seqs = self._store.publish_at_once([make_draft(topic, data, {}, 0) for topic, data, _ in drafts])
        if seqs is None:
            seqs = self._log.publish_many(drafts)
        self._mark("published", list(zip(seqs, drafts, strict=True)))

    def _settle(self, id: str, subscription: headwater.Subscription, held: list[headwater.ReceivedMessage]) -> None:
        self._dice.shuffle(held)
        roll = self._dice.random()
        if roll < 0.15 and held:
            message = held.pop()
            self._mark("nacking", (id, message.seq))
            message.nack(0.01)
        elif roll < 0.9:
            share = [held.pop() for _ in range(min(len(held), self._dice.randint(1, IN_FLIGHT_MAX)))]
            if share:
                seqs = [message.seq for message in share]
                self._mark("acking", (id, seqs))
                subscription.ack_many(share)
                self._mark("acked", (id, seqs))


# --- after the cut --------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What the user knew when the power failed."""

    published: dict[int, tuple[str, Any, dict[str, str]]]
    tried: set[int]  # the numbers in the data
    acked: dict[str, set[int]]
    perhaps_acked: dict[str, set[int]]
    attempts: dict[str, dict[int, int]]
    pruning: bool
    has_subscriptions: bool


def what_was_known(marks: Iterable[Step]) -> Known:
    """Sums up the marks before the cut."""
    acked, perhaps_acked, attempts = ({id: kind() for id in MODES} for kind in (set, set, dict))
    now = Known({}, set(), acked, perhaps_acked, attempts, False, False)
    for mark in marks:
        if not isinstance(mark, Mark):
            continue
        match mark.what:
            case "publishing":
                now.tried.update(data["n"] for _, data, _ in mark.about)
                now = now._replace(has_subscriptions=True)  # the workload subscribes before it publishes
            case "published":
                now.published.update(mark.about)
            case "claimed":
                now.attempts[mark.about[0]].update(mark.about[1])
            case "acking":
                now.perhaps_acked[mark.about[0]].update(mark.about[1])
            case "acked":
                now.acked[mark.about[0]].update(mark.about[1])
            case "pruning":
                now = now._replace(pruning=True)
    return now


class Verdict(NamedTuple):
    broken: list[str]  # what no cut may ever do, relaxed or not
    lost: list[str]  # what was acknowledged and is not there any more
    uncounted: list[int]  # messages whose last attempt is not counted: their claim was lost, which is allowed


def judge(directory: Path, image: dict[str, bytes], known: Known) -> Verdict:
    """Open what the cut left, with the ordinary VFS, an hour later."""
    for name, content in image.items():
        (directory / name).write_bytes(content)
    path = directory / NAME
    verdict = Verdict([], [], [])
    try:
        clock = headwater.ManualClock(START_MS + AN_HOUR_MS)
        # Relaxed only so that looking is quick; it changes nothing in what is found.
        with headwater.open(
            path, durability="relaxed", maintenance_interval=None, heartbeats=False, clock=clock
        ) as log:
            _judge_deliveries(log, known, verdict)
            _judge_seqs(log, known, verdict)
        _judge_rows(path, known, verdict)
    except (headwater.HeadwaterError, apsw.Error) as exc:
        verdict.broken.append(f"{type(exc).__name__}: {exc}")
    return verdict


def _judge_deliveries(log: Log, known: Known, verdict: Verdict) -> None:
    if not known.has_subscriptions:
        return
    wanted = {seq for seq, (topic, _, _) in known.published.items() if topic.startswith("work.")}
    for id, mode in MODES.items():
        subscription = log.subscribe(id, "work.>", mode=mode, **OPTIONS)
        seqs: list[int] = []
        while messages := subscription.fetch(1_000):
            seqs += [message.seq for message in messages]
            attempts = known.attempts[id]
            verdict.uncounted.extend(
                message.seq for message in messages if message.attempt <= attempts.get(message.seq, 0)
            )
            subscription.ack_many(messages)  # what was in flight comes one at a time, the next when this one is settled
        found = set(seqs)
        if len(found) != len(seqs):
            verdict.broken.append(f"{id} delivers something twice: {sorted(seqs)}")
        if again := found & known.acked[id]:
            verdict.lost.append(f"{id} delivers {sorted(again)} again, though acked")
        if skipped := wanted - found - known.perhaps_acked[id]:
            verdict.lost.append(f"{id} skips {sorted(skipped)}")


def _judge_seqs(log: Log, known: Known, verdict: Verdict) -> None:
    top = max(known.published, default=0)
    for seq, (topic, data, options) in list(known.published.items())[-40:]:
        if options and log.publish(topic, data, **options) != seq:
            verdict.lost.append(f"id {options['id']} is forgotten")
    seq = log.publish("after.cut", None)
    if seq <= top:
        verdict.lost.append(f"seq {seq} is given again, {top} was there before")


def _judge_rows(path: Path, known: Known, verdict: Verdict) -> None:
    connection = apsw.Connection(str(path))
    try:
        integrity: Sequence[Any] = connection.execute("PRAGMA integrity_check").fetchall()
        if integrity != [("ok",)]:
            verdict.broken.append(f"integrity_check: {integrity}")
        rows = {
            seq: (topic, json.loads(data))
            for seq, topic, data in connection.execute(
                "SELECT seq, topic, data FROM messages WHERE topic <> 'after.cut'"
            )
        }
    finally:
        connection.close()
    for seq, (topic, data, _) in known.published.items():
        if rows.get(seq) != (topic, data) and not (known.pruning and topic.startswith("old.")):
            verdict.lost.append(f"message {seq} on {topic} is {'changed' if seq in rows else 'gone'}")
    for seq, (_, data) in rows.items():
        if data["n"] not in known.tried:
            verdict.broken.append(f"message {seq} comes from nowhere")
