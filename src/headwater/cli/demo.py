"""`headwater demo`: all of Headwater, part by part, with real processes and real commands. Every ✓ is a check of what
really happened.

    python -m headwater.cli.demo LOG [INVOICE]

is the process of its second part, which handles invoices.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import apsw

import headwater
from headwater.cli.arguments import AsJson
from headwater.cli.output import Text, console, is_terminal, say, write_document
from headwater.cli.parameters import option
from headwater.cli.serve import page_of, this_command
from headwater.errors import HeadwaterError, InvalidOptionError, SubscriptionActiveError
from headwater.formats import format_size
from headwater.version import install_hint, missing_for_spark

INVOICES, KILLED_AT = 8, 4
SUBSCRIPTION, LEASE_S, FREE_S_MAX = "printer", 1.0, 30.0
BACKOFF_S = 0.2
LATENCY_MS_MAX = 3_000  # on a machine that is busy with other things; a few ms is usual
CARTS, SERVER_KILLED_AT = 400, 150
CUSTOMERS, CUSTOMERS_LOST = 20_000, 500
PATIENCE_S = 30.0  # nothing here but Spark takes this long; if it does, the demo has failed
SPARK_S_MAX = 300.0
COLUMNS_MAX = 92

LOG, LAKE, DATABASE, RESTORED, FORWARDED = "events.db", "lake", "app.db", "restored.db", "returns.jsonl"
NEXT_STEPS = "next-steps.txt"
SIGNATURE = "Made by `headwater demo`. Its next run replaces the files that it made here.\n"
QUERY = "select topic, count(*) as messages from messages group by topic order by messages desc"


def demo(
    directory: Annotated[
        str, option("DIR", "Where to put its files; those of an earlier demo are replaced.", "--dir")
    ] = "headwater-demo",
    as_json: AsJson = False,
) -> None:
    """Show the whole system in about a minute, with real processes, checked as it goes.

    It shows a log and a crash, dead letters, SQL, a server with its console, a
    restored replica, forwarding, and a lake on Spark with its audit and report.
    Without the extra spark it leaves out the lake and says so.

    Exits with 0 if all its claims were checked and hold, and with 1 at the first
    that does not. Its files stay, for the commands that it suggests at the end.
    """
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = run(directory)
    if as_json:
        write_document(result._asdict())


class Result(NamedTuple):
    directory: str
    claims: int
    seconds: float
    parts: list[dict[str, Any]]
    left_out: list[str]


def run(directory: str) -> Result:
    """Run it all; raises DemoFailed at the first claim that does not hold."""
    folder = Path(directory)
    clear(folder)
    missing = missing_for_spark()
    narrator = Narrator(folder)
    narrator.tell(f"All of Headwater, in about a minute. The files are in {folder}.", lead="")
    narrator.tell("Every ✓ is a check of what really happened; the first one that fails ends the demo.", lead="")
    parts = [
        ("A log, and two weeks of a shop", publish_history),
        ("Two processes; one is killed", kill_and_resume),
        ("A message that always fails", dead_letter_and_redrive),
        ("A row from plain SQL", insert_with_sql),
        ("A server with its console; it is killed, too", serve_and_kill),
        ("A replica of a database, restored", restore_replica),
        ("Forwarding", forward),
        ("The lake on Apache Spark", make_lake),
    ]
    began = time.monotonic()
    with without_warnings():
        for number, (title, show) in enumerate(parts, 1):
            with narrator.part(f"{number}/{len(parts)}", title):
                if show is make_lake and missing:
                    narrator.tell(f"Left out, because {missing} is not installed. To see it:")
                    narrator.show(install_hint("spark"), "cyan")
                else:
                    show(narrator, folder)
    result = Result(
        directory=str(folder),
        claims=narrator.checked,
        seconds=round(time.monotonic() - began, 1),
        parts=narrator.parts,
        left_out=[parts[-1][0]] if missing else [],
    )
    show_next_steps(narrator, folder, result)
    return result


@contextmanager
def without_warnings() -> Iterator[None]:
    """The failures that a demo shows are meant."""
    logger = logging.getLogger("headwater")
    level_before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level_before)


# --- the folder -----------------------------------------------------------------------------------------------------


def clear(folder: Path) -> None:
    """Make the folder, or remove what an earlier demo left there. Files of others stay, and a folder of others is
    refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            if not (folder / NEXT_STEPS).is_file() or SIGNATURE not in (folder / NEXT_STEPS).read_text():
                raise InvalidOptionError(
                    "this directory has files that are not of a demo", where=str(folder), next="Name another one: --dir"
                )
            refuse_open_log(folder / LOG)
        for name in (LOG, LAKE, DATABASE, RESTORED, FORWARDED):
            for path in (folder / name, *folder.glob(f"{name}[.-]*")):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        (folder / NEXT_STEPS).write_text(SIGNATURE)
    except OSError as exc:
        raise InvalidOptionError(
            f"the demo cannot put its files here ({exc.strerror})", where=str(folder), next="Name another one: --dir"
        ) from exc


def refuse_open_log(path: Path) -> None:
    """A server may still serve the log of the last demo."""
    if not path.exists():
        return
    connection = apsw.Connection(str(path))
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
    except apsw.BusyError as exc:
        next = "End it, or name another directory: --dir"
        raise InvalidOptionError(
            "another process has the log of the last demo open", where=str(path), next=next
        ) from exc
    except apsw.Error:
        pass  # damaged, or no database: it is removed anyway
    finally:
        connection.close()


# --- 1: the log -----------------------------------------------------------------------------------------------------


def publish_history(narrator: Narrator, folder: Path) -> None:
    narrator.tell(
        f"A log is one SQLite file, {LOG}; no server runs. A shop publishes {DAYS} days of orders into it, through the "
        "ordinary API and with a clock that is moved. Its services read them at their own pace."
    )
    path = folder / LOG
    with narrator.progress(f"about {MESSAGES:,} messages", RUNS) as advance:
        observe = (lambda now_ms: None) if missing_for_spark() else recorder(folder)

        def on_run(now_ms: int) -> None:
            observe(now_ms)
            advance()

        published = publish_traffic(str(path), on_run=on_run)
    with headwater.open(path, create=False) as log:
        found = log.statistics()
    lags = {each.id: each.lag for each in found.subscriptions}
    narrator.show_rows([("topic", "messages"), *((each.topic, f"{each.count:,}") for each in found.topics)])
    narrator.check(found.last_seq == published, f"{published:,} messages were published, as seq 1 to {published:,}")
    narrator.check(
        found.messages < published, f"retention keeps {found.messages:,}: it deletes the oldest of stock.low"
    )
    narrator.check(
        lags["billing"] == 0 and lags["analytics"] > 0,
        f"'billing' has read everything; 'analytics' stopped two days ago and is {lags['analytics']:,} behind",
    )


def recorder(folder: Path) -> Callable[[int], None]:
    """Records, for the lake's charts, the metrics that a run every twelve hours would have recorded."""
    from headwater.pipeline.lake import Lake
    from headwater.pipeline.metrics import record_metrics
    from headwater.pipeline.run import bind

    lake, log = Lake.open(str(folder / LAKE), create=True), str(folder / LOG)

    def on_run(now_ms: int) -> None:
        bind(lake, log)
        record_metrics(lake, log, now_ms)

    return on_run


MESSAGES = 20_000
DAYS = 14
HOUR_MS = 3_600_000
OBSERVED_HOURS = 12
RUNS = DAYS * 24 // OBSERVED_HOURS
SLICES = 2  # of an hour: so often the shop publishes and its services consume
REFUSED_EVERY = 150  # orders: then a card is declined
SENDERS = ("web", "shop.north", "shop.south")
TOPICS = (
    ("orders.new", "order_placed", "billing"),
    ("orders.paid", "order_paid", "mailer"),
    ("orders.shipped", "order_shipped", "mailer"),
    ("stock.low", "stock_low", "warehouse"),
    ("returns.asked", "return_asked", "billing"),
)


def publish_traffic(
    path: str, *, messages: int = MESSAGES, days: int = DAYS, on_run: Callable[[int], None] = lambda now_ms: None
) -> int:
    """Fill a new log with `days` of a shop's traffic up to now, published and consumed through the ordinary API by a
    clock that is moved through these days: quiet nights and weekends, one sale, one outage of the mail server.
    `on_run` is called with the clock's time where a run would have been. Returns how many messages were published.
    """
    dice = random.Random(17)
    end_ms = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
    hours = days * 24
    start_ms = end_ms - hours * HOUR_MS
    clock = headwater.ManualClock(start_ms)
    paces = [_pace(hour, hours, start_ms + hour * HOUR_MS) for hour in range(hours)]
    noon = next(hour for hour in range(hours * 4 // 7, hours) if (start_ms // HOUR_MS + hour) % 24 == 12)
    outage = range(noon, noon + 5)
    published, billed = 0, itertools.count(1)
    for first in range(0, hours, OBSERVED_HOURS):
        with (
            headwater.open(path, clock=clock, durability="relaxed", maintenance_interval=None, heartbeats=False) as log,
            log.subscribe("billing", "orders.new") as billing,
            log.subscribe("mailer", "orders.paid", max_attempts=3) as mailer,
            log.subscribe("analytics", ">") as analytics,
        ):
            log.retain("stock.>", max_count=messages // 20)
            for hour in range(first, min(first + OBSERVED_HOURS, hours)):
                for _ in range(SLICES):
                    count = round(messages * paces[hour] / sum(paces) / SLICES + dice.random() - 0.5)
                    log.publish_many([_message(dice, published + number) for number in range(count)])
                    published += count
                    clock.advance(dice.randint(2, 60) / 1000)
                    for message in _fetched(billing):
                        clock.advance(0.001)
                        if next(billed) % REFUSED_EVERY == 0:
                            message.reject(f"card {message.data['order']} was declined")
                        else:
                            message.ack()
                    clock.advance(dice.randint(20, 400) / 1000)
                    for message in _fetched(mailer):
                        if hour in outage:
                            message.nack(delay=60, error="ConnectionRefusedError: mail.example:25")
                        else:
                            message.ack()
                    if hour < hours - 48:  # then it stops, and falls behind
                        clock.advance(dice.randint(1_000, 9_000) / 1000)
                        for message in _fetched(analytics):
                            message.ack()
                    clock.advance((HOUR_MS // SLICES - 10_000) / 1000)
            log.run_maintenance()
        on_run(clock.now_ms())
    return published


def _message(dice: random.Random, number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    topic, kind, to = dice.choices(TOPICS, weights=(8, 7, 4, 2, 1))[0]
    options = {"type": kind, "version": 1, "from_": dice.choices(SENDERS, weights=(5, 3, 1))[0], "to": to}
    return topic, {"order": number, "amount": round(dice.uniform(5, 500), 2)}, options


def _pace(hour: int, hours: int, at_ms: int) -> float:
    """How much happens in an hour, relative to the others."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    wave = 0.12 + max(0.0, math.sin((at.hour - 6) / 18 * math.pi)) if at.hour >= 6 else 0.08
    weekend = 0.55 if at.weekday() >= 5 else 1.0
    sale = 3.0 if hour in range(hours * 5 // 7, hours * 5 // 7 + 2) else 1.0
    return wave * weekend * sale * (1 + 0.4 * hour / hours)


def _fetched(subscription: headwater.Subscription) -> Iterator[headwater.ReceivedMessage]:
    while batch := subscription.fetch(500):
        yield from batch


# --- 2: a subscriber dies, another goes on --------------------------------------------------------------------------


def kill_and_resume(narrator: Narrator, folder: Path) -> None:
    path = folder / LOG
    with headwater.open(path, create=False) as log:
        seqs = [log.publish("invoices.new", {"invoice": number}) for number in range(1, INVOICES + 1)]
        narrator.tell(
            f"{INVOICES} invoices are published: when publish returns, the message is on disk. A process handles "
            f"them as '{SUBSCRIPTION}'. In the middle of invoice {KILLED_AT}, a second process asks for the same "
            "subscription."
        )
        narrator.show(f"log.publish('invoices.new', {{'invoice': 1}})  →  seq {seqs[0]:,}")
        with invoice_process(path, str(KILLED_AT)) as first:
            acked = watch_until_it_stops(narrator, first)
            with invoice_process(path) as second:
                events = events_of(second)
                refusal = next(events, {"event": "nothing"})
                show_event(narrator, second, refusal)
                narrator.check(refusal["event"] == "refused", "the second one is refused: one holder at a time")
                narrator.tell(
                    "Now the first one is killed with SIGKILL: it cannot clean up. The second one gets the "
                    f"subscription when the lease of the first, {LEASE_S:.0f} s, has run out."
                )
                first.kill()
                narrator.show(f"process {first.pid}  killed", "red")
                handled = []
                for event in events:
                    show_event(narrator, second, event)
                    if event["event"] == "handling":
                        handled.append((event["invoice"], event["attempt"]))
        narrator.check(first.returncode == -signal.SIGKILL, "the first process died of SIGKILL")
        narrator.check(
            acked == list(range(1, KILLED_AT))
            and [each for each, _ in handled] == list(range(KILLED_AT, INVOICES + 1)),
            f"invoices 1 to {KILLED_AT - 1} were acked before and did not come again; {KILLED_AT} to {INVOICES} came",
        )
        narrator.check(
            [attempt for _, attempt in handled] == [2] + [1] * (INVOICES - KILLED_AT),
            f"invoice {KILLED_AT} came as attempt 2, those after it for the first time",
        )
        narrator.check(log.subscription(SUBSCRIPTION).lag == 0, f"'{SUBSCRIPTION}' has nothing left to do")


def watch_until_it_stops(narrator: Narrator, process: subprocess.Popen[str]) -> list[int]:
    """The invoices it acked before it came to the one where it waits to be killed."""
    acked: list[int] = []
    for event in events_of(process):
        show_event(narrator, process, event)
        if event["event"] == "acked":
            acked.append(event["invoice"])
        elif event.get("invoice") == KILLED_AT:
            break
    return acked


@contextmanager
def invoice_process(path: Path, *stop_at: str) -> Iterator[subprocess.Popen[str]]:
    """Leaving the `with` block ends it, whatever happened."""
    arguments = [sys.executable, "-m", "headwater.cli.demo", str(path), *stop_at]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def events_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what the process says, as it says it. If it hangs it is killed, so that the demo ends and its checks
    fail."""
    assert process.stdout is not None
    with killed_after(process, PATIENCE_S):
        for line in process.stdout:
            yield json.loads(line)


@contextmanager
def killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_event(narrator: Narrator, process: subprocess.Popen[str], event: dict[str, Any]) -> None:
    if event["event"] == "refused":
        narrator.show(f"process {process.pid}  is refused: {event['why']}", "yellow")
    elif event["event"] == "handling":
        narrator.show(f"process {process.pid}  handles invoice {event['invoice']}, attempt {event['attempt']}")


def handle_invoices(path: str, stop_at: int | None) -> None:
    """Handle invoices one at a time and say so, a JSON line each, until nothing is left. At the first attempt of the
    invoice `stop_at` the process stops in the middle, with the message neither acked nor failed, and waits there to be
    killed."""
    with headwater.open(path) as log, subscribe_when_free(log) as invoices:
        for message in invoices.messages():
            number = message.data["invoice"]
            report("handling", invoice=number, attempt=message.attempt)
            if number == stop_at and message.attempt == 1:
                signal.pause()
            message.ack()
            report("acked", invoice=number)


def subscribe_when_free(log: headwater.Log) -> headwater.Subscription:
    """An exclusive subscription has one holder. If that one was killed, its lease has to run out first."""
    for timeout in (0.0, FREE_S_MAX):
        try:
            # One in flight: a killed process then leaves just the one message in the middle.
            return log.subscribe(SUBSCRIPTION, "invoices.new", lease=LEASE_S, max_in_flight=1, timeout=timeout)
        except SubscriptionActiveError as exc:
            report("refused", why=exc.why)
    sys.exit(1)


def report(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


# --- 3: a message that always fails ---------------------------------------------------------------------------------


def dead_letter_and_redrive(narrator: Narrator, folder: Path) -> None:
    narrator.tell(
        "A handler raises on one payment, each time. The payment is tried 3 times, with a longer pause each time, and "
        "becomes a dead letter. The payments behind it do not wait."
    )
    paid: list[int] = []
    tries: list[float] = []
    currencies = {"EUR"}
    done = threading.Event()

    with headwater.open(folder / LOG, create=False) as log:

        @log.on("payments.>", id="payments", max_attempts=3, backoff=BACKOFF_S, jitter=0.0)
        def pay(message: headwater.ReceivedMessage) -> None:
            if message.data["currency"] == "XAU":
                tries.append(time.monotonic())
                narrator.show(f"payment {message.data['payment']}  attempt {message.attempt}")
                if message.attempt == 3 or "XAU" in currencies:
                    done.set()
            if message.data["currency"] not in currencies:
                raise ValueError(f"no account in {message.data['currency']}")
            paid.append(message.data["payment"])

        def handle() -> None:
            """Run the handlers until the payment in gold has been tried for the last time; a stop lets them end and
            settle."""
            done.clear()
            log.start()
            done.wait(PATIENCE_S)
            log.stop()

        log.publish("payments.card", {"payment": 1, "currency": "XAU"})
        log.publish("payments.card", {"payment": 2, "currency": "EUR"})
        handle()
        letters = log.dead_letters.list(subscription="payments")
        narrator.check(len(letters) == 1, "after the third attempt it is a dead letter, and the only one")
        [letter] = letters
        narrator.show(f"{letter.reason} after {letter.attempts} attempts: {letter.error}", "red")
        narrator.check(
            (letter.reason, letter.attempts, letter.error) == ("max_attempts", 3, "ValueError: no account in XAU"),
            "the dead letter says why, how often and with what error, and keeps the whole message",
        )
        pauses = [later - earlier for earlier, later in pairwise(tries)]
        narrator.check(
            len(pauses) == 2 and pauses[0] >= BACKOFF_S and pauses[1] >= 2 * BACKOFF_S,
            f"the pauses grew: {pauses[0] * 1000:.0f} ms, then {pauses[1] * 1000:.0f} ms",
        )
        narrator.check(paid == [2], "payment 2, published after it, was paid meanwhile")

        narrator.tell("The handler is mended, and the dead letter is redriven.")
        currencies.add("XAU")
        redriven = log.dead_letters.redrive(subscription="payments")
        handle()
        narrator.check(redriven.redriven == 1 and paid == [2, 1], "payment 1 was delivered again and paid")
        narrator.check(not log.dead_letters.list(subscription="payments"), "it is acked, and its dead letter is gone")


# --- 4: plain SQL ---------------------------------------------------------------------------------------------------


def insert_with_sql(narrator: Narrator, folder: Path) -> None:
    sql = """INSERT INTO messages (topic, data) VALUES ('returns.new', '{"order": 99}')"""
    narrator.tell(
        "The log is a table. A SQLite shell, which knows nothing of Headwater, inserts a row; a subscriber waits."
    )
    narrator.show(f'$ python -m apsw {LOG} "{sql}"', "cyan")
    shell = [sys.executable, "-m", "apsw", str(folder / LOG), sql]
    with headwater.open(folder / LOG, create=False) as log, log.subscribe("clerk", "returns.new") as clerk:
        with subprocess.Popen(shell, stderr=subprocess.DEVNULL) as process:
            messages = clerk.fetch(1, timeout=PATIENCE_S)
            arrived_ms = time.time() * 1000
        narrator.check(process.returncode == 0 and len(messages) == 1, "the row was delivered like any other message")
        [message] = messages
        narrator.check(
            message.data == {"order": 99} and message.id[14] == "7",
            f"it has seq {message.seq:,} and an id: {message.id}",
        )
        latency_ms = arrived_ms - message.message.published_ms
        narrator.check(latency_ms < LATENCY_MS_MAX, f"it came {latency_ms:.0f} ms after its INSERT, fsync included")
        message.ack()


# --- 5 and 6: the server --------------------------------------------------------------------------------------------


@contextmanager
def serving(narrator: Narrator, folder: Path, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headwater serve` as a process, and its url. Leaving the `with` block ends it, whatever happened."""
    narrator.show(f"$ headwater serve {LOG}", "cyan")
    arguments = [*HEADWATER, "serve", LOG, "--port", port, "--json"]
    with subprocess.Popen(arguments, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            with killed_after(process, PATIENCE_S):
                for line in process.stderr:
                    lines.append(line)
                    if found := URL.search(line):
                        url = found[0]
                        break
                else:
                    narrator.fail("the server starts", "".join(lines))
            yield process, url
        finally:
            process.kill()


def end_in_order(server: subprocess.Popen[str]) -> int:
    server.terminate()
    return server.wait(PATIENCE_S)


def serve_and_kill(narrator: Narrator, folder: Path) -> None:
    narrator.tell("Programs on other machines use the log through a server: the same API, another address.")
    from urllib.request import Request, urlopen

    with serving(narrator, folder) as (first, url):
        console_url = page_of(url, "/")
        page = urlopen(Request(console_url, headers={"Accept": "text/html"}), timeout=PATIENCE_S)
        text = page.read().decode()
        narrator.check(page.status == 200 and "<title>Headwater" in text, f"the console answers at {console_url}")
        narrator.tell(
            f"A client publishes {CARTS} shopping carts. The server is killed after {SERVER_KILLED_AT}, and started "
            "again on the same port."
        )
        seqs: list[int] = []
        enough = threading.Event()

        def publish() -> None:
            for cart in range(1, CARTS + 1):
                seqs.append(client.publish("carts.filled", {"cart": cart}))
                if cart == SERVER_KILLED_AT:
                    enough.set()

        client = headwater.open(url)
        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        enough.wait(PATIENCE_S)
        first.kill()
        code = first.wait()
        before = len(seqs)
        narrator.show(f"the server is killed; the client has {before} answers", "red")
    with serving(narrator, folder, url.rpartition(":")[2]) as (second, url):
        thread.join(PATIENCE_S)
        client.close()
        narrator.check(
            code == -signal.SIGKILL and SERVER_KILLED_AT <= before < CARTS and len(seqs) == CARTS,
            "the client connected again by itself and published the rest",
        )
        narrator.tell("Another process consumes the carts through the server.")
        read = command(narrator, folder, "subscribe", url, "checkout", "carts.>", "--no-follow")
        carts = [json.loads(line)["data"]["cart"] for line in read.splitlines()]
        narrator.check(
            carts == list(range(1, CARTS + 1)), f"it received all {CARTS} in order: none was lost, none is there twice"
        )
        narrator.check(end_in_order(second) == 0, "the server ends in order on SIGTERM")


def restore_replica(narrator: Narrator, folder: Path) -> None:
    narrator.tell(f"{DATABASE} stands for the database of an application. The server keeps versions of it.")
    with apsw.Connection(str(folder / DATABASE)) as database:
        database.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
        names = [(f"customer {number}",) for number in range(1, CUSTOMERS + 1)]
        database.executemany("INSERT INTO customers (name) VALUES (?)", names)
    database.close()
    with serving(narrator, folder) as (server, url):
        remote = f"{url}/shop/{DATABASE}"
        first = json.loads(command(narrator, folder, "sync", DATABASE, remote, "-m", "before the mistake"))
        narrator.check(first["version"] == 1, f"version 1 is {format_size(first['size'])}, all of it sent")
        sql = f"DELETE FROM customers WHERE id <= {CUSTOMERS_LOST}"
        narrator.tell("A mistake deletes customers, and is pushed:")
        narrator.show(sql, "red")
        with apsw.Connection(str(folder / DATABASE)) as database:
            database.execute(sql)
        database.close()
        second = json.loads(command(narrator, folder, "sync", DATABASE, remote))
        narrator.check(
            second["version"] == 2 and second["sent"] < first["sent"] / 4,
            f"version 2 sent only pages that differ: {format_size(second['sent'])} of {format_size(second['size'])}",
        )
        restored = json.loads(command(narrator, folder, "replica", "restore", f"{remote}@1", RESTORED))
        found = customers(folder / RESTORED)
        narrator.check(
            customers(folder / DATABASE) == CUSTOMERS - CUSTOMERS_LOST and found == CUSTOMERS,
            f"{RESTORED} has all {found:,} customers again",
        )
        narrator.check(
            restored["dbhash"] == first["dbhash"] != second["dbhash"],
            f"its content has the hash of version 1: {restored['dbhash'][:16]}…",
        )
        narrator.check(end_in_order(server) == 0, "the server ends in order")
    with headwater.open(folder / LOG, create=False) as log:
        versions = topic_counts(log)[f"replica.shop.{DATABASE}"]
    narrator.check(versions == 2, "each version is a message in the log, too")


def customers(path: Path) -> int:
    database = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        count: int = database.execute("SELECT count(*) FROM customers").get
        return count
    finally:
        database.close()


# --- 7: forwarding --------------------------------------------------------------------------------------------------


def forward(narrator: Narrator, folder: Path) -> None:
    narrator.tell("A forwarder copies messages to another system: Redis, S3, PostgreSQL, another log; here, to a file.")
    first = forward_returns(narrator, folder)
    with headwater.open(folder / LOG, create=False) as log:
        kept = sum(count for topic, count in topic_counts(log).items() if topic.startswith("returns."))
        narrator.check(len(first) == len(set(first)) == kept, f"{FORWARDED} has all {kept:,} returns, each once")
        log.publish_many([("returns.new", {"order": order}) for order in (100, 101)])
    narrator.tell("Two more are published. The next run continues after the last one.")
    second = forward_returns(narrator, folder)
    narrator.check(
        second[:kept] == first and len(set(second)) == len(second) == kept + 2,
        "it appended these two, and nothing else",
    )


def forward_returns(narrator: Narrator, folder: Path) -> list[str]:
    """The ids that are in the file after a run."""
    command(narrator, folder, "forward", LOG, FORWARDED, "--topics", "returns.>", "--once")
    return [json.loads(line)["id"] for line in (folder / FORWARDED).read_text().splitlines()]


# --- 8: the lake ----------------------------------------------------------------------------------------------------


def make_lake(narrator: Narrator, folder: Path) -> None:
    narrator.tell("Spark keeps the history as Delta tables: every message once, then figures by day and hour.")
    with headwater.open(folder / LOG, create=False) as log:
        topics = topic_counts(log)
    messages = sum(topics.values())
    ran = json.loads(command(narrator, folder, "pipeline", "run", LOG, "--lake", LAKE))
    narrator.check(ran["messages"] == messages, f"all {messages:,} messages of this demo are in the lake")

    narrator.tell("The audit compares the lake with the log, message by message.")
    audit = json.loads(command(narrator, folder, "pipeline", "audit", LOG, "--lake", LAKE))
    for check in audit["checks"]:
        narrator.show(f"{check['status']:<8}{check['name']}")
    passed = sum(check["status"] == "ok" for check in audit["checks"])
    narrator.check(audit["whole"] and passed == len(audit["checks"]), f"the lake is whole: {passed} checks of {passed}")

    narrator.tell("SQL over the lake:")
    asked = json.loads(command(narrator, folder, "pipeline", "sql", QUERY, "--lake", LAKE))["items"]
    narrator.show_rows([("topic", "messages"), *((row["topic"], f"{row['messages']:,}") for row in asked[:5])])
    narrator.show(f"… {len(asked) - 5} more topics")
    narrator.check(
        {row["topic"]: row["messages"] for row in asked} == topics, "Spark counts what the log counts, by topic"
    )

    page = Path(json.loads(command(narrator, folder, "pipeline", "report", "--lake", LAKE))["page"])
    text = page.read_text()
    narrator.check(f"{messages:,}" in text and "The lake is whole" in text, f"the report is {LAKE}/{page.name}")


# --- what is left ---------------------------------------------------------------------------------------------------


def show_next_steps(narrator: Narrator, folder: Path, result: Result) -> None:
    call, log, lake = this_command(), shlex.quote(str(folder / LOG)), shlex.quote(str(folder / LAKE))
    files = [(LOG, "the log"), (f"{DATABASE}, {RESTORED}", "the database and version 1 of it"), (FORWARDED, "returns")]
    steps = [
        (f"{call} serve {log}", "the console at http://127.0.0.1:8765/"),
        (f"{call} top {log}", "topics and subscriptions, live"),
        (f"{call} tail {log} 'orders.>' -n 5", "messages"),
        (f"{call} dlq {log}", "dead letters"),
        (f"{call} doctor {log}", "the log and its machine, examined"),
    ]
    if not result.left_out:
        files += [(f"{LAKE}/report.html", "charts, for a browser"), (f"{LAKE}/audit.html", "the proof")]
        steps += [(f'{call} pipeline sql "show views" --lake {lake}', "the tables of the lake")]
    narrator.copyable("")
    total = f"{result.claims} claims checked in {result.seconds:.0f} s"
    narrator.tell(total + "".join(f", without: {each}" for each in result.left_out) + ".", lead="", style="bold")
    lines = ["", f"Look at, in {folder}:"]
    lines += [f"  {name:<20}{what}" for name, what in files]
    lines += ["", "Go on with:"]
    lines += [f"  {step}\n      {what}" for step, what in steps]
    (folder / NEXT_STEPS).write_text(SIGNATURE + "\n".join(lines) + "\n")
    for line in "\n".join(lines).split("\n"):
        narrator.copyable(line)


def topic_counts(log: headwater.Log) -> dict[str, int]:
    return {each.topic: each.count for each in log.statistics().topics}


# --- commands -------------------------------------------------------------------------------------------------------

HEADWATER = [sys.executable, "-m", "headwater"]
URL = re.compile(r"ws://[\d.]+:\d+")


def environment() -> dict[str, str]:
    """The environment without settings of Headwater, which are meant for other logs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}


def command(narrator: Narrator, folder: Path, *arguments: str) -> str:
    """Run a command of Headwater in the folder, as people would, and return what it prints with --json. Its progress
    is seen on a terminal; into a pipe its errors are kept until it fails."""
    narrator.show(f"$ headwater {shlex.join(arguments)}", "cyan")
    is_seen = sys.stderr.isatty()
    with (
        subprocess.Popen(
            [*HEADWATER, *arguments, "--json"],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if is_seen else subprocess.PIPE,
            text=True,
        ) as process,
        killed_after(process, SPARK_S_MAX),
    ):
        out, err = process.communicate()
    if process.returncode:
        narrator.fail(f"headwater {arguments[0]} ends with 0, not {process.returncode}", err or "")
    return out


# --- telling --------------------------------------------------------------------------------------------------------


class DemoFailed(HeadwaterError):
    """Something the demo says turned out not to be true."""

    exit_code = 1  # of the command: a finding


class Narrator:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns = min(shutil.get_terminal_size().columns, COLUMNS_MAX)
        self.checked = 0
        self.parts: list[dict[str, Any]] = []

    @contextmanager
    def part(self, number: str, title: str) -> Iterator[None]:
        self._print("", "", "")
        self._print(f"{number}  ", title, "bold cyan")
        began, checked_before = time.monotonic(), self.checked
        yield
        seconds, claims = round(time.monotonic() - began, 1), self.checked - checked_before
        self.parts.append({"part": title, "claims": claims, "seconds": seconds})
        self._print("     ", f"{seconds:.1f} s", "dim")

    def tell(self, text: str, *, lead: str = "     ", style: str = "") -> None:
        """Say what is going to happen, or what it means."""
        self._print(lead, text, style)

    def show(self, line: str, style: str = "dim") -> None:
        """Show what is happening, as it happens."""
        self._print("       ", line, style)

    def copyable(self, line: str, style: str = "") -> None:
        """A line that is not wrapped."""
        say(Text(line, style))
        sys.stdout.flush()

    def show_rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns; the first row is their names, the last column is numbers."""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            *names, figure = row
            cells = [*(cell.ljust(width) for cell, width in zip(names, widths, strict=False)), figure.rjust(widths[-1])]
            self.show("  ".join(cells), "bold dim" if row is rows[0] else "")

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on a terminal; it goes when the work is done."""
        if not is_terminal(sys.stdout):
            yield lambda: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("       {task.description}", style="dim"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console(), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda: bar.advance(task)

    def check(self, holds: bool, claim: str) -> None:
        """A claim: printed if it holds, the end of the demo if it does not."""
        if not holds:
            self.fail(claim)
        self.checked += 1
        self._print("   ✓ ", claim, "green")

    def fail(self, claim: str, why: str = "") -> NoReturn:
        self._print("   ✗ ", claim, "bold red")
        for line in why.splitlines():
            self.copyable(f"     {line}", "red")
        next = "The files stay for inspection; run headwater demo again to start over"
        raise DemoFailed(f"a claim does not hold: {claim}", where=str(self._folder), next=next)

    def _print(self, lead: str, text: str, style: str) -> None:
        """The lead, then the text, its further lines set in as far as the first."""
        lines = textwrap.wrap(text, self._columns - len(lead), break_on_hyphens=False, drop_whitespace=True) or [""]
        for number, line in enumerate(lines):
            indented = (lead if number == 0 else " " * len(lead)) + line
            self.copyable(indented.rstrip(), style)


if __name__ == "__main__":
    handle_invoices(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
