"""Messages on their way to a client: as notifications, or packed for a client that fetches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from headwater.broker.claims import Claimed, Failure
from headwater.broker.flow import run_async
from headwater.broker.subscriber import Subscriber
from headwater.broker.tail import Tail
from headwater.errors import TooLarge
from headwater.message import NO_HEADERS, Message, readable
from headwater.protocol.wire import Fetched

if TYPE_CHECKING:
    from headwater.server.connection import Connection

FETCHED_BYTES_MAX = 7 * 1024 * 1024  # with the rest of the answer it fits into a frame
LARGE_BYTES = 256 * 1024  # milliseconds to write
_skim = msgspec.json.Decoder(msgspec.Raw)


def fetched(found: Sequence[Claimed]) -> Fetched:
    """Messages as arrays of their fields, written without a step in Python for each. Skimming what was written shows
    whether a payload spoils it; only then each is looked at."""
    packed = msgspec.json.encode(found)
    try:
        _skim.decode(packed)
        return Fetched(msgspec.Raw(packed))
    except (msgspec.DecodeError, RecursionError):
        pass
    unreadable = [at for at, claimed in enumerate(found) if not _all_readable(claimed.message)]
    mended = [_mended(claimed) if at in unreadable else claimed for at, claimed in enumerate(found)]
    return Fetched(msgspec.Raw(msgspec.json.encode(mended)), unreadable)


def _all_readable(message: Message) -> bool:
    return readable(message.raw) and readable(message.raw_headers)


def _mended(claimed: Claimed) -> Claimed:
    headers = claimed.message.raw_headers if readable(claimed.message.raw_headers) else NO_HEADERS
    text = msgspec.Raw(msgspec.json.encode(bytes(claimed.message.raw).decode(errors="replace")))
    return msgspec.structs.replace(
        claimed, message=msgspec.structs.replace(claimed.message, raw=text, raw_headers=headers)
    )


@contextlib.asynccontextmanager
async def one_large_at_a_time(connection: Connection, found: Sequence[Claimed]) -> AsyncIterator[None]:
    """Many connections may have something large to write at once. All others have their turn between two of them."""
    if sum(claimed.message.size for claimed in found) < LARGE_BYTES:
        yield
        return
    async with connection.parts.writing_large:
        await asyncio.sleep(0)
        yield


# --- what fits into no frame: put into the log by hand, since nobody can publish it -----------------------------------


async def push(connection: Connection, id: str, subscriber: Subscriber | Tail, found: Sequence[Claimed]) -> None:
    """As notifications. One that is too large for any frame is dead: waiting for it would hold up all the others."""
    try:
        async with one_large_at_a_time(connection, found):
            notices = connection.shapes.durable(id, subscriber.spec.pattern, found)
            connection.session.notify_many(notices, batch=connection.takes_batches)
    except asyncio.CancelledError:
        subscriber.put_back(found)
        raise
    except TooLarge as exc:
        if len(found) == 1:
            await run_async(subscriber.reject(found[0], Failure("processing_error", exc.why)))
            return
        for each in found:
            await push(connection, id, subscriber, [each])
        return
    subscriber.set_payloads_aside(found)
    connection.flush()
    connection.parts.metrics.observe_delivered(found, connection.core.engine.clock.now_ms())


async def pack(
    connection: Connection, subscriber: Subscriber | Tail, found: Sequence[Claimed]
) -> tuple[Sequence[Claimed], Fetched]:
    """For an answer: what of it fits, and that packed. The rest comes with the next fetch, or is dead, as above."""
    async with one_large_at_a_time(connection, found):
        packed = fetched(found)
    while found and len(memoryview(packed.messages)) > FETCHED_BYTES_MAX:
        first, others = found[:1], found[1:]
        if others:
            subscriber.put_back(others)
        else:
            why = f"it takes {len(memoryview(packed.messages))} bytes, the limit of an answer is {FETCHED_BYTES_MAX}"
            await run_async(subscriber.reject(first[0], Failure("processing_error", why)))
        found = first if others else []
        packed = fetched(found)
    return found, packed
