"""What an operator sees of replicas at `/metrics`."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path

import pytest
from by_hand import NAME, Hosted, StartHost, make_database, until, write
from prometheus_client.parser import text_string_to_metric_families

from headwater.replication.host import events
from headwater.replication.names import ReplicaName
from headwater.server import pages

Samples = dict[tuple[str, ...], float]


@pytest.fixture(autouse=True)
def scraped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CACHED_S", 0.0)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_database(tmp_path / "app.db", 100)


async def scrape(server: Hosted) -> Samples:
    """By name without `headwater_`, and the values of labels."""
    url = f"{server.server.url.replace('ws:', 'http:')}/metrics"

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=10) as page:
            return str(page.read().decode())

    families = list(text_string_to_metric_families(await asyncio.to_thread(ask)))
    assert all(family.documentation for family in families)
    return {
        (sample.name.removeprefix("headwater_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_sessions_are_counted_by_their_outcome(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    async with hosted(bytes_max=1 << 20) as server:
        none = await scrape(server)
        assert {key[1]: value for key, value in none.items() if key[0] == "replica_pushes_total"} == dict.fromkeys(
            events.PUSHED, 0
        )
        await server.push(database)
        await server.push(database, base=1, pushID="push-2")
        await server.push(database, base=0, pushID="push-3")
        await server.push(make_database(tmp_path / "large.db", 20_000), "ns/large.db")
        async with server.session(f"push/{NAME}") as session:
            await session.begin(database, base=1, pushID="push-4")
            session.vanish()
        async with server.session(f"push/{NAME}") as session:
            await session.begin(database, base=1, pushID="push-5", dry=True)
            await session.send({"complete": True, "dry": True})
            assert await session.closed() == 1000
        await server.pull(tmp_path / "back.db")
        assert await server.refused("pull/ns/none") == 404
        key = server.store.catalogue.create_key(ReplicaName("ns", "closed"), "pull")
        assert await server.refused("push/ns/closed", key) == 403
        await until(lambda: not server.endpoint._sessions)
        found = await scrape(server)
        pushes = {key[1]: value for key, value in found.items() if key[0] == "replica_pushes_total"}
        assert pushes == {"accepted": 1, "unchanged": 1, "dry": 1, "conflict": 1, "refused": 2, "failed": 1}
        pulls = {key[1]: value for key, value in found.items() if key[0] == "replica_pulls_total"}
        assert pulls == {"done": 1, "refused": 1, "failed": 0}
        size = database.stat().st_size
        assert size < found["replica_received_bytes_total",] < 2 * size
        assert size < found["replica_sent_bytes_total",] < 2 * size
        assert found["replica_acceptance_duration_seconds_count",] == 2
        assert found["replica_acceptance_duration_seconds_sum",] > 0


async def test_a_push_that_was_accepted_counts_as_such_also_if_its_client_did_not_wait(
    hosted: StartHost, database: Path
) -> None:
    checked = threading.Event()
    async with hosted(checkpoint=lambda step: step == "checked" and checked.set()) as server:
        async with server.session(f"push/{NAME}") as session:
            await session.begin(database)
            await session.move("--origin", str(database), "x")
            await session.send({"complete": True})
            await until(checked.is_set)
            session.vanish()
        await until(lambda: not server.endpoint._sessions)
        assert (await scrape(server))["replica_pushes_total", "accepted"] == 1


async def test_what_is_kept_and_what_runs(hosted: StartHost, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "TOTALS_S_MIN", 0.0)
    async with hosted(pushes_max=3) as server:
        await server.push(database)
        write(database, 1)
        await server.push(database, base=1, pushID="push-2")
        await server.push(database, "ns/other")
        async with server.session(f"push/{NAME}"), server.session(f"subscribe/{NAME}"):
            found = await scrape(server)
            assert (found["replica_pushes_active",], found["replica_pushes_limit",]) == (1, 3)
            assert (found["replica_pulls_active",], found["replica_subscriptions_active",]) == (0, 1)
        while (found["replicas",], found["replica_versions",]) != (2, 3):
            found = await scrape(server)
        assert found["replica_stored_bytes",] == sum(each.stored_bytes for each in server.store.catalogue.replicas())
        server.store.remove(ReplicaName("ns", "other"))  # as a command beside the server does
        while found["replicas",] != 1:
            found = await scrape(server)


async def test_figures_go_on_when_the_server_is_started_anew(hosted: StartHost, database: Path) -> None:
    server = hosted()
    async with server:
        await server.push(database)
    async with server:
        await server.push(database, "ns/other")
        assert (await scrape(server))["replica_pushes_total", "accepted"] == 2
