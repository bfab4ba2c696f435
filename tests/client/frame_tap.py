"""Listens in on what servers in this process hear: frame by frame, call by call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headwater.server.connection import Connection


class FrameTap:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[list[dict[str, Any]]] = []
        """The calls of each frame, in either direction."""
        self._then: dict[str | None, Callable[[], None]] = {}
        receive_text = Connection.receive_text

        def listen(connection: Connection, text: bytes) -> None:
            document = json.loads(text)
            self.frames.append(document if isinstance(document, list) else [document])
            receive_text(connection, text)
            for call in self.frames[-1]:
                then = self._then.pop(call.get("method"), None)
                if then is not None:
                    then()

        monkeypatch.setattr(Connection, "receive_text", listen)

    def then(self, method: str, do: Callable[[], None]) -> None:
        """Once, when such a call has come and its work has begun, before it can be answered."""
        self._then[method] = do

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [call for frame in self.frames for call in frame]

    def of(self, *methods: str) -> list[dict[str, Any]]:
        """The params of all calls of these methods, in their order."""
        return [call.get("params", {}) for call in self.calls if call.get("method") in methods]

    def frames_with(self, *methods: str) -> int:
        return sum(any(call.get("method") in methods for call in frame) for frame in self.frames)
