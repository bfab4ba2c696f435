"""Where events go: logs of both colours, alone or on a bus, given or bound to a class; and how they run a flow."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.flow import Flow, run_async, run_blocking
from headwater.broker.verbs import LogVerbs
from headwater.errors import InvalidOption
from headwater.topics.topic import quoted
from headwater.transports.opening import without_password
from headwater.typed.bus import AsyncBus, Bus

if TYPE_CHECKING:
    from headwater.typed.event import Event

T = TypeVar("T")


def log_of(target: Any, where: str) -> Log | AsyncLog:
    log = target.log if isinstance(target, Bus | AsyncBus) else target
    if not isinstance(log, Log | AsyncLog):
        raise InvalidOption(
            f"{quoted(without_password(target) if isinstance(target, str) else target)} is no log",
            where=where,
            next="Pass what headwater.open() or headwater.connect() gave, or a bus",
        )
    return log


def check_publishable(target: Any, where: str) -> None:
    if not callable(getattr(target, "publish", None)) and not isinstance(target, Bus | AsyncBus):
        # Its text may hold a password.
        raise InvalidOption(
            f"a {type(target).__name__} cannot be published to",
            where=where,
            next="Pass an open log: what headwater.open() or headwater.connect() gave, a transaction in it, or a bus",
        )


def verbs_of(log: Log | AsyncLog) -> LogVerbs:
    return log._core


def run(log: Log | AsyncLog, flow: Flow[T]) -> Any:
    """Its outcome, or for asyncio something to await that gives it."""
    return run_async(flow) if isinstance(log, AsyncLog) else run_blocking(flow)


class Binding:
    """Made by `OrderPlaced.bind(log)`: ends with `undo()`, or with its `with` block. The last one made counts."""

    def __init__(self, cls: type[Event], target: Any) -> None:
        self._bound = cls.__headwater__.bound
        self._target = target
        self._bound.append(self)

    @property
    def target(self) -> Any:
        return self._target

    def undo(self) -> None:
        """Twice is harmless."""
        if self in self._bound:
            self._bound.remove(self)

    def __enter__(self) -> Any:
        return self._target

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def target_of(cls: type[Event], given: Any) -> Any:
    """What was given, or else what the class or its nearest base is bound to."""
    if given is not None:
        return given
    for base in cls.__mro__:
        declared = base.__dict__.get("__headwater__")
        for binding in () if declared is None else reversed(list(declared.bound)):
            return binding.target
    raise InvalidOption(
        "it is not bound to a log",
        where=f"class {cls.__name__}",
        next=f"Pass the log, or bind the class once: {cls.__name__}.bind(log)",
    )
