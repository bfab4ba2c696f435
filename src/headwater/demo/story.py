"""The story, step by step. Every ✓ is a check of what really happened in the log."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import headwater
from headwater.demo import this_command
from headwater.demo.worker import LEASE_S, SUBSCRIPTION
from headwater.errors import InvalidOptionError

ORDERS = 8
KILLED_AT = 4
BACKOFF_S = 0.2
LATENCY_MS_MAX = 3_000  # on a machine that is busy with other things; a few ms is usual
PATIENCE_S = 10.0  # nothing here takes this long; if it does, the demo has failed
LOOK_AGAIN_S = 0.01
COLUMNS_MAX = 92


def run(directory: str | None = None) -> None:
    """Run it all; raises DemoFailed at the first claim that does not hold."""
    folder = Path(directory or tempfile.mkdtemp(prefix="headwater-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.db"
    if path.exists():
        raise InvalidOptionError("a demo has been here", where=str(path), next="Remove it, or name another directory")
    narrator = Narrator()
    narrator.tell(f"A log is one SQLite file; this one is {path}. No server runs.")
    began = time.monotonic()
    logger = logging.getLogger("headwater")
    level_before = logger.level
    logger.setLevel(logging.ERROR)  # the failures below are meant
    try:
        with headwater.open(path) as log:
            publish_orders(narrator, log)
            kill_and_resume(narrator, log, path)
            dead_letter_and_redrive(narrator, log)
            insert_with_sql(narrator, log, path)
            look_around(narrator, log, path)
    finally:
        logger.setLevel(level_before)
    narrator.tell(f"{narrator.checked} claims checked in {time.monotonic() - began:.1f} s.")


# --- 1 to 3: a subscriber dies, another goes on ---------------------------------------------------------------------


def publish_orders(narrator: Narrator, log: headwater.Log) -> None:
    narrator.chapter("Publish", f"We publish {ORDERS} orders. When publish returns, the message is on disk.")
    seqs = [log.publish("orders.new", {"order": number, "total": number * 10}) for number in range(1, ORDERS + 1)]
    narrator.show(f"log.publish('orders.new', {{'order': 1, 'total': 10}})  →  seq {seqs[0]}")
    narrator.check(seqs == list(range(1, ORDERS + 1)), f"{ORDERS} orders are in the log, as seq 1 to {seqs[-1]}")


def kill_and_resume(narrator: Narrator, log: headwater.Log, path: Path) -> None:
    narrator.chapter(
        "One subscription, two processes",
        f"A process handles orders as '{SUBSCRIPTION}'. While it is in the middle of order {KILLED_AT}, a second "
        "process asks for the same subscription.",
    )
    with Worker(path, stop_at=KILLED_AT) as first:
        acked = watch_until_it_stops(narrator, first)
        with Worker(path) as second:
            events = second.events()
            refusal = next(events, {"event": "nothing"})
            show_event(narrator, second, refusal)
            narrator.check(refusal["event"] == "refused", "the second one is refused: there is one holder at a time")

            narrator.chapter(
                "Kill the first one",
                f"SIGKILL, in the middle of order {KILLED_AT}: it cannot clean up. The second one keeps asking, and "
                f"gets the subscription when the dead one's lease of {LEASE_S:.0f} s has run out.",
            )
            first.kill()
            narrator.show(f"process {first.pid}  killed", "red")
            handled = []
            for event in events:
                show_event(narrator, second, event)
                if event["event"] == "handling":
                    handled.append((event["order"], event["attempt"]))
    narrator.check(first.returncode == -signal.SIGKILL, "the first process died of SIGKILL")
    narrator.check(
        acked == list(range(1, KILLED_AT)) and [order for order, _ in handled] == list(range(KILLED_AT, ORDERS + 1)),
        f"orders 1 to {KILLED_AT - 1} were acked before and did not come again; {KILLED_AT} to {ORDERS} came",
    )
    narrator.check(handled[0] == (KILLED_AT, 2), f"order {KILLED_AT} came first, marked as attempt 2")
    narrator.check(all(attempt == 1 for _, attempt in handled[1:]), "the orders after it came for the first time")
    narrator.check(log.subscription(SUBSCRIPTION).lag == 0, f"'{SUBSCRIPTION}' has nothing left to do")


def watch_until_it_stops(narrator: Narrator, worker: Worker) -> list[int]:
    """The orders it acked before it came to the one where it waits to be killed."""
    acked: list[int] = []
    for event in worker.events():
        show_event(narrator, worker, event)
        if event["event"] == "acked":
            acked.append(event["order"])
        elif event["order"] == KILLED_AT:
            break
    return acked


class Worker:
    """A process that runs `worker.py`. Leaving the `with` block ends it, whatever happened."""

    def __init__(self, path: Path, stop_at: int | None = None) -> None:
        arguments = [str(path)] if stop_at is None else [str(path), str(stop_at)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.demo.worker", *arguments], stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def events(self) -> Iterator[dict[str, Any]]:
        """What it says, as it says it. If it hangs it is killed, so that the demo ends and its checks fail."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                yield json.loads(line)
        finally:
            timer.cancel()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def show_event(narrator: Narrator, worker: Worker, event: dict[str, Any]) -> None:
    if event["event"] == "refused":
        narrator.show(f"process {worker.pid}  {event['why']}", "yellow")
    elif event["event"] == "handling":
        narrator.show(f"process {worker.pid}  handles order {event['order']}, attempt {event['attempt']}")


# --- 4: a message that always fails ---------------------------------------------------------------------------------


def dead_letter_and_redrive(narrator: Narrator, log: headwater.Log) -> None:
    narrator.chapter(
        "Poison and dead letters",
        "A handler fails on one payment each time. It is tried 3 times, with a longer pause each time, and then put "
        "aside: the payments behind it are not held up.",
    )
    paid: list[int] = []
    tries: list[float] = []
    currencies = {"EUR"}

    @log.on("payments.>", id="payments", max_attempts=3, backoff=BACKOFF_S, jitter=0.0)
    def pay(message: headwater.ReceivedMessage) -> None:
        if message.data["currency"] == "XAU":
            tries.append(time.monotonic())
            narrator.show(f"payment {message.data['payment']}  attempt {message.attempt}")
        if message.data["currency"] not in currencies:
            raise ValueError(f"no account in {message.data['currency']}")
        paid.append(message.data["payment"])

    log.publish("payments.card", {"payment": 1, "currency": "XAU"})
    log.publish("payments.card", {"payment": 2, "currency": "EUR"})
    log.start()
    wait_until(narrator, lambda: len(log.dead_letters.list()) == 1, "the payment did not become a dead letter")
    letter = log.dead_letters.list()[0]
    narrator.show(f"dead letter {letter.id}: {letter.reason} after {letter.attempts} attempts: {letter.error}", "red")
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    narrator.check(
        (letter.reason, letter.attempts, letter.error) == ("max_attempts", 3, "ValueError: no account in XAU"),
        "the dead letter says why, how often and with what error, and keeps the whole message",
    )
    narrator.check(
        len(pauses) == 2 and pauses[0] >= BACKOFF_S and pauses[1] >= 2 * BACKOFF_S,
        f"the pauses grew: {pauses[0] * 1000:.0f} ms, then {pauses[1] * 1000:.0f} ms",
    )
    narrator.check(paid == [2], "payment 2, published after it, was paid meanwhile")

    narrator.tell("Now we mend the handler and redrive the dead letter.")
    currencies.add("XAU")
    redriven = log.dead_letters.redrive(subscription="payments")
    wait_until(narrator, lambda: not log.dead_letters.list(), "the redriven payment was not acked")
    log.stop()
    narrator.check(redriven.redriven == 1 and paid == [2, 1], "payment 1 was delivered again and paid")
    narrator.check(log.dead_letters.statistics().total == 0, "its dead letter is gone, now that it is acked")


def wait_until(narrator: Narrator, holds: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until:
            narrator.check(False, otherwise)
        time.sleep(LOOK_AGAIN_S)


# --- 5: plain SQL --------------------------------------------------------------------------------------------------


def insert_with_sql(narrator: Narrator, log: headwater.Log, path: Path) -> None:
    sql = """INSERT INTO messages (topic, data) VALUES ('returns.new', '{"order": 99}')"""
    narrator.chapter(
        "Plain SQL",
        "The log is a table. A SQLite shell in another process inserts a row, and knows nothing of Headwater. "
        "A subscriber waits here.",
    )
    narrator.show(f'$ python -m apsw demo.db "{sql}"')
    with log.subscribe("audit", "returns.new") as audit:
        with subprocess.Popen([sys.executable, "-m", "apsw", str(path), sql], stderr=subprocess.DEVNULL) as shell:
            messages = audit.fetch(1, timeout=PATIENCE_S)
            arrived_ms = time.time() * 1000
        narrator.check(shell.returncode == 0 and len(messages) == 1, "the row was delivered like any other message")
        message = messages[0]
        narrator.check(
            message.data == {"order": 99} and message.id[14] == "7", f"it got seq {message.seq} and an id: {message.id}"
        )
        latency_ms = arrived_ms - message.message.published_ms
        narrator.check(latency_ms < LATENCY_MS_MAX, f"it was here {latency_ms:.0f} ms after its INSERT, fsync included")
        message.ack()


# --- 6: looking -----------------------------------------------------------------------------------------------------


def look_around(narrator: Narrator, log: headwater.Log, path: Path) -> None:
    narrator.chapter("Look around", "What the log holds now:")
    found = log.statistics()
    narrator.show_rows([("topic", "messages"), *((each.topic, str(each.count)) for each in found.topics)])
    narrator.show("")
    narrator.show_rows(
        [
            ("subscription", "acked", "redelivered", "died", "lag"),
            *(
                (each.id, str(each.acked), str(each.redelivered), str(each.dead), str(each.lag))
                for each in found.subscriptions
            ),
        ]
    )
    narrator.check(found.messages == ORDERS + 3, f"all {ORDERS + 3} messages are there; reading does not remove them")
    narrator.check(
        sum(each.acked for each in found.subscriptions) == ORDERS + 3 and not any(s.lag for s in found.subscriptions),
        "each was acked once, and no subscription is behind",
    )
    command = this_command()
    narrator.tell("Look for yourself; the file stays:")
    for verb in ("tail", "stats", "subscriptions", "doctor", "top"):
        narrator.show(f"{command} {verb} {path}", "cyan")


# --- telling --------------------------------------------------------------------------------------------------------


class DemoFailed(Exception):
    """Something the demo says turned out not to be true."""


class Narrator:
    def __init__(self) -> None:
        self._screen = Console(file=sys.stdout, highlight=False)
        self._columns = min(self._screen.width, COLUMNS_MAX)
        self._chapter = 0
        self.checked = 0

    def chapter(self, title: str, text: str) -> None:
        self._chapter += 1
        self._print("", "", "")
        self._print(f"{self._chapter}  ", title, "bold cyan")
        self.tell(text)

    def tell(self, text: str) -> None:
        """What is going to happen, or what it means."""
        self._print("   ", text, "")

    def show(self, line: str, style: str = "dim") -> None:
        """What is happening, as it happens."""
        self._print("     ", line, style)

    def show_rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns; the first row is their names."""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.show(line.rstrip(), "bold dim" if row is rows[0] else "")

    def check(self, holds: bool, claim: str) -> None:
        """A claim: printed if it holds, the end of the demo if it does not."""
        if not holds:
            self._print("   ✗ ", claim, "bold red")
            raise DemoFailed(claim)
        self.checked += 1
        self._print("   ✓ ", claim, "green")

    def _print(self, lead: str, text: str, style: str) -> None:
        """The lead, then the text, its further lines set in as far as the first."""
        lines = textwrap.wrap(text, self._columns - len(lead), break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            indented = (lead if number == 0 else " " * len(lead)) + line
            self._screen.print(Text(indented.rstrip(), style), soft_wrap=True)
