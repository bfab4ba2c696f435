"""A client that may publish on one topic takes the ids that another topic's publisher is going to give, or gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attacked import Attacked, call
from websockets.sync.client import ClientConnection

import headwater

ORDERS = 2_000
BATCH = 1_000
TOPIC = "orders.new"


def publish(connection: ClientConnection, topic: str, ids: list[str]) -> tuple[int, int]:
    """How many were stored, and how many the server says it knew."""
    new = known = 0
    for at in range(0, len(ids), BATCH):
        messages = [{"topic": topic, "data": id, "id": id} for id in ids[at : at + BATCH]]
        result = call(connection, "rpc.publish.batch", {"messages": messages})["result"]
        known += len(result["duplicates"])
        new += len(messages) - len(result["duplicates"])
    return new, known


def fetched(server: Attacked, token: str) -> list[Any]:
    with headwater.open(server.url, token=token) as log, log.subscribe("owner", TOPIC, start="first") as subscription:
        found: list[Any] = []
        while messages := subscription.fetch(1_000):
            found += [message.data for message in messages]
            subscription.ack_many(messages)
        return found


def test_ids_of_another_topic_are_neither_swallowed_nor_reported(tmp_path: Path) -> None:
    ids = [f"order-{number}" for number in range(ORDERS)]
    # What would be the same if topic and id were joined carelessly.
    spellings = [f"{prefix}{id}" for id in ids[:100] for prefix in (f"{TOPIC}#", f"x#{TOPIC}#", "#", f"{TOPIC}.", "\0")]
    with Attacked(tmp_path) as server:
        owners = server.token("owner", publish=["orders.>"], read=["orders.>"], consume=["*"])
        attackers = server.token(publish=["a.>"])
        with server.victim() as victim, server.connect(attackers) as attacker, server.connect(owners) as owner:
            assert publish(attacker, "a.x", [*ids, *spellings]) == (len(ids) + len(spellings), 0)
            assert publish(owner, TOPIC, ids) == (ORDERS, 0), "an id was swallowed"
            assert publish(owner, TOPIC, ids) == (0, ORDERS), "its own ids are remembered"
            assert publish(attacker, "a.y", ids) == (ORDERS, 0), "the attacker learns which ids were given"
            for number, id in enumerate(ids[:100], start=2):
                answer = call(attacker, "rpc.publish", {"topic": f"a.z{number}", "data": None, "id": id}, number)
                assert answer["result"]["duplicate"] is False
        server.assert_unharmed(victim, attack="ids of another topic")
        assert fetched(server, owners) == ids
