"""One process of the crash loop: python crash_child.py LOG SIDE ROLES SEED [SIDE OF THE ONE BEFORE]

It says "o" on stdout when the log is open and ends itself when its stdin is closed. Otherwise it works until killed.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import sys
import threading
import time
import traceback
from pathlib import Path

from crash_witness import (
    ACK_WAIT_S,
    LEASE_S,
    SUBSCRIPTIONS,
    Closing,
    Failed,
    Held,
    Published,
    Received,
    Refused,
    Settled,
    Settling,
    Trying,
    Witness,
    read,
)

import headwater
from headwater.errors import LeaseLostError, SubscriptionActiveError

TOPICS = ("work.a", "work.b", "noise.c")
ROUND_S = 0.02  # the publisher's pause between rounds, so that consumers keep up on a small machine
FETCH = 20
SHARERS = 3  # threads that iterate over one subscription object
OPTIONS = {
    "lease": LEASE_S,
    "ack_wait": ACK_WAIT_S,
    "max_attempts": 1_000,
    "max_in_flight": 60,
    "backoff": 0.01,
    "backoff_max": 0.05,
}

stopping = threading.Event()


def pause(seconds: float) -> None:
    """Waits for the parent to let us go, but no longer than this."""
    stopping.wait(seconds)


class Publisher:
    def __init__(self, log: headwater.Log, witness: Witness, name: str, dice: random.Random) -> None:
        self._log, self._witness, self._name, self._dice = log, witness, name, dice
        self._count = 0

    def run(self, before: Path | None) -> None:
        if before is not None:
            self._again(before)
        while not stopping.is_set():
            for _ in range(self._dice.randint(1, 12)):
                self._one() if self._dice.random() < 0.8 else self._many()
            pause(ROUND_S * self._dice.random())

    def _token(self) -> str:
        self._count += 1
        return f"{self._name}:{self._count}"

    def _one(self) -> None:
        token, with_id = self._token(), self._dice.random() < 0.5
        self._publish(token, with_id)
        if with_id and self._dice.random() < 0.1:  # a repeat while everything is well
            self._publish(token, with_id)

    def _publish(self, token: str, with_id: bool) -> None:
        self._witness.note(Trying, tokens=(token,), with_ids=with_id)
        topic = TOPICS[hash_of(token) % len(TOPICS)]
        if with_id:
            seq = self._log.publish(topic, data_of(token), id=token)
        else:
            seq = self._log.publish(topic, data_of(token))
        self._witness.note(Published, tokens=(token,), seqs=(seq,))

    def _many(self) -> None:
        tokens = tuple(self._token() for _ in range(self._dice.randint(2, 30)))
        with_ids = self._dice.random() < 0.5
        self._witness.note(Trying, tokens=tokens, with_ids=with_ids)
        self._publish_batch(tokens, with_ids)

    def _publish_batch(self, tokens: tuple[str, ...], with_ids: bool) -> None:
        seqs = self._log.publish_many(
            (TOPICS[hash_of(token) % len(TOPICS)], data_of(token), {"id": token} if with_ids else {})
            for token in tokens
        )
        self._witness.note(Published, tokens=tokens, seqs=tuple(seqs))

    def _again(self, before: Path) -> None:
        """What the process before us never heard back of is published once more, under the same ids."""
        unsure: dict[tuple[str, ...], None] = {}
        for event in read(before):
            if isinstance(event, Trying) and event.with_ids:
                unsure[event.tokens] = None
            elif isinstance(event, Published):
                unsure.pop(event.tokens, None)
        for tokens in unsure:
            self._witness.note(Trying, tokens=tokens, with_ids=True)
            self._publish_batch(tokens, True)


class Consumer:
    def __init__(self, log: headwater.Log, witness: Witness, id: str, dice: random.Random) -> None:
        self._log, self._witness, self._id, self._dice = log, witness, id, dice
        self._sessions = 0
        self._began = 0  # when the session did

    def run(self, *, until_empty: bool = False) -> None:
        while not stopping.is_set():
            subscription = self._subscribe()
            if subscription is None:
                continue
            try:
                for turn in itertools.count():
                    if stopping.is_set():
                        break
                    # Now and then: to count what is left of a large log takes longer than to work some of it off.
                    if until_empty and turn % 50 == 0 and self._log.subscription(self._id).lag == 0:
                        return
                    self._work(subscription, careful=until_empty)
            except LeaseLostError:
                continue  # by another holder; begin again
            finally:
                self._witness.note(Closing, subscription=self._id, holder=self._holder)
                subscription.close()

    @property
    def _holder(self) -> str:
        return f"{self._witness._actor}#{self._sessions}"

    def _subscribe(self) -> headwater.Subscription | None:
        mode, pattern, _ = SUBSCRIPTIONS[self._id]
        self._began = time.monotonic_ns()
        try:
            subscription = self._log.subscribe(self._id, pattern, mode=mode, **OPTIONS)
        except SubscriptionActiveError:
            pause(LEASE_S / 8)
            return None
        self._sessions += 1
        self._witness.note(Held, subscription=self._id, holder=self._holder)
        return subscription

    def _work(self, subscription: headwater.Subscription, *, careful: bool) -> None:
        began = time.monotonic_ns()
        messages = subscription.fetch(FETCH, timeout=0.2)
        if not messages:
            return
        found = tuple((message.seq, message.attempt, message.data["token"]) for message in messages)
        self._witness.note(Received, subscription=self._id, holder=self._holder, began=began, found=found)
        if not careful and self._dice.random() < 0.02:
            return  # left to its fate: the ack wait runs out
        if careful or self._dice.random() < 0.3:
            self._settle(subscription, self._witness, "ack", messages)
            return
        self._dice.shuffle(messages)
        for message in messages:
            self._settle(subscription, self._witness, "nack" if self._dice.random() < 0.04 else "ack", [message])

    def _settle(
        self,
        subscription: headwater.Subscription,
        witness: Witness,
        how: str,
        messages: list[headwater.ReceivedMessage],
    ) -> None:
        about = {
            "subscription": self._id,
            "holder": self._holder,
            "how": how,
            "keys": tuple((message.seq, message.attempt) for message in messages),
        }
        began = witness.note(Settling, **about)
        try:
            if how == "ack":
                subscription.ack_many(messages)
            else:
                messages[0].nack(self._dice.random() * 0.05)
        except LeaseLostError as exc:
            witness.note(Refused, error=exc.why, **about)
            if "taken over" in exc.why:
                raise
        else:
            witness.note(Settled, began=began, **about)


class Sharers(Consumer):
    """Threads that iterate over one subscription object. Each message goes to one of them."""

    def __init__(self, log: headwater.Log, witness: Witness, id: str, dice: random.Random, side: str) -> None:
        super().__init__(log, witness, id, dice)
        self._witnesses = [Witness(side, f"{witness._actor}-{number}") for number in range(SHARERS)]

    def _work(self, subscription: headwater.Subscription, *, careful: bool) -> None:
        lost: list[LeaseLostError] = []
        threads = [
            threading.Thread(
                target=guarded,
                args=(witness, self._iterate, {"subscription": subscription, "witness": witness, "lost": lost}),
                daemon=True,
            )
            for witness in self._witnesses
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if lost:
            raise lost[0]

    def _iterate(self, subscription: headwater.Subscription, witness: Witness, lost: list[LeaseLostError]) -> None:
        about = {"subscription": self._id, "holder": self._holder, "began": self._began, "fetched_ahead": True}
        try:
            while not stopping.is_set() and not lost:
                for message in subscription.messages(timeout=0.2):
                    found = ((message.seq, message.attempt, message.data["token"]),)
                    witness.note(Received, found=found, **about)
                    if self._dice.random() > 0.002:  # else left to its fate
                        how = "nack" if self._dice.random() < 0.04 else "ack"
                        self._settle(subscription, witness, how, [message])
                    if stopping.is_set() or lost:
                        break
        except LeaseLostError as exc:
            lost.append(exc)


class HandlerHost:
    """Lets the log call a handler. When an ack of its own returns is not to be seen, only that the handler returned."""

    def __init__(self, log: headwater.Log, witness: Witness, id: str, dice: random.Random) -> None:
        self._log, self._witness, self._id, self._dice = log, witness, id, dice
        self._holder = f"{witness._actor}#1"
        self._began = time.monotonic_ns()

    def run(self) -> None:
        mode, pattern, _ = SUBSCRIPTIONS[self._id]
        self._log.on(pattern, id=self._id, mode=mode, **OPTIONS)(self._handle)
        while not stopping.is_set():
            try:
                self._log.start()
            except SubscriptionActiveError:
                pause(LEASE_S / 8)
                continue
            self._witness.note(Held, subscription=self._id, holder=self._holder)
            stopping.wait()
            self._witness.note(Closing, subscription=self._id, holder=self._holder)

    def _handle(self, message: headwater.ReceivedMessage) -> None:
        about = {"subscription": self._id, "holder": self._holder}
        found = ((message.seq, message.attempt, message.data["token"]),)
        self._witness.note(Received, began=self._began, found=found, fetched_ahead=True, **about)
        how = "nack" if self._dice.random() < 0.03 else "ack"
        self._witness.note(Settling, how=how, keys=((message.seq, message.attempt),), **about)
        if how == "nack":
            raise RuntimeError("the dice say no")


def data_of(token: str) -> dict[str, object]:
    size = hash_of(token) % 400
    return {"token": token, "text": "x" * (size * 20 if size < 5 else size)}


def hash_of(token: str) -> int:
    return random.Random(token).randrange(1 << 30)  # not hash(), which differs from process to process


def main() -> None:
    path, side, roles, seed = sys.argv[1:5]
    before = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    name = Path(side).stem
    try:
        log = headwater.open(path, maintenance_interval=None)
    except BaseException:
        Witness(side, name).note(Failed, error=traceback.format_exc())
        raise
    os.write(1, b"o")
    threads = []
    for number, role in enumerate(roles.split(",")):
        witness, dice = Witness(side, f"{name}/{role}"), random.Random(f"{seed}/{number}")
        if role.startswith("publish"):
            work = (Publisher(log, witness, f"{name}/{role}", dice).run, {"before": before if number == 0 else None})
        else:
            verb, _, id = role.partition(":")
            if verb == "handle":
                work = (HandlerHost(log, witness, id, dice).run, {})
            elif verb == "share":
                work = (Sharers(log, witness, id, dice, side).run, {})
            else:
                work = (Consumer(log, witness, id, dice).run, {"until_empty": verb == "drain"})
        threads.append(threading.Thread(target=guarded, args=(witness, *work), daemon=True))
    for thread in threads:
        thread.start()
    if "drain" not in roles:
        select.select([0], [], [])  # until the parent closes our stdin
        stopping.set()
    for thread in threads:
        thread.join()
    log.close()


def guarded(witness: Witness, work: object, arguments: dict[str, object]) -> None:
    try:
        work(**arguments)  # type: ignore[operator]
    except BaseException:
        witness.note(Failed, error=traceback.format_exc())
        os._exit(3)


if __name__ == "__main__":
    main()
