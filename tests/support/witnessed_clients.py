"""Clients of a server that record what they see, for the checker of the crash loop: sync and asyncio, publishers,
consumers of every mode, and handlers. They never give up by themselves; whatever is done to their connection, they
carry on."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from crash_child import TOPICS, data_of, hash_of
from crash_witness import (
    SUBSCRIPTIONS,
    AnyEvent,
    Closing,
    Failed,
    Held,
    Published,
    Received,
    Settled,
    Settling,
    Trying,
)

import headwater
from headwater.errors import LeaseLostError

FETCH = 20
FETCH_WAIT_S = 0.5
SHARERS = 3  # tasks or threads that iterate over one subscription object, beside one that fetches
PAUSE_S = 0.02  # a publisher's pause between rounds, so that consumers keep up on a small machine
SHARED_ACK_WAIT_S = 3.0  # what was on its way to a consumer of a server that was killed waits so long
UNNOTICED_S = 2.0  # how much later than the server a client may notice that their connection is gone
PATIENCE_S = 60.0
HAND = "~"  # between the name of a consumer and the number of its task or thread
NACKED, REPEATED, BATCHED = 0.03, 0.1, 0.3  # how often


class Notebook:
    """What all of them write into; others may wait for something to be written."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.steps: Counter[str] = Counter()
        """By worker: how much of its work is done. By subscription: how often it delivered something."""
        self.refused = 0
        self.stopping = threading.Event()
        self._changed = threading.Condition()

    def note(self, kind: type[Any], actor: str, *, t: int | None = None, **fields: Any) -> int:
        event = kind(actor=actor, t=time.monotonic_ns() if t is None else t, **fields)
        with self._changed:
            self.events.append(event)
            if kind in (Published, Settled, Settling):
                self.steps[actor.partition(HAND)[0]] += 1
            elif kind is Received:
                self.steps[fields["subscription"]] += 1
            self._changed.notify_all()
        return int(event.t)

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, PATIENCE_S):
                raise TimeoutError(f"{what}: not in {PATIENCE_S:.0f} s; so far {dict(self.steps)}")

    def wait_for_steps(self, actor: list[str], more: int = 1) -> None:
        """Until each of them has got something done from now on: none hangs."""
        with self._changed:
            goal = {name: self.steps[name] + more for name in actor}
        self.wait_until(lambda: all(self.steps[name] >= steps for name, steps in goal.items()), f"all of {actor} go on")


class Worker:
    """One publisher, consumer or handler, and its dice."""

    def __init__(self, book: Notebook, actor: str, seed: object) -> None:
        self.book, self.actor = book, actor
        self.dice = random.Random(f"{seed}/{actor}")

    def note(self, kind: type[Any], **fields: Any) -> int:
        return self.book.note(kind, self.actor, **fields)


# --- publishing -------------------------------------------------------------------------------------------------------


class Publisher(Worker):
    def __init__(self, book: Notebook, actor: str, seed: object) -> None:
        super().__init__(book, actor, seed)
        self._numbers = itertools.count(1)

    def _tokens(self, most: int) -> list[str]:
        return [f"{self.actor}:{next(self._numbers)}" for _ in range(self.dice.randint(1, most))]

    def _arguments(self, token: str, with_id: bool) -> tuple[str, Any, dict[str, Any]]:
        return TOPICS[hash_of(token) % len(TOPICS)], data_of(token), {"id": token} if with_id else {}

    def run(self, log: headwater.Log) -> None:
        while not self.book.stopping.is_set():
            with_ids = self.dice.random() < 0.3
            tokens = self._tokens(12)
            if self.dice.random() < BATCHED:
                self.note(Trying, tokens=tuple(tokens), with_ids=with_ids)
                seqs = log.publish_many(self._arguments(token, with_ids) for token in tokens)
                self.note(Published, tokens=tuple(tokens), seqs=tuple(seqs))
            else:
                for token in tokens:
                    for _ in range(2 if with_ids and self.dice.random() < REPEATED else 1):
                        topic, data, options = self._arguments(token, with_ids)
                        self.note(Trying, tokens=(token,), with_ids=with_ids)
                        seq = log.publish(topic, data, **options)
                        self.note(Published, tokens=(token,), seqs=(seq,))
            self.book.stopping.wait(self.dice.uniform(0, PAUSE_S))

    async def run_async(self, log: headwater.AsyncLog) -> None:
        while not self.book.stopping.is_set():
            with_ids = self.dice.random() < 0.3
            tokens = self._tokens(25)
            if self.dice.random() < BATCHED:
                self.note(Trying, tokens=tuple(tokens), with_ids=with_ids)
                seqs = await log.publish_many(self._arguments(token, with_ids) for token in tokens)
                self.note(Published, tokens=tuple(tokens), seqs=tuple(seqs))
            else:  # at once, so that they travel together
                telling = []
                for token in tokens:
                    topic, data, options = self._arguments(token, with_ids)
                    self.note(Trying, tokens=(token,), with_ids=with_ids)
                    telling.append(log.publish(topic, data, **options))
                for token, seq in zip(tokens, await asyncio.gather(*telling), strict=True):
                    self.note(Published, tokens=(token,), seqs=(seq,))
            await asyncio.to_thread(self.book.stopping.wait, self.dice.uniform(0, PAUSE_S))


# --- consuming --------------------------------------------------------------------------------------------------------


class Consumer(Worker):
    """Several tasks or threads share its subscription object; they go on after the publishers stop, until `done` is
    set. A shared one is another holder on each connection: what it held on a broken one may be passed on to others."""

    def __init__(self, book: Notebook, actor: str, seed: object, id: str, done: threading.Event) -> None:
        super().__init__(book, actor, seed)
        self.id, self.done = id, done
        self.mode, self.pattern, _ = SUBSCRIPTIONS[id]
        self.options: dict[str, Any] = {"mode": self.mode, "backoff": 0.01, "backoff_max": 0.05}
        if self.mode == "shared":  # the others have the default, so that none has to wait for it
            self.options["ack_wait"] = SHARED_ACK_WAIT_S
        self._connections = 1
        self._since = 0  # when it began

    @property
    def holder(self) -> str:
        return f"{self.actor}#{self._connections}"

    def on_state(self, state: str) -> None:
        if state == "reconnecting" and self.mode == "shared":
            gone, self._connections = self.holder, self._connections + 1
            noticed = time.monotonic_ns() - round(UNNOTICED_S * 1e9)
            self.note(Closing, subscription=self.id, holder=gone, t=noticed)

    def _began(self) -> None:
        self._since = self.note(Held, subscription=self.id, holder=self.holder)

    def _received(self, hand: str, messages: Any) -> str:
        """Returns their holder. When they were fetched is not known: perhaps for another hand, and before this one
        asked."""
        holder = self.holder
        found = tuple((message.seq, message.attempt, message.data["token"]) for message in messages)
        about = {"subscription": self.id, "holder": holder, "began": self._since, "fetched_ahead": True}
        self.book.note(Received, hand, found=found, **about)
        return holder

    def _hands(self) -> list[str]:
        return [f"{self.actor}{HAND}{number}" for number in range(SHARERS + 1)]

    def _plan(self, messages: list[Any]) -> list[tuple[str, list[Any]]]:
        """What to do with them: ack all at once, or each for itself, and now and then let one come again."""
        if len(messages) > 1 and self.dice.random() < 0.5:
            return [("ack", messages)]
        self.dice.shuffle(messages)
        return [("nack" if self.dice.random() < NACKED else "ack", [message]) for message in messages]

    def _about(self, holder: str, how: str, messages: list[Any]) -> dict[str, Any]:
        keys = tuple((message.seq, message.attempt) for message in messages)
        return {"subscription": self.id, "holder": holder, "how": how, "keys": keys}

    def _refused(self, how: str, some: list[Any], error: LeaseLostError) -> list[tuple[str, list[Any]]]:
        """What is left to do. All acks hold or none does: one that was passed on keeps the others from being acked. One
        that is refused by itself after the connection broke may have got through before, so nothing is noted of it."""
        if self.mode == "exclusive":
            raise error  # no other consumer wants it, so none may have it
        self.book.refused += 1
        return [(how, [message]) for message in some] if len(some) > 1 else []

    def run(self, log: headwater.Log) -> None:
        subscription = log.subscribe(self.id, self.pattern, **self.options)
        log.remote.on_state(self.on_state)
        self._began()
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._take, args=(subscription, hand, errors), name=hand, daemon=True)
            for hand in self._hands()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.note(Closing, subscription=self.id, holder=self.holder)
        subscription.close()

    def _take(self, subscription: Any, hand: str, errors: list[BaseException]) -> None:
        fetches = hand.endswith(f"{HAND}0")
        try:
            while not self.done.is_set() and not errors:
                if fetches:
                    self._work(subscription, hand, subscription.fetch(FETCH, timeout=FETCH_WAIT_S))
                else:
                    for message in subscription.messages(timeout=FETCH_WAIT_S):
                        self._work(subscription, hand, [message])
        except BaseException as exc:
            errors.append(exc)

    def _work(self, subscription: Any, hand: str, messages: list[Any]) -> None:
        if not messages:
            return
        holder = self._received(hand, messages)
        plan = self._plan(messages)
        while plan:
            how, some = plan.pop()
            about = self._about(holder, how, some)
            called = self.book.note(Settling, hand, **about)
            try:
                subscription.ack_many(some) if how == "ack" else some[0].nack(self.dice.uniform(0, 0.05))
            except LeaseLostError as exc:
                plan += self._refused(how, some, exc)
            else:
                self.book.note(Settled, hand, began=called, **about)

    async def run_async(self, log: headwater.AsyncLog) -> None:
        subscription = await log.subscribe(self.id, self.pattern, **self.options)
        log.remote.on_state(self.on_state)
        self._began()
        await asyncio.gather(*(self._take_async(subscription, hand) for hand in self._hands()))
        self.note(Closing, subscription=self.id, holder=self.holder)
        await subscription.close()

    async def _take_async(self, subscription: Any, hand: str) -> None:
        while not self.done.is_set():
            if hand.endswith(f"{HAND}0"):
                await self._work_async(subscription, hand, await subscription.fetch(FETCH, timeout=FETCH_WAIT_S))
            else:
                async for message in subscription.messages(timeout=FETCH_WAIT_S):
                    await self._work_async(subscription, hand, [message])

    async def _work_async(self, subscription: Any, hand: str, messages: list[Any]) -> None:
        if messages:
            holder = self._received(hand, messages)
            plan = self._plan(messages)
            await asyncio.gather(*(self._settle(subscription, hand, holder, how, some) for how, some in plan))

    async def _settle(self, subscription: Any, hand: str, holder: str, how: str, some: list[Any]) -> None:
        about = self._about(holder, how, some)
        called = self.book.note(Settling, hand, **about)
        try:
            await (subscription.ack_many(some) if how == "ack" else some[0].nack(self.dice.uniform(0, 0.05)))
        except LeaseLostError as exc:
            for again, each in self._refused(how, some, exc):
                await self._settle(subscription, hand, holder, again, each)
        else:
            self.book.note(Settled, hand, began=called, **about)


class HandlerHost(Consumer):
    """Lets the log call a handler. When its ack returns is not to be seen, only that the handler returned."""

    async def run_async(self, log: headwater.AsyncLog) -> None:
        began = time.monotonic_ns()

        @log.on(self.pattern, id=self.id, **self.options)
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            about = {"subscription": self.id, "holder": self.holder}
            found = ((message.seq, message.attempt, message.data["token"]),)
            self.note(Received, began=began, found=found, fetched_ahead=True, **about)
            how = "nack" if self.dice.random() < NACKED else "ack"
            self.note(Settling, how=how, keys=((message.seq, message.attempt),), **about)
            if how == "nack":
                raise RuntimeError("the dice say no")

        await log.start()
        self._began()
        await asyncio.to_thread(self.done.wait)
        self.note(Closing, subscription=self.id, holder=self.holder)
        await log.stop()


# --- clients ----------------------------------------------------------------------------------------------------------


class Client:
    """One connection with its workers, on threads or as tasks of one event loop."""

    def __init__(self, name: str, url: str, book: Notebook, workers: list[Worker], options: dict[str, Any]) -> None:
        self.name, self.url, self.book, self.workers, self.options = name, url, book, workers, options
        self.states: list[str] = []
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.name} hangs"

    def _guarded(self) -> None:
        try:
            self._work()
        except BaseException:
            self.book.note(Failed, self.name, error=traceback.format_exc())

    def _work(self) -> None:
        raise NotImplementedError


class BlockingClient(Client):
    def _work(self) -> None:
        with headwater.open(self.url, **self.options) as log:
            self.states.append(log.remote.state)
            log.remote.on_state(self.states.append)
            threads = [
                threading.Thread(target=self._each, args=(worker, log), name=worker.actor, daemon=True)
                for worker in self.workers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _each(self, worker: Any, log: headwater.Log) -> None:
        try:
            worker.run(log)
        except BaseException:
            self.book.note(Failed, worker.actor, error=traceback.format_exc())


class AwaitingClient(Client):
    def _work(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with headwater.open_async(self.url, **self.options) as log:
            self.states.append(log.remote.state)
            log.remote.on_state(self.states.append)
            await asyncio.gather(*(self._each(worker.actor, worker.run_async(log)) for worker in self.workers))  # type: ignore[attr-defined]

    async def _each(self, actor: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException:
            self.book.note(Failed, actor, error=traceback.format_exc())


class Company:
    """Four clients: every kind of publisher and consumer is among them."""

    def __init__(self, url: str, seed: object, options: dict[str, Any]) -> None:
        self.book = book = Notebook()
        self.done = done = threading.Event()

        def consumer(kind: type[Consumer], actor: str, id: str) -> Consumer:
            return kind(book, actor, seed, id, done)

        self.clients: list[Client] = [
            BlockingClient(
                "one", url, book, [Publisher(book, "one/p", seed), consumer(Consumer, "one/ex", "ex")], options
            ),
            BlockingClient("two", url, book, [consumer(Consumer, "two/sh", "sh")], options),
            AwaitingClient(
                "three", url, book, [Publisher(book, "three/p", seed), consumer(Consumer, "three/mix", "mix")], options
            ),
            AwaitingClient(
                "four",
                url,
                book,
                [consumer(Consumer, "four/sh", "sh"), consumer(HandlerHost, "four/hd", "hd")],
                options,
            ),
        ]

    @property
    def everybody(self) -> list[str]:
        return [worker.actor for client in self.clients for worker in client.workers]

    def start(self) -> None:
        for client in self.clients:
            client.start()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Until every worker has got something done from now on, and each subscription has delivered something."""
        self._check_alive()
        alone = [actor for actor in self.everybody if not actor.endswith("/sh")]  # two consumers that share the work
        self.book.wait_for_steps([*alone, *SUBSCRIPTIONS])
        self._check_alive()

    def _check_alive(self) -> None:
        failed = [event for event in self.book.events if isinstance(event, Failed)]
        assert not failed, failed[0].error

    def finish(self, direct_url: str) -> None:
        """Stop publishing, let all that is there be consumed, and leave."""
        self.book.stopping.set()
        with headwater.open(direct_url) as direct:
            until_s = time.monotonic() + PATIENCE_S
            while any(direct.subscription(id).lag for id in SUBSCRIPTIONS):
                self._check_alive()
                assert time.monotonic() < until_s, f"left over: {direct.subscriptions()}"
                self.done.wait(0.02)
        self.done.set()
        for client in self.clients:
            client.join()
