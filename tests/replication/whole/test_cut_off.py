"""The connection breaks at some byte of a push: the newest version stays, and the next push succeeds, as the version
that the first would have been."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from fault_lane import Direction
from fault_proxy import FaultProxy
from hammered import make_books, read_books, write_books
from replica_host import ReplicaHost
from server_process import PATIENCE_S

import headwater
from headwater.errors import ReplicationFailedError, UnreachableError
from headwater.replication.names import ReplicaName

NAME = ReplicaName("shop", "books.db")


def test_at_any_byte_of_what_either_side_says(host: ReplicaHost, tmp_path: Path) -> None:
    path = make_books(tmp_path / "books.db", "wal", 1)
    with FaultProxy("127.0.0.1", host.port) as proxy:
        remote = host.remote(NAME, proxy.port)
        headwater.sync(path, remote)
        before = proxy.counts
        write_books(path, 0.5)
        headwater.sync(path, remote)
        spoken = proxy.counts.to_server_bytes - before.to_server_bytes
        heard = proxy.counts.to_client_bytes - before.to_client_bytes
        # Each side ends with a closing frame, after which nothing can go wrong any more. How many frames the pages
        # take depends on how fast they are read, so that another push may say a few hundred bytes less than this one.
        cuts = [(Direction.TO_SERVER, size) for size in (1, 200, 700, 40_001, spoken // 2, spoken - 1_500)]
        cuts += [(Direction.TO_CLIENT, size) for size in (1, 100, 250, heard // 2, heard - 50)]
        for number, (direction, size) in enumerate(cuts):
            write_books(path, 0.5)
            proxy.cut_after(size, direction)
            with pytest.raises((ReplicationFailedError, UnreachableError)):
                headwater.sync(path, remote)
            assert proxy.counts.cuts == number + 1
            outcome = headwater.sync(path, remote)
            assert outcome.version == number + 3, (direction, size)
            same = headwater.sync(path, remote)
            assert (same.version, same.is_new) == (number + 3, False), (direction, size)
    versions = host.check(NAME)
    assert len({version.dbhash for version in versions}) == len(versions)


@pytest.mark.parametrize("written_meanwhile", [False, True])
def test_after_the_commit_and_before_the_answer(host: ReplicaHost, tmp_path: Path, written_meanwhile: bool) -> None:
    path = make_books(tmp_path / "books.db", "delete", 0.2)
    with FaultProxy("127.0.0.1", host.port) as proxy, ThreadPoolExecutor(1) as pool:
        remote = host.remote(NAME, proxy.port)
        newest = 0
        for lost_in_a_row in (1, 2):
            for _ in range(lost_in_a_row):
                write_books(path, 0.1)
                host.stop_at("committed")
                push = pool.submit(headwater.sync, path, remote)
                host.wait_stopped()
                proxy.reset()
                host.go_on()
                with pytest.raises(ReplicationFailedError):
                    push.result()
                newest += 1
            if written_meanwhile:
                write_books(path, 0.1)
            outcome = headwater.sync(path, remote)
            newest += written_meanwhile
            assert (outcome.version, outcome.is_new) == (newest, written_meanwhile)
    host.check(NAME)


def test_a_pull_that_is_cut_off_leaves_what_was_there(shared_host: ReplicaHost, remote: str, tmp_path: Path) -> None:
    path, copy, fresh = make_books(tmp_path / "books.db", "wal", 1), tmp_path / "copy.db", tmp_path / "fresh.db"
    with FaultProxy("127.0.0.1", shared_host.port) as proxy:
        through = remote.replace(str(shared_host.port), str(proxy.port))
        headwater.sync(path, through)
        headwater.sync(through, copy)
        before = read_books(copy)
        write_books(path, 1.0)
        headwater.sync(path, through)
        for direction, size in [
            (Direction.TO_CLIENT, 1),
            (Direction.TO_CLIENT, 400),
            (Direction.TO_CLIENT, 300_003),
            (Direction.TO_CLIENT, 900_000),
            (Direction.TO_SERVER, 500),
        ]:
            for target in (
                (copy, fresh) if direction is Direction.TO_CLIENT else (copy,)
            ):  # without pages little is sent
                proxy.cut_after(size, direction)
                with pytest.raises((ReplicationFailedError, UnreachableError)):
                    headwater.sync(through, target)
                proxy.heal()
            assert read_books(copy) == before
            assert not fresh.exists()
        headwater.sync(through, copy)
        headwater.sync(through, fresh)
        assert read_books(copy) == read_books(fresh) == read_books(path) != before


def test_a_pull_that_breaks_after_its_last_page_does_not_stand_in_the_way_of_the_next(
    shared_host: ReplicaHost, remote: str, tmp_path: Path
) -> None:
    """The file is as after by then. It has no changes of its own, although it is not as it was noted."""
    path, copy = make_books(tmp_path / "books.db", "wal", 0.2), tmp_path / "copy.db"
    with FaultProxy("127.0.0.1", shared_host.port) as proxy:
        through = remote.replace(str(shared_host.port), str(proxy.port))
        spoken = 0
        for _ in range(2):
            headwater.sync(path, remote)
            before = proxy.counts.to_server_bytes
            headwater.sync(through, copy)
            spoken = proxy.counts.to_server_bytes - before
            write_books(path, 0.5)
        headwater.sync(path, remote)
        proxy.cut_after(spoken - 20, Direction.TO_SERVER)  # in the last but one frame: that all has come
        with pytest.raises(ReplicationFailedError):
            headwater.sync(through, copy)
        assert read_books(copy) == read_books(path)
        write_books(path, 0.5)
        headwater.sync(path, remote)
        assert headwater.sync(through, copy).version == 4
        assert read_books(copy) == read_books(path)


@pytest.mark.parametrize("is_cut_too", [False, True])
def test_a_push_that_is_made_again_while_the_first_is_still_being_accepted(
    host: ReplicaHost, tmp_path: Path, is_cut_too: bool
) -> None:
    """Its base is the newest when it begins, and no more when it ends: by a push of its own."""
    path = make_books(tmp_path / "books.db", "wal", 0.2)
    with FaultProxy("127.0.0.1", host.port) as proxy, ThreadPoolExecutor(1) as pool:
        remote = host.remote(NAME, proxy.port)
        headwater.sync(path, remote)
        write_books(path, 1.0)
        host.hold_at("checked")
        first = pool.submit(headwater.sync, path, remote)
        host.wait_held()
        proxy.reset()
        with pytest.raises(ReplicationFailedError):
            first.result()
        pages_come = proxy.counts.to_server_bytes + 5_000
        proxy.throttle(30_000, Direction.TO_SERVER)
        second = pool.submit(headwater.sync, path, remote)
        proxy.wait_until(lambda counts: counts.to_server_bytes >= pages_come)
        if is_cut_too:
            proxy.reset()
        host.release()
        with closing(headwater.open(host.url)) as log, log.subscribe("it", NAME.topic, start="first") as versions:
            reported = [message.data["version"] for _ in (1, 2) for message in versions.fetch(1, timeout=PATIENCE_S)]
        assert reported == [1, 2]
        proxy.heal()
        second.exception()  # whatever becomes of it, the next one succeeds
        third = headwater.sync(path, remote)
        assert (third.version, third.is_new) == (2, False)
    host.check(NAME)
