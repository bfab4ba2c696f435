"""Mistakes that Python would report in words of its own, or not at all."""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import headwater
from headwater.errors import InvalidOptionError


def noargs() -> None: ...


def two(message: Any, other: Any) -> None: ...


def keyword(message: Any, *, other: Any) -> None: ...


def anything(*args: Any) -> None: ...


@functools.wraps(noargs)
def wrapper(message: Any) -> None:
    noargs()


class Handling:
    def __call__(self, message: Any) -> None: ...

    def method(self, message: Any) -> None: ...

    def nothing(self) -> None: ...


# --- handlers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (noargs, "a.>: noargs takes no message. Write def noargs(message)"),
        (lambda: None, "takes no message. Write def handle(message)"),
        (Handling().nothing, "a.>: Handling.nothing takes no message. Write def nothing(message)"),
        (two, "needs more than the message. Write def two(message)"),
        (keyword, "needs more than the message. Write def keyword(message)"),
        (functools.partial(two, 1, 2), "takes no message. Write def handle(message)"),
        (None, "a.>: a function that takes the message is declared here, not None. Write def handle(message)"),
    ],
)
def test_a_handler_that_cannot_take_the_message_is_refused_at_once(handler: Any, said: str) -> None:
    with headwater.open("memory:") as log:
        with pytest.raises(InvalidOptionError) as refused:
            log.on("a.>", id="s")(handler)
        assert said in str(refused.value)
        log.on("a.>", id="s")(anything)  # the id is still free


@pytest.mark.parametrize(
    "handler",
    [
        anything,
        wrapper,
        print,
        list,
        [].append,
        Mock(),
        Handling(),
        Handling().method,
        functools.partial(two, 1),
        functools.partial(keyword, other=1),
        lambda message, more=1: None,
    ],
    ids=lambda handler: type(handler).__name__,
)
def test_all_that_can_be_called_with_a_message_is_a_handler(handler: Any) -> None:
    with headwater.open("memory:") as log:
        log.on("a.>", id="s")(handler)


def test_a_schedule_that_cannot_take_the_occurrence_is_refused_at_once() -> None:
    said = r"^s: noargs takes no occurrence\. Write def noargs\(occurrence\)"
    with headwater.open("memory:") as log, pytest.raises(InvalidOptionError, match=said):
        log.every("5m", id="s", topic="t")(noargs)


# --- opening ----------------------------------------------------------------------------------------------------------


async def _open_async(url: Any) -> None:
    await headwater.open_async(url)


@pytest.mark.parametrize("opened", [headwater.open, lambda url: asyncio.run(_open_async(url))], ids=["sync", "async"])
def test_a_log_is_a_path_or_a_url(opened: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        opened(None)
    assert str(refused.value) == "a log is a path or a url, not None. Is an environment variable unset?"
    with pytest.raises(InvalidOptionError, match=r"^a log is a path or a url, not 17$"):
        opened(17)


@pytest.mark.parametrize(
    ("opened", "noun"), [(headwater.open_transport, "a transport"), (headwater.open_dedupe, "a dedupe queue")]
)
def test_so_are_transports_and_dedupe_queues(opened: Callable[[Any], object], noun: str) -> None:
    with pytest.raises(InvalidOptionError, match=rf"^{noun} is a path or a url, not None\. Is an environment variable"):
        opened(None)


# --- the other API ----------------------------------------------------------------------------------------------------


def test_asyncio_statements_on_the_synchronous_api_name_the_other() -> None:
    async def main(log: Any) -> None:
        with pytest.raises(TypeError, match=r"^<Log memory> is not for asyncio: use headwater\.open_async\(\)"):
            async with log:
                pass
        subscription = log.subscribe("s", "a")
        with pytest.raises(TypeError, match=r"use headwater\.open_async\(\), or `with` instead of `async with`"):
            async with subscription:
                pass
        with pytest.raises(TypeError, match=r"use headwater\.open_async\(\), or `for` instead of `async for`"):
            async for _ in subscription:
                pass

    with headwater.open("memory:") as log:
        asyncio.run(main(log))
        log.publish("a", 1)


async def test_plain_statements_on_the_asyncio_api_name_the_right_ones() -> None:
    async with headwater.open_async("memory:") as opened:
        log: Any = opened
        with pytest.raises(TypeError, match=r"^<AsyncLog memory> belongs to asyncio: use `async with`"), log:
            pass
        with pytest.raises(TypeError, match=r"awaited: .* takes `async for`\. Write `async with log\.subscribe"):
            list(log.subscribe("s", "a"))
        with pytest.raises(TypeError, match=r"not awaited: .*\. Write `async with log\.subscribe\(…\) as …`"):
            async for _ in log.subscribe("s", "a"):
                pass
        subscription = await log.subscribe("s", "a")
        with pytest.raises(TypeError, match="belongs to asyncio: use `async for`"):
            list(subscription)
        with pytest.raises(TypeError, match="belongs to asyncio: use `async with`"), subscription:
            pass
