"""The methods that can be called, and what every call passes through on its way to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headwater.errors import InvalidOption
from headwater.protocol.calling import bind_params
from headwater.protocol.jsonrpc import METHOD_NOT_FOUND, Call, Fault

Function = TypeVar("Function", bound=Callable[..., Any])


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

    @property
    def method(self) -> str:
        return self._call.method

    @property
    def is_notification(self) -> bool:
        return not self._call.wants_answer

    @property
    def params(self) -> Any:
        return None if self._call.params is msgspec.UNSET else msgspec.json.decode(self._call.params)


class ShortCircuit(NamedTuple):
    """Returned by a middleware's `before`: this is the result, the method itself is not called."""

    result: Any


class Outcome(NamedTuple):
    result: Any = None
    fault: Fault | None = None


class Middleware:
    """Sees every call, those of `rpc.*` too. To refuse one, raise Fault (or any HeadwaterError) in `before`."""

    async def before(self, call: CallContext) -> ShortCircuit | None:
        return None

    async def after(self, call: CallContext, outcome: Outcome) -> None:
        """Called in the opposite order, whatever the outcome, for every middleware whose `before` was called."""


class Method(NamedTuple):
    params: type[Any] | None
    run: Callable[[Any, Any], Any]
    """Takes the connection (or, without a params type, the CallContext) and the params."""


class Registry:
    def __init__(self, builtin: Mapping[str, Method]) -> None:
        self._methods: dict[str, Method] = dict(builtin)
        self.middleware: list[Middleware] = []

    def find(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            raise Fault(METHOD_NOT_FOUND, "Method not found", {"where": name, "why": "there is no such method"})
        return method

    def knows(self, name: str) -> bool:
        return name in self._methods

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Offer a function as a method: params by name or by position become its arguments."""
        if name.startswith("rpc."):
            raise InvalidOption("names that begin with rpc. are the server's own", where=name, next="Use another name")
        if name in self._methods:
            raise InvalidOption("there is a method of this name already", where=name)
        self._methods[name] = Method(None, as_method(function))


def as_method(function: Callable[..., Any]) -> Callable[[CallContext, Call], Any]:
    """Turn JSON-RPC params into the arguments of a plain function."""
    signature = inspect.signature(function)
    wants_context = next(iter(signature.parameters), None) == "call"

    def run(context: CallContext, call: Call) -> Any:
        bound = bind_params(call, signature, *([context] if wants_context else []))
        return function(*bound.args, **bound.kwargs)

    return run
