"""Lists in params are bounded, so that no one frame keeps the loop from the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from foreign_client import Serve, connect

from headwater.protocol import methods as rpc
from headwater.server.methods import METHODS

ID = {"subscription_id": "s"}
NAMES = ["a"] * (rpc.NAMES_MAX + 1)
SEQS = [1] * (rpc.SEQS_MAX + 1)
PAIRS = [(1, 1)] * (rpc.SEQS_MAX + 1)
TOO_LONG: list[tuple[str, Any, int]] = [
    ("rpc.subscribe.batch", {"topics": NAMES}, rpc.NAMES_MAX),
    ("rpc.unsubscribe.batch", {"topics": NAMES}, rpc.NAMES_MAX),
    ("rpc.subscribe.persistent.batch", {"subscriptions": [{**ID, "topic": "a"} for _ in NAMES]}, rpc.NAMES_MAX),
    ("rpc.subscribe_persistent_batch", [{**ID, "topic": "a"} for _ in NAMES], rpc.NAMES_MAX),
    ("rpc.subscribe.persistent", {**ID, "topic": "a", "resume": {"holder": "h" * 8, "held": PAIRS}}, rpc.SEQS_MAX),
    ("rpc.unsubscribe.persistent", {**ID, "seen": PAIRS}, rpc.SEQS_MAX),
    ("rpc.unsubscribe.persistent.batch", {"subscription_ids": NAMES}, rpc.NAMES_MAX),
    ("rpc.unsubscribe_persistent_batch", NAMES, rpc.NAMES_MAX),
    ("rpc.acknowledge.persistent", {**ID, "sequence_ids": SEQS}, rpc.SEQS_MAX),
    ("rpc.acknowledge.persistent.batch", {"acknowledgments": [{**ID, "sequence_id": 1} for _ in SEQS]}, rpc.SEQS_MAX),
    ("rpc.ack_persistent_batch", [{**ID, "sequence_id": 1} for _ in SEQS], rpc.SEQS_MAX),
    *((f"rpc.{verb}", {**ID, "sequence_ids": SEQS}, rpc.SEQS_MAX) for verb in ("nack", "reject", "extend", "release")),
    ("rpc.dead_letters.import", {"lines": NAMES}, rpc.NAMES_MAX),
    ("rpc.dead_letters", {"ids": SEQS}, rpc.SEQS_MAX),
]


@pytest.mark.parametrize(("method", "params", "most"), TOO_LONG, ids=[method for method, *_ in TOO_LONG])
async def test_a_list_that_is_too_long_is_refused_with_its_limit(
    serve: Serve, method: str, params: Any, most: int
) -> None:
    async with serve() as server, connect(server) as client:
        error = await client.refusal(method, params)
        assert error["code"] == -32602
        assert str(most) in error["message"]


def test_every_list_of_every_method_has_a_limit() -> None:
    """By construction, so that a new one is not forgotten; publish.batch counts its messages itself."""
    unlimited = {
        f"{struct.cls.__name__}.{field.name}"
        for struct in _structs()
        for field in struct.fields
        for each in _parts(field.type)
        if isinstance(each, msgspec.inspect.ListType) and each.max_length is None
    }
    assert unlimited == {"PublishBatch.messages"}


def _structs() -> list[msgspec.inspect.StructType]:
    found: dict[type, msgspec.inspect.StructType] = {}
    waiting = [msgspec.inspect.type_info(method.params) for method in METHODS.values() if method.params]
    while waiting:
        for each in _parts(waiting.pop()):
            if isinstance(each, msgspec.inspect.StructType) and each.cls not in found:
                found[each.cls] = each
                waiting += [field.type for field in each.fields]
    return list(found.values())


def _parts(type: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    if isinstance(type, msgspec.inspect.UnionType):
        return [part for each in type.types for part in _parts(each)]
    if isinstance(type, msgspec.inspect.ListType):
        return [type, *_parts(type.item_type)]
    return [type]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("rpc.dead_letters", {"after": 2**64}),
        ("rpc.dead_letters", {"ids": [2**64]}),
        ("rpc.dead_letters.get", {"id": 2**64}),
    ],
)
async def test_a_number_that_no_database_keeps_is_refused(serve: Serve, method: str, params: dict[str, Any]) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.code(method, params) == -32602
