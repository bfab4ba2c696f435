"""What differs between the asyncio and the synchronous API; `tools/generate_sync.py` replaces one name by the other.

| `_async` | `_sync` |
|---|---|
| `run_async` | `run_blocking` |
| `in_pool` | `in_place` |
| `async_transaction` | `sync_transaction` |
| `spawn_task` | `spawn_thread` |
| `running_loop` | `no_loop` |
| `AsyncOnly`, `AsyncOnlyLoop` | `SyncOnly`, `SyncOnlyLoop` |
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar

from headwater.api.received import Received
from headwater.arguments import no_attribute
from headwater.broker.deliveries import Claimed
from headwater.broker.flow import Completion, Flow, complete, run_async, run_blocking
from headwater.broker.handlers import Worker
from headwater.broker.transaction import OwnTransaction
from headwater.errors import InvalidOptionError, InvalidStateError
from headwater.ports.records import Mode

T = TypeVar("T")
P = ParamSpec("P")


class Closable(Protocol):
    async def close(self) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


class Opening(Coroutine[Any, Any, Opened]):
    """A coroutine that is an asynchronous context manager too, which closes what the coroutine opened."""

    __slots__ = ("_coroutine", "_opened")

    def __init__(self, coroutine: Coroutine[Any, Any, Opened]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *exc: Any) -> Any:
        return self._coroutine.throw(*exc)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Opened]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._not_awaited(f"it has no {name!r} yet"))

    def __enter__(self) -> Any:
        self._coroutine.close()
        raise TypeError(self._not_awaited("it is opened by `async with`, not by `with`"))

    def __exit__(self, *exc: object) -> None:
        """`with` asks for both before it calls the first."""

    if not TYPE_CHECKING:  # a type checker refuses the loop by itself

        def __iter__(self) -> NoReturn:
            self._coroutine.close()
            raise TypeError(self._not_awaited("there is nothing to iterate over yet, and it takes `async for`"))

        def __aiter__(self) -> NoReturn:
            self._coroutine.close()
            raise TypeError(self._not_awaited("there is nothing to iterate over yet"))

    def _not_awaited(self, why: str) -> str:
        name = getattr(self._coroutine, "__name__", "").lstrip("_")
        call = "headwater.open_async(…)" if name == "connect" else f"log.{name}(…)"
        return f"this is not awaited: {why}. Write `async with {call} as …`, or `… = await {call}`"

    async def __aenter__(self) -> Opened:
        self._opened = await self._coroutine
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.close()


def opening(function: Callable[P, Coroutine[Any, Any, Opened]]) -> Callable[P, Opening[Opened]]:
    """`async with log.subscribe(…) as subscription` works, and `subscription = await log.subscribe(…)` too."""

    @wraps(function)
    def open(*args: P.args, **kwargs: P.kwargs) -> Opening[Opened]:
        return Opening(function(*args, **kwargs))

    return open


if TYPE_CHECKING:  # a type checker refuses the wrong statement, and a name that is not there, by itself

    class Hinting:
        _kind: str

    class AsyncOnly: ...

    class AsyncOnlyLoop: ...

    class SyncOnly: ...

    class SyncOnlyLoop: ...

else:

    class Hinting:
        """Names that other systems have, and copies for other processes, are refused with what to write instead."""

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, self._kind, name)

        def __reduce__(self) -> NoReturn:
            raise TypeError(
                f"{self!r} belongs to this process and cannot be pickled or copied: "
                "open the log in the other process, with headwater.open(…)"
            )

    class AsyncOnly:
        """What the asyncio API says to the statements of the synchronous one."""

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{self!r} belongs to asyncio: use `async with`, or headwater.open() without asyncio")

        def __exit__(self, *exc: object) -> None:
            """`with` asks for both before it calls the first."""

    class AsyncOnlyLoop(AsyncOnly):
        def __iter__(self) -> NoReturn:
            raise TypeError(f"{self!r} belongs to asyncio: use `async for`, or headwater.open() without asyncio")

    class SyncOnly:
        """What the synchronous API says to the statements of asyncio."""

        async def __aenter__(self) -> NoReturn:
            raise TypeError(
                f"{self!r} is not for asyncio: use headwater.open_async(), or `with` instead of `async with`"
            )

        async def __aexit__(self, *exc: object) -> None:
            """`async with` asks for both before it calls the first."""

    class SyncOnlyLoop(SyncOnly):
        def __aiter__(self) -> NoReturn:
            raise TypeError(f"{self!r} is not for asyncio: use headwater.open_async(), or `for` instead of `async for`")


# --- options ----------------------------------------------------------------------------------------------------------


def given(kind: type[T], function: Callable[..., Any], arguments: Mapping[str, Any]) -> T:
    """Those options of `kind`, a TypedDict, that differ from the defaults in the signature of `function`: a server
    applies its own defaults to the others."""
    named: Any = kind
    options: Any = {
        name: value for name, default in _defaults(named, function) if (value := arguments[name]) is not default
    }
    return options  # type: ignore[no-any-return]


@cache
def _defaults(kind: type, function: Callable[..., Any]) -> list[tuple[str, Any]]:
    defaults: dict[str, Any] = inspect.unwrap(function).__kwdefaults__ or {}
    return [(name, defaults[name]) for name in kind.__annotations__ if name in defaults]


def check_takes(function: Callable[..., Any], noun: str, *, where: str, is_async: bool) -> None:
    """Refuse a function that cannot be called with one argument, its message or occurrence, or whose body a call would
    not run."""
    if not callable(function):
        raise InvalidOptionError(
            f"a function that takes the {noun} is declared here, not {function!r}",
            where=where,
            next=f"Write def handle({noun})",
        )
    name = getattr(function, "__qualname__", None) or repr(function)
    if not is_async and inspect.iscoroutinefunction(function):
        raise InvalidOptionError(f"{name} is a coroutine function", where=where, next="Use headwater.open_async()")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOptionError(
            f"{name} is a generator function, and a call of it runs none of its code",
            where=where,
            next="Write it without yield",
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # it is the wrapper that is called
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None)
    except TypeError:
        try:
            signature.bind()
        except TypeError:
            why = f"{name}{signature} needs more than the {noun}"
        else:
            why = f"{name} takes no {noun}"
        short = getattr(function, "__name__", "")
        short = short if short.isidentifier() else "handle"  # not <lambda>
        raise InvalidOptionError(why, where=where, next=f"Write def {short}({noun})") from None


def check_connection_kind(tx: Any, *, is_async: bool) -> None:
    """A synchronous connection would block the event loop, and no code would await the results of an asynchronous
    one."""
    if inspect.iscoroutinefunction(getattr(tx, "execute", None)) != is_async:
        kind = "an asynchronous" if is_async else "a blocking"
        raise InvalidOptionError(
            f"tx must be {kind} connection here", next="psycopg has both: Connection, AsyncConnection"
        )


# --- messages ---------------------------------------------------------------------------------------------------------


def claimed_of(messages: Iterable[Received]) -> list[Claimed]:
    try:
        return [message._claimed for message in messages]
    except (AttributeError, TypeError):
        raise InvalidOptionError(
            f"expected a list of received messages, not {messages!r:.80}",
            next="Pass what fetch returned: subscription.ack_many(batch); a single message has message.ack()",
        ) from None


def mark_settled(messages: Iterable[Received]) -> None:
    for message in messages:
        message.settled = True


def refuse_after_ack(message: Received, mode: Mode, verb: str) -> None:
    """A settled message may be settled again in the same way, with no effect. An ephemeral subscription settles
    nothing."""
    if not message.declined and mode != "ephemeral":
        raise InvalidStateError(
            f"message {message.seq} was acked already; {verb} has no effect",
            where=message.topic,
            next=f"Call either ack or {verb}, once the outcome is known",
        )


def refuse_after_nack(message: Received, mode: Mode) -> None:
    """The message is delivered again or is a dead letter: an ack that did nothing would hide that. An ephemeral
    subscription settles nothing."""
    if message.declined and mode != "ephemeral":
        raise InvalidStateError(
            f"message {message.seq} was nacked or rejected already; ack has no effect",
            where=message.topic,
            next="Call either ack or nack, once the outcome is known",
        )


# --- transactions -----------------------------------------------------------------------------------------------------


@contextmanager
def sync_transaction(inner: OwnTransaction) -> Iterator[None]:
    inner.begin()
    inside, me = inner.engine.in_transaction, threading.get_ident()
    inside.add(me)
    try:
        yield
    except BaseException as exc:
        inner.rollback(exc)
        raise
    else:
        inner.commit()
    finally:
        inside.discard(me)


@asynccontextmanager
async def async_transaction(inner: OwnTransaction) -> AsyncIterator[None]:
    pool = inner.engine.transactions
    beginning = inner.engine.turns.submit(inner.begin)
    try:
        await asyncio.wrap_future(beginning)
    except asyncio.CancelledError:
        # The thread cannot be cancelled; a transaction that it begins must end, or it would block all writers.
        beginning.add_done_callback(inner.abandon)
        raise
    inside, me = inner.engine.in_transaction, asyncio.current_task()
    inside.add(me)
    try:
        yield
    except BaseException as exc:
        await in_pool(partial(inner.rollback, exc), pool)  # behind a statement that still runs there
        raise
    else:
        await in_pool(inner.commit, pool)
    finally:
        inside.discard(me)


# --- threads and tasks ------------------------------------------------------------------------------------------------


async def in_pool(work: Callable[[], T], pool: Executor | None = None) -> T:
    """Blocking work on a thread, so that the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def in_place(work: Callable[[], T], pool: Executor | None = None) -> T:
    return work()


def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def no_loop() -> asyncio.AbstractEventLoop | None:
    return None


def waking(loop: asyncio.AbstractEventLoop | None, callback: Callable[[], object]) -> Callable[[], object]:
    """The callback for a signal handler, which wakes the loop, if there is one."""
    return callback if loop is None else partial(loop.call_soon_threadsafe, callback)


def spawn_thread(loop: object, flow: Flow[None], name: str) -> Worker:
    worker = Worker(Completion())

    def work() -> None:
        error: BaseException | None = None
        try:
            run_blocking(flow)
        except BaseException as exc:
            error = exc
        complete([(worker.ended, None, error)])

    threading.Thread(target=work, name=name, daemon=True).start()
    return worker


def spawn_task(loop: asyncio.AbstractEventLoop, flow: Flow[None], name: str) -> Worker:
    task = loop.create_task(run_async(flow), name=name)
    ended: Completion[None] = Completion()

    def end(done: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        complete([(ended, None, error)])

    task.add_done_callback(end)
    return Worker(ended, task.cancel)
