"""Looking into a log that a sink wrote, as any reader of it would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.message import Message
from headwater.ports.records import Selection
from headwater.stores.sqlite import SqliteStore
from headwater.topics import parse_pattern

MessagesIn = Callable[[Path], list[Message]]


@pytest.fixture(scope="session")
def messages_in() -> MessagesIn:
    return _messages_in


def _messages_in(path: Path) -> list[Message]:
    if not os.path.exists(path):
        return []
    store = SqliteStore(path)
    found: list[Message] = []
    try:
        with store.read() as reader:
            after, last = 0, reader.last_seq()
            while after < last:
                scan = reader.scan(Selection(parse_pattern(">")), after, 10_000)
                found += scan.messages
                after = scan.scanned_to
    finally:
        store.close()
    return found
