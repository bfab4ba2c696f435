"""What all connections of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from headwater.broker.core import Core
from headwater.configuration import Settings
from headwater.server.audit import Audit
from headwater.server.live import LiveHub
from headwater.server.metrics import Metrics
from headwater.server.registry import Registry
from headwater.server.tokens import Grant

if TYPE_CHECKING:
    from headwater.server.connection import Connection

POLICY_VIOLATION = 1008
TOO_MANY_OF_A_TOKEN = "the token has as many connections as one may have"


class Parts:
    def __init__(
        self,
        core: Core,
        registry: Registry,
        settings: Settings,
        metrics: Metrics,
        authenticate: Callable[[str], Grant | None] | None,
        version: str,
        audit: Audit,
    ) -> None:
        self.core = core
        self.registry = registry
        self.limits = settings.limits
        self.subscription_timeout = settings.log.subscription_timeout
        self.metrics = metrics
        self.needs_token = authenticate is not None
        self.authenticate = authenticate or (lambda _: None)
        self.version = version
        self.audit = audit
        self.live = LiveHub(core, metrics)
        self._publishers: dict[str, Connection] = {}
        self.writing_large = asyncio.Lock()
        self._holders: dict[str, set[Connection]] = {}  # by the owner of their token

    def holders(self, owner: str) -> Collection[Connection]:
        """The connections of a token, or of all tokens of its label."""
        return self._holders.get(owner, ())

    def add_holder(self, connection: Connection) -> None:
        self._holders.setdefault(connection.owner, set()).add(connection)

    def remove_holder(self, connection: Connection) -> None:
        mine = self._holders.get(connection.owner, set())
        mine.discard(connection)
        if not mine:
            self._holders.pop(connection.owner, None)

    def take_publisher(self, given: str, connection: Connection) -> None:
        """A publisher speaks through one connection. What an earlier one still has under way would otherwise be taken
        after it was sent again here. Its name is kept with the owner of its token, so that no other one has it: no
        label has a line break, so the first one ends the owner."""
        self.forget_publisher(connection)
        name = given if connection.grant is None else f"{connection.grant.owner}\n{given}"
        before = self._publishers.get(name)
        if before is not None:
            before.publisher = None
            before.close(POLICY_VIOLATION, "this publisher has connected anew")
        self._publishers[name] = connection
        connection.publisher = name

    def forget_publisher(self, connection: Connection) -> None:
        name, connection.publisher = connection.publisher, None
        if name is not None and self._publishers.get(name) is connection:
            del self._publishers[name]
