"""`headwater serve --demo`: a server at work, with publishers and consumers that really connect to it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live

import headwater
from headwater.broker.statistics import LogStatistics, SubscriptionInfo
from headwater.cli.demo import without_warnings
from headwater.cli.output import Table, Text, console, is_terminal, say, table
from headwater.cli.serve import page_of, reachable, this_command
from headwater.server.server import Server
from headwater.settings import load_settings
from headwater.wiring import make_server

LOOK_EVERY_S = 1.0
MESSAGES_KEPT = 10_000  # of each topic: it may run all day
ORDER_EVERY_S, RUSH_EVERY, RUSH_ORDERS = 0.3, 30, 25
READING_EVERY_S = 0.1
MAIL_EVERY_S, MAIL_FAILS_EVERY = 0.4, 5
MAIL_ATTEMPTS, MAIL_BACKOFF_S = 3, 0.3


def run(flags: Mapping[str, Any]) -> None:
    """Serve until Ctrl-C or SIGTERM. `flags` are settings by path; files and variables are not read."""
    with without_warnings(), tempfile.TemporaryDirectory(prefix="headwater-demo-") as folder:
        own = {"server.port": 0, **flags, "server.log": os.path.join(folder, "demo.db")}
        settings = load_settings(config=None, profile=None, flags=own, environment={}, directory=folder)
        asyncio.run(show(make_server(settings)))


async def show(server: Server) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server, AsyncExitStack() as connections, asyncio.TaskGroup() as group:
        url = reachable(server.url)

        async def connect() -> headwater.AsyncLog:
            return await connections.enter_async_context(headwater.open_async(url))

        listener = LiveClient()
        listener.begin(await connect())
        await begin_billing(await connect())
        for _ in range(2):
            await begin_mailing(await connect())
        view = View(server, url, await connect(), listener)
        work = [publish_orders, publish_readings, publish_mails]
        tasks = [group.create_task(publish(await connect())) for publish in work]
        tasks.append(group.create_task(view.show()))
        await stop.wait()
        for task in tasks:
            task.cancel()


# --- publishers ----------------------------------------------------------------------------------------------------


async def publish_orders(log: headwater.AsyncLog) -> None:
    """A steady trickle, and now and then a rush that billing needs some seconds to work off."""
    order = 0
    for turn in itertools.count(1):
        for _ in range(RUSH_ORDERS if turn % RUSH_EVERY == 0 else 1):
            order += 1
            await log.publish("orders.new", {"order": order, "total": random.randint(5, 500)})
        if random.random() < 0.5:
            await log.publish("orders.paid", {"order": order})
        await asyncio.sleep(ORDER_EVERY_S)


async def publish_readings(log: headwater.AsyncLog) -> None:
    while True:
        for place, usual in (("attic", 24.0), ("cellar", 11.0)):
            await log.publish(f"sensors.{place}", {"degrees": round(random.gauss(usual, 1.5), 1)})
            await asyncio.sleep(READING_EVERY_S)


async def publish_mails(log: headwater.AsyncLog) -> None:
    for number in itertools.count(1):
        to = "nobody" if number % MAIL_FAILS_EVERY == 0 else f"reader{number}@example.org"
        await log.publish("mails.welcome", {"to": to})
        await asyncio.sleep(MAIL_EVERY_S)


# --- consumers -----------------------------------------------------------------------------------------------------


async def begin_billing(log: headwater.AsyncLog) -> None:
    """Exclusive: one holder, every order in its turn."""

    @log.on("orders.>", id="billing")
    async def bill(message: headwater.AsyncReceivedMessage) -> None:
        await asyncio.sleep(random.uniform(0.02, 0.16))

    await log.start()


async def begin_mailing(log: headwater.AsyncLog) -> None:
    """Shared: a free consumer takes the next mail. One without an address fails, is tried again, and dies."""

    @log.on("mails.*", id="mailer", mode="shared", max_attempts=MAIL_ATTEMPTS, backoff=MAIL_BACKOFF_S)
    async def send(message: headwater.AsyncReceivedMessage) -> None:
        await asyncio.sleep(random.uniform(0.1, 0.5))
        if "@" not in message.data["to"]:
            raise ValueError(f"{message.data['to']!r} is no address")

    await log.start()


class LiveClient:
    """Live: gets what comes while it is there, acks nothing, keeps nothing."""

    pattern = "sensors.*"

    def __init__(self) -> None:
        self.heard = 0
        self.last = ""

    def begin(self, log: headwater.AsyncLog) -> None:
        log.live.subscribe("display", self.pattern, self._hear)

    def _hear(self, message: headwater.Message) -> None:
        self.heard += 1
        self.last = f"{message.topic.partition('.')[2]} {message.data['degrees']:.1f} °C"


# --- what is seen ---------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    at_s: float
    log: LogStatistics
    heard: int


class View:
    """A table that changes in place on a terminal; elsewhere a line at a time."""

    def __init__(self, server: Server, url: str, log: headwater.AsyncLog, listener: LiveClient) -> None:
        self._server = server
        self._url = url
        self._log = log
        self._listener = listener

    async def show(self) -> None:
        self._introduce()
        await self._log.retain(">", max_count=MESSAGES_KEPT)
        before = await self._look()
        draws = is_terminal(sys.stdout)
        with Live(console=console(), auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                now, dead = await self._look(), (await self._log.dead_letters.statistics()).total
                if draws:
                    live.update(self._picture(before, now, dead), refresh=True)
                else:
                    say(self._line(before, now, dead))
                    sys.stdout.flush()
                before = now
                await asyncio.sleep(LOOK_EVERY_S)

    def _introduce(self) -> None:
        """Print what to try, above what changes, so that it can be copied in peace."""
        command, url = this_command(), self._url
        title = Text.assemble(
            (f"Headwater {headwater.__version__}", "bold"), " serves a demonstration at ", (url, "cyan")
        )
        commands = [
            f"{command} tail {url} 'orders.>' -f",
            f"""{command} publish {url} mails.welcome '{{"to": "me"}}'""",
            f"{command} dlq {url}",
            f"{command} top {url}",
            f"curl {page_of(url, '/metrics')}",
        ]
        browser = Text.assemble("or ", (page_of(url, "/"), "cyan"), " in a browser")
        lines = [title, Text("Try in another terminal (Ctrl-C here ends it all):", "dim")]
        for line in [*lines, *(Text(f"  {each}") for each in commands), browser, Text()]:
            say(line)

    async def _look(self) -> Sample:
        return Sample(time.monotonic(), await self._log.statistics(), self._listener.heard)

    def _line(self, before: Sample, now: Sample, dead: int) -> str:
        published = rate(before, now, before.log.last_seq, now.log.last_seq)
        lags = [f"{each.id} lag {each.lag}" for each in now.log.subscriptions]
        live = f"live {rate(before, now, before.heard, now.heard)}"
        parts = [f"{published} published", *lags, live, f"{dead} dead", f"{len(self._server.connections)} connections"]
        return f"{time.strftime('%H:%M:%S')}  {', '.join(parts)}"

    def _picture(self, before: Sample, now: Sample, dead: int) -> RenderableType:
        published = rate(before, now, before.log.last_seq, now.log.last_seq)
        connections = f"{len(self._server.connections)} connections"
        total = Text(f"{published} published, {now.log.messages:,} messages, {connections}", "dim")
        return Group(self._topics(before, now), "", self._readers(before, now, dead), "", total)

    def _topics(self, before: Sample, now: Sample) -> Table:
        shown = table("topic", ">published", ">messages")
        had = {topic.topic: topic.count for topic in before.log.topics}
        for topic in now.log.topics:
            speed = rate(before, now, had.get(topic.topic, 0), topic.count)
            shown.add_row(Text(topic.topic, "cyan"), speed, f"{topic.count:,}")
        return shown

    def _readers(self, before: Sample, now: Sample, dead: int) -> Table:
        shown = table("reader", "topics", "kind", ">handled", ">lag", ">dead", "")
        acked = {each.id: each.acked for each in before.log.subscriptions}
        for each in now.log.subscriptions:
            speed = rate(before, now, acked.get(each.id, 0), each.acked)
            lag = Text(f"{each.lag:,}", "yellow" if each.lag else "green")
            dead_text = Text(f"{dead:,}" if each.id == "mailer" else "-", "red" if each.dead else "")
            shown.add_row(Text(each.id, "cyan"), each.pattern, each.mode, speed, lag, dead_text, _remark(each))
        heard = rate(before, now, before.heard, now.heard)
        last = Text(self._listener.last, "dim")
        shown.add_row(Text("display", "cyan"), LiveClient.pattern, "live", heard, "-", "-", last)
        return shown


def rate(before: Sample, now: Sample, had: int, has: int) -> str:
    return f"{max(0, has - had) / max(now.at_s - before.at_s, LOOK_EVERY_S / 2):.1f}/s"


def _remark(info: SubscriptionInfo) -> Text:
    return Text(f"{info.waiting} to be tried again" if info.waiting else "", "dim")
