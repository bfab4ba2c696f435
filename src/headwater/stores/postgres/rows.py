"""Texts that PostgreSQL answers with, and parameters that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headwater.delivery.receipts import Receipt
from headwater.delivery.retention import Limits
from headwater.message import Message
from headwater.ports.records import DeliveryRow, Timing

MESSAGES = msgspec.json.Decoder(list[Message])
DELIVERIES = msgspec.json.Decoder(list[DeliveryRow])
KEPT = msgspec.json.Decoder(list[tuple[int, str, int, int]])
LIMITS = msgspec.json.Decoder(Limits)
RECEIPTS = msgspec.json.Decoder(list[Receipt])
RUNS = msgspec.json.Decoder(list[tuple[int, int]])
SEQS = msgspec.json.Decoder(list[int])
TEXTS = msgspec.json.Decoder(list[str])
TIMINGS = msgspec.json.Decoder(list[Timing])
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def array_of(numbers: Iterable[int | None]) -> str:
    """The literal of an array: written and read at half the cost of a list of parameters."""
    return f"{{{','.join(['NULL' if number is None else str(number) for number in numbers])}}}"


def untyped(bindings: Iterable[Any]) -> tuple[Any, ...]:
    """Integers as text, whose type the server takes from their place: psycopg would name the smallest type that holds
    each, and a statement is prepared anew for each choice of types."""
    return tuple([str(each) if type(each) is int else each for each in bindings])
