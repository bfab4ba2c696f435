"""A process that runs a handler: python runner_child.py API URL OPTIONS-OF-ON OPTIONS-OF-RUN

On stdout, a JSON line for each thing that happens: ["ready"], ["began", seq, attempt], ["ended", seq],
["returned", what changed among the signal handlers]. A handler waits for a byte on stdin before it ends. The process
ends with 0 if `run()` returns. Its log goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

import headwater

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ID, PATTERN = "h", "a"


def say(*words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def changed(before: list[Any]) -> list[str]:
    return [each.name for each, had in zip(SIGNALS, before, strict=True) if signal.getsignal(each) != had]


def run(url: str, options: dict[str, Any], run_options: dict[str, Any]) -> None:
    with headwater.open(url) as log:

        @log.on(PATTERN, id=ID, **options)
        def handle(message: headwater.ReceivedMessage) -> None:
            say("began", message.seq, message.attempt)
            os.read(0, 1)  # not sys.stdin: a thread that waits in there must not keep the process from ending
            say("ended", message.seq)

        before = [signal.getsignal(each) for each in SIGNALS]
        say("ready")
        log.run(**run_options)
        say("returned", changed(before))


async def run_async(url: str, options: dict[str, Any], run_options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    bytes_read: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(0, lambda: bytes_read.put_nowait(os.read(0, 1)))
    async with headwater.open_async(url) as log:

        @log.on(PATTERN, id=ID, **options)
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            say("began", message.seq, message.attempt)
            await bytes_read.get()
            say("ended", message.seq)

        before = [signal.getsignal(each) for each in SIGNALS]
        say("ready")
        await log.run(**run_options)
        say("returned", changed(before))
    loop.remove_reader(0)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    threading.excepthook = lambda arguments: say("a thread died", repr(arguments.exc_value))
    api, url, options, run_options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    if api == "async":
        asyncio.run(run_async(url, options, run_options))
    else:
        run(url, options, run_options)


if __name__ == "__main__":
    main()
