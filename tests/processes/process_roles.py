"""What the other processes do. Each role gets its end of a pipe, talks through it, and returns when it is done."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import headwater
from headwater.api.forwarder import Forwarder
from headwater.errors import HeadwaterError

FOREVER_S = 60.0
FORWARDER_LEASE_S = 0.3  # so that a dead holder delays no other for long


def open_log(path: str) -> headwater.Log:
    return headwater.open(path, maintenance_interval=None)


def answer(verb: Callable[[], Any]) -> str:
    """The class of the error, or "ok"."""
    try:
        verb()
    except HeadwaterError as exc:
        return type(exc).__name__
    return "ok"


def write(pipe: Connection, path: str, name: str, count: int, together: int) -> None:
    with open_log(path) as log:
        pipe.send("open")
        pipe.recv()
        seqs: list[int] = []
        for number in range(0, count, together):
            if together == 1:
                seqs.append(log.publish("a", [name, number]))
            else:
                seqs += log.publish_many([("a", [name, number + more]) for more in range(together)])
        pipe.send(seqs)


def write_on_command(pipe: Connection, path: str) -> None:
    """For each number received, so many single publishes; sends the time before the last one, and its seq."""
    with open_log(path) as log:
        pipe.send("open")
        while count := pipe.recv():
            for number in range(count):
                began = time.monotonic_ns()
                seq = log.publish("a", number)
            pipe.send((began, seq))


def insert(pipe: Connection, path: str) -> None:
    """Plain SQL through the standard library: (statement, bindings), "BEGIN", "COMMIT" and "ROLLBACK" as received."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=FOREVER_S)
    while order := pipe.recv():
        try:
            connection.execute(*order)
            pipe.send("ok")
        except sqlite3.Error as exc:
            pipe.send(str(exc))
    connection.close()


def share(pipe: Connection, path: str) -> None:
    """A competing consumer: fetches and acks until its pipe says end. Sends what it did, when."""
    done: list[tuple[int, int, int, int]] = []
    with open_log(path) as log, log.subscribe("s", ">", mode="shared") as subscription:
        pipe.send("open")
        while not pipe.poll():
            for message in subscription.fetch(7, timeout=0.05):
                received = time.monotonic_ns()
                acking = time.monotonic_ns()
                message.ack()
                done.append((message.seq, message.attempt, received, acking))
            pipe.send(len(done))
        pipe.recv()
        pipe.send(done)


def hold(pipe: Connection, path: str, mode: str, options: dict[str, Any]) -> None:
    """Fetches, then does with message number n as received: (verb, n)."""
    log = open_log(path)
    subscription = log.subscribe("s", ">", mode=mode, timeout=FOREVER_S, **options)
    messages = subscription.fetch(10, timeout=FOREVER_S)
    pipe.send([(message.seq, message.attempt) for message in messages])
    while order := pipe.recv():
        verb, at = order
        if verb == "fetch":
            pipe.send(answer(lambda: messages.extend(subscription.fetch(1))))
        else:
            pipe.send(answer(getattr(messages[at], verb)))
    log.close()


def handle(pipe: Connection, path: str, mode: str, options: dict[str, Any]) -> None:
    """Runs a handler that dies of poison, like a segmentation fault would."""
    log = open_log(path)
    log.subscribe("s", ">", mode=mode, timeout=FOREVER_S, **options).close()

    @log.on(">", id="s", mode=mode, **options)
    def handler(message: headwater.ReceivedMessage) -> None:
        pipe.send((message.data, message.attempt))
        if message.data == "poison":
            os._exit(9)

    log.start()
    pipe.recv()
    log.close()


def work_in_transaction(pipe: Connection, path: str, options: dict[str, Any]) -> None:
    """Stops inside the transaction, and after it, and waits there for a signal to go on, or to be killed."""
    log = open_log(path)
    subscription = log.subscribe("s", ">", **options)
    (message,) = subscription.fetch(1, timeout=FOREVER_S)
    with message.transaction() as transaction:
        transaction.execute("INSERT INTO done VALUES (?)", (message.seq,))
        transaction.publish("result", message.seq)
        pipe.send("inside")
        pipe.recv()
    pipe.send("outside")
    pipe.recv()


def create(pipe: Connection, path: str, name: str) -> None:
    pipe.send("ready")
    pipe.recv()
    try:
        with headwater.open(path) as log:
            pipe.send(log.publish("made.by", name))
    except HeadwaterError as exc:
        pipe.send(repr(exc))


def forward(pipe: Connection, source: str, target: str) -> None:
    """Sends its state on request; forwards until its pipe says end."""
    with open_log(source) as log:
        transport = headwater.open_transport(target)
        forwarder = Forwarder(log, transport, id="f", batch=20, wait=0, lease=FORWARDER_LEASE_S)
        forwarder.start()
        pipe.send("started")
        while pipe.recv() != "end":
            pipe.send(forwarder.status().state)
        forwarder.stop()
        transport.close()
        pipe.send(forwarder.status().forwarded)
