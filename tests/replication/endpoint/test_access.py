"""Access: names, keys and tokens; reports and lists over plain HTTP."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from by_hand import ALL_REPLICAS, NAME, REPLICA, Hosted, StartHost, make_database

from headwater.replication.host import endpoint
from headwater.replication.names import ReplicaName
from headwater.server.auth import Scopes, TokenFile


async def http(
    server: Hosted, path: str, body: bytes | None = None, key: str | None = None, method: str | None = None
) -> tuple[int, bytes]:
    headers = {"X-ClientID": "hand:1"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    url = f"{server.server.url.replace('ws:', 'http:')}/sapi/{path}"
    request = urllib.request.Request(url, data=body, headers=headers, method=method)

    def ask() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("push/ns/app.db", 101),
        ("push/ns/..", 400),
        ("push/ns/.hidden", 400),
        ("push/n%2Fs/app.db", 400),
        ("push/ns/a%00b", 400),
        ("push/ns/a b", 400),
        ("push/" + "n" * 65 + "/app.db", 400),
        ("push/ns", 404),
        ("push/ns/a/b", 404),
        ("push/ns/app.db@3", 404),
        ("elsewhere/ns/app.db", 404),
        ("", 404),
        ("pull/ns/app.db", 404),
        ("pull/ns/app.db@", 400),
        ("pull/ns/app.db@latest1", 400),
        ("pull/ns/app.db@0", 400),
        ("pull/ns/app.db@1", 404),
        ("subscribe/ns/app.db", 101),
        ("subscribe/ns/app.db@1", 404),
    ],
)
async def test_names_are_checked_before_anything_is_opened(hosted: StartHost, path: str, status: int) -> None:
    async with hosted() as server:
        assert await server.refused(path.replace(" ", "%20")) == status
        assert server.files() == []


async def test_a_replica_with_keys_asks_for_them(hosted: StartHost, database: Path, tmp_path: Path) -> None:
    async with hosted() as server:
        push_key, pull_key = (
            server.store.catalogue.create_key(REPLICA, "push"),
            server.store.catalogue.create_key(REPLICA, "pull"),
        )
        others = server.store.catalogue.create_key(ReplicaName("ns", "other"), "push")
        for session in ("push", "pull", "subscribe"):
            for stranger in (None, "hw_unknown", others):
                assert await server.refused(f"{session}/{NAME}", stranger) == 401
        assert await server.refused(f"push/{NAME}", pull_key) == 403
        assert await server.refused(f"pull/{NAME}", pull_key) == 404  # there is no version yet
        assert (await server.push(database, key=push_key))["committedVersionID"] == 1
        await server.pull(tmp_path / "a.db", key=pull_key)
        await server.pull(tmp_path / "b.db", key=push_key)
        assert await server.refused("push/ns/free.db") == 101  # one without keys is open to every client
        assert (await http(server, f"versions/{NAME}"))[0] == 401
        assert (await http(server, f"versions/{NAME}", key=pull_key))[0] == 200
        server.store.catalogue.remove_key(REPLICA, pull_key.split("_")[1])
        assert await server.refused(f"pull/{NAME}", pull_key) == 401


async def test_a_server_with_tokens_goes_by_the_topic_of_the_replica(
    hosted: StartHost, tokens: TokenFile, database: Path, tmp_path: Path
) -> None:
    ours = tokens.create("ours", Scopes(publish=("replica.ns.>",), read=("replica.ns.>",), consume=("*",)), now_ms=1)
    reader = tokens.create("reader", Scopes(read=("replica.>",), consume=("*",)), now_ms=1)
    other = tokens.create("other", Scopes(publish=("replica.other.>",), manage=(">",), admin=True), now_ms=1)
    async with hosted(tokens=tokens) as server:
        for session in ("push", "pull", "subscribe"):
            assert await server.refused(f"{session}/{NAME}") == 401
            assert await server.refused(f"{session}/{NAME}", "hw_unknown") == 401
            assert await server.refused(f"{session}/{NAME}", other) == 403
        assert await server.refused(f"push/{NAME}", reader) == 403
        assert (await server.push(database, key=ours))["committedVersionID"] == 1
        await server.pull(tmp_path / "back.db", key=reader)
        async with server.session(f"subscribe/{NAME}", key=reader) as reading:
            await reading.send({"coordinate": True})
            reported = await reading.config()
            assert reported["keyType"] == "token"
            assert "warning" in reported
        push_key = server.store.catalogue.create_key(REPLICA, "push")
        assert (await server.push(database, base=1, key=push_key, pushID="push-2"))["isNew"] is False
        assert await server.refused("push/ns/new.db", push_key) == 401  # it opens one replica only
        replica = server.store.catalogue.get(REPLICA)
        assert (await http(server, replica.id, report(), key=other))[0] == 403
        assert (await http(server, replica.id, report()))[0] == 401
        assert (await http(server, "0" * 16, report()))[0] == 401
        assert (await http(server, replica.id, report(), key=push_key))[0] == 204


# --- plain HTTP -------------------------------------------------------------------------------------------------------


def report(**more: Any) -> bytes:
    return json.dumps({"kind": "network", "error": "no route", "since": "2025-01-01T00:00:00Z", **more}).encode()


async def test_reports_are_kept(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        replica_id = (await server.push(database))["replicaID"]
        assert await http(server, replica_id, report()) == (204, b"")
        assert await http(server, NAME, report(kind="partial")) == (204, b"")
        kept = server.store.catalogue.reports(REPLICA)
        assert [json.loads(each.document)["kind"] for each in kept] == ["partial", "network"]
        assert json.loads(kept[0].document)["since"] == "2025-01-01T00:00:00Z"
        assert kept[0].client == "hand:1"
        for path, body, status in (
            (replica_id, b"{}", 400),
            (replica_id, b"not json", 400),
            (replica_id, b"\xff", 400),
            (replica_id, report(kind="weather"), 400),
            (replica_id, report(error=1), 400),
            (replica_id, report(deep=json.loads("[" * 100 + "]" * 100)), 204),
            (replica_id, report(error="x" * 70_000), 413),
            ("0" * 16, report(), 404),
            ("ns/none", report(), 404),
            ("n..s/x", report(), 400),
            ("../../etc", report(), 404),
        ):
            assert (await http(server, path, body))[0] == status, (path, body[:40])
        assert len(server.store.catalogue.reports(REPLICA)) == 3
        assert (await http(server, replica_id))[0] == 405


async def test_versions_are_listed_newest_first(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        first = await server.push(database, message="one")
        status, body = await http(server, f"versions/{NAME}")
        [version] = json.loads(body)
        assert status == 200
        assert version == server.messages()[0][2]
        assert (version["version"], version["message"], version["size"]) == (1, "one", first["size"])
        assert (await http(server, "versions/ns/none"))[0] == 404
        assert (await http(server, "versions/ns/.."))[0] == 400
        assert (await http(server, f"versions/{NAME}", b"", method="DELETE"))[0] == 405
        assert (await http(server, f"push/{NAME}"))[0] == 426
        assert (await http(server, "a/b/c/d"))[0] == 404


# --- which replicas there are -----------------------------------------------------------------------------------------


async def listed(server: Hosted, path: str = "replicas", key: str | None = None) -> list[str] | int:
    """Their names, or the status that it was refused with."""
    status, body = await http(server, path, key=key)
    return [each["replica"] for each in json.loads(body)["replicas"]] if status == 200 else status


async def test_a_list_of_replicas_has_what_a_key_opens_and_no_others(hosted: StartHost, database: Path) -> None:
    async with hosted() as server:
        assert await listed(server) == []
        await server.push(database, message="one")
        pull_key = server.store.catalogue.create_key(ReplicaName("ns", "closed"), "pull")
        push_key = server.store.catalogue.create_key(ReplicaName("other", "closed"), "push")
        assert await listed(server) == [NAME]
        assert await listed(server, "replicas/other") == []
        assert await listed(server, key=pull_key) == ["ns/closed"]
        assert await listed(server, "replicas/other", key=push_key) == ["other/closed"]
        assert await listed(server, "replicas/ns", key=push_key) == 401
        server.store.catalogue.remove_key(ReplicaName("ns", "closed"), pull_key.split("_")[1])
        assert await listed(server, key=pull_key) == 401
        _, body = await http(server, "replicas/ns")
        [found] = json.loads(body)["replicas"]
        replica = server.store.catalogue.get(REPLICA)
        assert found["newest"] == server.messages()[0][2]
        assert (found["replicaID"], found["versions"]) == (replica.id, 1)
        assert found["storedBytes"] == replica.stored_bytes
        for path, status in (
            ("replicas/..", 400),
            ("replicas/" + "n" * 65, 400),
            ("replicas/a/b/c", 404),
        ):
            assert await listed(server, path) == status, path
        assert (await http(server, "replicas/app", report()))[0] == 404  # a report of a replica in it


async def test_a_list_of_replicas_has_what_a_token_allows_to_pull(hosted: StartHost, tokens: TokenFile) -> None:
    every = tokens.create("all", Scopes(read=("replica.>",), consume=("*",)), now_ms=1)
    one = tokens.create("one", Scopes(read=("replica.ns.a",), consume=("*",)), now_ms=1)
    pusher = tokens.create("pusher", Scopes(publish=("replica.>",)), now_ms=1)
    async with hosted(tokens=tokens) as server:
        assert await listed(server, key=every) == []
        assert await listed(server, key=one) == 403
        for name in ("a", "b"):
            server.store.catalogue.create(ReplicaName("ns", name))
        key = server.store.catalogue.create_key(ReplicaName("ns", "b"), "pull")
        assert await listed(server, key=every) == ["ns/a", "ns/b"]
        assert await listed(server, "replicas/none", key=every) == []
        assert await listed(server, key=one) == ["ns/a"]
        assert await listed(server, "replicas/none", key=one) == 403
        assert await listed(server, key=key) == ["ns/b"]
        assert await listed(server, key=pusher) == 403
        assert await listed(server) == 401
        assert await listed(server, key="hw_unknown") == 401


async def test_a_list_of_replicas_that_is_too_long_is_cut_and_says_so(
    hosted: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LISTED_MAX", 3)
    monkeypatch.setattr(endpoint, "LISTING_PAGE", 2)
    async with hosted() as server:
        for name in ("a/1", "a/2", "a-b/1", "b/2", "b/3", "b/4"):
            server.store.catalogue.create(ReplicaName.parse(name))
        server.store.catalogue.create_key(ReplicaName.parse("a/2"), "pull")
        for path, names, is_cut in (
            ("replicas", ["a/1", "a-b/1", "b/2"], True),
            ("replicas/a", ["a/1"], False),
            ("replicas/b", ["b/2", "b/3", "b/4"], False),
            ("replicas/c", [], False),
        ):
            answer = json.loads((await http(server, path))[1])
            assert [each["replica"] for each in answer["replicas"]] == names
            assert answer["isCut"] == is_cut


async def test_versions_are_listed_from_one_back_so_that_none_is_out_of_reach(
    hosted: StartHost, database: Path
) -> None:
    async with hosted() as server:
        await server.push(database)
        await server.push(make_database(database.with_name("more.db"), 20), base=1, pushID="push-2")
        for upto, numbers in (("", [2, 1]), ("@9", [2, 1]), ("@1", [1]), ("@latest-1", [1]), ("@latest-7", [])):
            _, body = await http(server, f"versions/{NAME}{upto}")
            assert [each["version"] for each in json.loads(body)] == numbers, upto
        for upto in ("@", "@0", "@x", "@-1", "@9999999999"):
            assert (await http(server, f"versions/{NAME}{upto}"))[0] == 400, upto


async def test_a_client_that_may_push_and_not_pull_may_report(
    hosted: StartHost, database: Path, tokens: TokenFile
) -> None:
    pusher = tokens.create("pusher", Scopes(publish=("replica.ns.>",)), now_ms=1)
    async with hosted(tokens=tokens) as server:
        replica_id = (await server.push(database, key=pusher))["replicaID"]
        assert (await http(server, replica_id, report(), key=pusher))[0] == 204
        assert (await http(server, NAME, report(), key=pusher))[0] == 204
        assert (await http(server, f"versions/{NAME}", key=pusher))[0] == 403


async def test_a_version_that_is_asked_for_by_number_is_audited(
    hosted: StartHost, tokens: TokenFile, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tokens.create("ops", ALL_REPLICAS, now_ms=1)
    async with hosted(tokens=tokens) as server:
        await server.push(database, key=token)
        with caplog.at_level("INFO", "headwater"):
            await server.pull(tmp_path / "newest.db", key=token)
            await server.pull(tmp_path / "restored.db", f"{NAME}@1", key=token)
            assert await server.refused(f"pull/{NAME}@1") == 401
    reported = [each.__dict__ for each in caplog.records if each.getMessage().startswith("audit: replica.restore")]
    assert [(each["label"], each["replica"], each["version"]) for each in reported] == [("ops", NAME, 1)]
    assert any(each.getMessage() == "audit: authentication.refused" for each in caplog.records)
