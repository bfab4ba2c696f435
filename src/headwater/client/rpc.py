"""Application calls in both directions: to methods of the server, and from it to functions offered here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from headwater.broker.flow import Flow
from headwater.broker.logger import logger
from headwater.client.connection import Connection
from headwater.client.outbox import Request
from headwater.errors import HeadwaterError, InvalidOptionError
from headwater.protocol.jsonrpc import METHOD_NOT_FOUND, Call, Fault, bind_params, fault_of
from headwater.protocol.session import Exchange

THREADS_MAX = 4
_decode = msgspec.json.Decoder().decode


class RpcMethods:
    """`log.remote`, as declared by `broker.verbs.RemoteVerbs`. `blocking`: user code has no event loop and runs on
    threads, because it may wait for the loop of the connection."""

    def __init__(self, connection: Connection, *, blocking: bool) -> None:
        self.builtin: dict[str, Callable[[msgspec.Raw], None]] = {}
        self._connection = connection
        self._blocking = blocking
        self._notifier: ThreadPoolExecutor | None = None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        return self._connection.state

    def on_state(self, callback: Callable[[str], None]) -> None:
        if not self._blocking:
            self._connection.on_state(callback)
            return
        if self._notifier is None:  # one thread, so that states arrive in order
            self._notifier = ThreadPoolExecutor(1, thread_name_prefix="headwater-state")
        self._connection.on_state(partial(_notify_state, self._notifier, callback))

    def call(self, method: str, params: Any, timeout_s: float | None) -> Flow[Any]:
        """Call a method. It is not sent again after a broken connection, because it may not be safe to repeat."""
        outcome = yield self._connection.enqueue(Request(method, params, _decode, again=False, alone=True), timeout_s)
        return outcome

    def notify(self, method: str, params: Any) -> None:
        self._connection.refuse_closed()
        self._connection.loop.call_soon_threadsafe(self._connection.notify, method, params)

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        if name.startswith("rpc."):
            raise InvalidOptionError(
                "names that begin with rpc. are Headwater's own", where=name, next="Use another name"
            )
        if self._blocking and inspect.iscoroutinefunction(function):
            why = f"{function.__qualname__} is a coroutine function"
            raise InvalidOptionError(why, where=name, next="Use headwater.open_async()")
        self._functions[name] = function

    def take_call(self, exchange: Exchange, call: Call) -> None:
        builtin = self.builtin.get(call.method)
        if builtin is not None:
            if call.params is not msgspec.UNSET:
                builtin(call.params)
            exchange.answer(call, None)
            return
        function = self._functions.get(call.method)
        if function is None:
            raise Fault(METHOD_NOT_FOUND, "Method not found", {"where": call.method})
        task = self._connection.loop.create_task(self._run(exchange, call, function))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, call: Call, function: Callable[..., Any]) -> None:
        try:
            bound = bind_params(call, inspect.signature(function))
            run = partial(function, *bound.args, **bound.kwargs)
            if inspect.iscoroutinefunction(function):
                result = await run()
            else:  # it may block, and even call the server: not on the loop that reads the answer
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="headwater-method")
                result = await self._connection.loop.run_in_executor(self._threads, run)
            exchange.answer(call, result)
        except Fault as fault:
            exchange.refuse(call, fault)
        except Exception as exc:
            if not isinstance(exc, HeadwaterError):
                logger.exception("method %s failed", call.method)
            exchange.refuse(call, fault_of(exc))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._notifier is not None:
            self._notifier.shutdown(wait=False)


def _notify_state(notifier: ThreadPoolExecutor, callback: Callable[[str], None], state: str) -> None:
    def notify() -> None:
        try:
            callback(state)
        except Exception:
            logger.exception("an on_state callback failed")

    notifier.submit(notify)
