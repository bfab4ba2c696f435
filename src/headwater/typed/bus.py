"""A bus: a log, and transports that get copies of what the classes of events say; in two colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.flow import Blocking, Flow, run_async, run_blocking
from headwater.configuration import Settings, TransportSettings
from headwater.ports.clock import Clock
from headwater.ports.transport import Transport
from headwater.typed.copying import POOL, Copies, logger, publish_prepared
from headwater.typed.preparing import Prepared

if TYPE_CHECKING:
    from headwater.typed.event import Event


class _BusFace:
    def __init__(
        self, transports: Mapping[str, Transport], routes: Mapping[str, Sequence[str]], clock: Clock | None
    ) -> None:
        self._copies = Copies(transports, routes, clock)

    @property
    def transports(self) -> Mapping[str, Transport]:
        return self._copies.transports

    @property
    def failures(self) -> Mapping[str, int]:
        """How many copies each transport has not got."""
        return dict(self._copies.failures)


class Bus(_BusFace):
    """`order.publish(bus)`. `routes` says by type which transports a class goes to, before what the class says."""

    def __init__(
        self,
        log: Log,
        transports: Mapping[str, Transport],
        *,
        routes: Mapping[str, Sequence[str]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(transports, routes or {}, clock)
        self.log = log

    def _publish(self, batch: Sequence[tuple[Event, Prepared]], *, together: bool = False) -> list[int]:
        return run_blocking(publish_prepared(self.log._core, self._copies, batch, together=together))

    def close(self) -> None:
        """Its transports; the log is whose it was."""
        self._copies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncBus(_BusFace):
    """The same over an AsyncLog: `await order.publish(bus)`. Transports run on threads."""

    def __init__(
        self,
        log: AsyncLog,
        transports: Mapping[str, Transport],
        *,
        routes: Mapping[str, Sequence[str]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(transports, routes or {}, clock)
        self.log = log

    async def _publish(self, batch: Sequence[tuple[Event, Prepared]], *, together: bool = False) -> list[int]:
        return await run_async(publish_prepared(self.log._core, self._copies, batch, together=together))

    async def close(self) -> None:
        await run_async(_blocking(self._copies.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _blocking(work: Callable[[], None]) -> Flow[None]:
    yield Blocking(work, POOL)


def make_bus(
    settings: Settings,
    log: Log | AsyncLog,
    open_transport: Callable[..., Transport],
    clock: Clock | None = None,
) -> Any:
    """The bus that `[transports.…]` and `[messages.…]` describe, of the log's colour. `open_transport` gets a url and
    the options `breaker` and `batch`. Blocks while transports open; should one not, those before it are closed."""
    opened: dict[str, Transport] = {}
    try:
        for name, said in settings.transports.items():
            opened[name] = open_transport(said.url, **_opening(said))
        routes = {  # an empty table leaves it to the class, an empty list does not
            type_: said.transports for type_, said in settings.messages.items() if "transports" in said.model_fields_set
        }
        if isinstance(log, AsyncLog):
            return AsyncBus(log, opened, routes=routes, clock=clock)
        return Bus(log, opened, routes=routes, clock=clock)
    except BaseException:
        for transport in opened.values():
            try:
                transport.close()
            except Exception as exc:
                logger.warning("transport %s could not be closed: %s", transport.name, exc)
        raise


def _opening(said: TransportSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if said.breaker_failures:
        options["breaker"] = {
            "failures": said.breaker_failures,
            "within": said.breaker_window,
            "open": said.breaker_reset,
        }
    if said.batch_size > 1:
        options["batch"] = {"size": said.batch_size, "wait": said.batch_wait}
    return options
