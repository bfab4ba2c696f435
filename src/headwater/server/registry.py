"""The registry of methods, and the middleware that every call passes through."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from headwater.errors import InvalidOptionError
from headwater.protocol.jsonrpc import METHOD_NOT_FOUND, Call, Fault, bind_params

if TYPE_CHECKING:
    from headwater.server.auth import Right  # `import headwater` needs this module, and should not load tokens

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class Peer(Protocol):
    """The other end of a connection, as applications see it."""

    @property
    def address(self) -> str: ...

    @property
    def label(self) -> str:
        """The label of its token; empty without one."""

    async def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any: ...

    def notify(self, method: str, params: Any = None) -> None: ...


class CallContext:
    """One call on its way: for middleware, and for methods that have a first parameter named `call`."""

    __slots__ = ("_call", "metadata", "peer")

    def __init__(self, call: Call, peer: Peer) -> None:
        self._call = call
        self.peer = peer
        self.metadata: dict[str, Any] = {}

    def in_thread(self) -> CallContext:
        """The same call for a synchronous method, whose peer blocks."""
        other = CallContext(self._call, PeerInThread(self.peer, asyncio.get_running_loop()))
        other.metadata = self.metadata
        return other

    @property
    def method(self) -> str:
        return self._call.method

    @property
    def is_notification(self) -> bool:
        return not self._call.wants_answer

    @property
    def params(self) -> Any:
        return None if self._call.params is msgspec.UNSET else msgspec.json.decode(self._call.params)


class PeerInThread:
    """The peer of a call to a synchronous method, for use on that method's thread; its methods block."""

    def __init__(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = peer
        self._loop = loop
        self.address = peer.address
        self.label = peer.label

    def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any:
        asked = asyncio.run_coroutine_threadsafe(self._peer.call(method, params, timeout=timeout), self._loop)
        return asked.result()

    def notify(self, method: str, params: Any = None) -> None:
        self._loop.call_soon_threadsafe(self._peer.notify, method, params)


class ShortCircuit(NamedTuple):
    """Returned by a middleware's `before`: this is the result, the method itself is not called."""

    result: Any


class Outcome(NamedTuple):
    result: Any = None
    fault: Fault | None = None


class Middleware:
    """Sees every call of a client that has authenticated and may call this method, those of `rpc.*` too. To refuse one,
    raise an error of `headwater.errors` in `before`."""

    async def before(self, call: CallContext) -> ShortCircuit | None:
        """Called before the method. Raise to refuse the call; return ShortCircuit to answer it."""
        return None

    async def after(self, call: CallContext, outcome: Outcome) -> None:
        """Called in the opposite order, whatever the outcome, for every middleware whose `before` was called."""


class Needs(NamedTuple):
    """The right that a call needs: one of `rights` to begin with, and it must cover what `of` says in the table of
    docs/reference/server.md. No rights: open to clients that have not authenticated."""

    rights: tuple[Right, ...]
    of: str
    hides: bool = False
    """A subscription that the token may not use is reported as unknown."""


class Method(NamedTuple):
    params: type[Any] | None
    run: Callable[[Any, Any], Any]
    """Takes the connection (or, without a params type, the CallContext) and the params."""
    needs: Needs
    audited: bool = False
    """Each call that was done is recorded in the audit trail."""
    is_large: bool = False
    """Its answers are large: a connection reads few of them at a time."""
    is_untimed: bool = False
    """It has a timeout of its own."""


APPLICATION = Needs(("call",), "the method's name")


class Registry:
    def __init__(self, builtin: Mapping[str, Method], threads_max: int = 16) -> None:
        self._methods: dict[str, Method] = dict(builtin)
        self._threads = MethodThreads(threads_max)
        self.middleware: list[Middleware] = []

    def get(self, name: str) -> Method | None:
        return self._methods.get(name)

    def find(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            raise Fault(METHOD_NOT_FOUND, "Method not found", {"where": name, "why": "there is no such method"})
        return method

    def knows(self, name: str) -> bool:
        return name in self._methods

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Offer a function as a method: params by name or by position become its arguments. One that is not a
        coroutine function runs in a thread, beside the event loop."""
        if name.startswith("rpc."):
            raise InvalidOptionError(
                "names that begin with rpc. are the server's own", where=name, next="Use another name"
            )
        if name in self._methods:
            raise InvalidOptionError("there is a method of this name already", where=name)
        self._methods[name] = Method(None, self._as_method(function), APPLICATION)

    def _as_method(self, function: Callable[..., Any]) -> Callable[[CallContext, Call], Any]:
        """Turn JSON-RPC params into the arguments of a plain function."""
        signature = inspect.signature(function)
        wants_context = next(iter(signature.parameters), None) == "call"
        blocks = not inspect.iscoroutinefunction(function)

        def run(context: CallContext, call: Call) -> Any:
            if blocks:
                context = context.in_thread()
            bound = bind_params(call, signature, *([context] if wants_context else []))
            if blocks:
                return self._threads.run(lambda: function(*bound.args, **bound.kwargs))
            return function(*bound.args, **bound.kwargs)

        return run


class MethodThreads:
    """Runs synchronous methods on up to `threads_max` threads; a call beyond them waits. A cancelled call (by its
    timeout, or by its client) keeps its thread until the method returns."""

    def __init__(self, threads_max: int) -> None:
        self._free = asyncio.Semaphore(threads_max)

    async def run(self, function: Callable[[], Any]) -> Any:
        await self._free.acquire()
        try:
            outcome = on_daemon_thread(function, "headwater-method")
        except BaseException:  # such as: the system has no more threads
            self._free.release()
            raise
        outcome.add_done_callback(lambda _: self._free.release())
        await asyncio.wait([outcome])  # which goes on if this is cancelled
        found = outcome.result()
        return await found if inspect.isawaitable(found) else found


def on_daemon_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a function that may never return: its thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(asyncio.Future.exception)  # or asyncio reports it when no caller is left

    def work() -> None:
        done: Callable[[], None]
        try:
            done = partial(outcome.set_result, function())
        except StopIteration as exc:  # which a future cannot carry
            done = partial(outcome.set_exception, RuntimeError(f"the method raised {exc!r}"))
        except BaseException as exc:
            done = partial(outcome.set_exception, exc)
        with contextlib.suppress(RuntimeError):  # the server has stopped, and its loop is closed
            loop.call_soon_threadsafe(done)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=True).start()
    return outcome
