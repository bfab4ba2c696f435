"""A server of replicas in a process of its own, which can be stopped at a step of a push, and what must hold there."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import server_process
from child_processes import tools_at
from eventually import eventually
from server_process import PATIENCE_S, ServerProcess

import headwater
from headwater.ports.clock import SystemClock
from headwater.replication.host.catalogue import Version
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import ReplicaName

BEFORE_COMMIT = ["begun", "checked", "version named", "directory synced"]
AFTER_COMMIT = ["committed", "published", "announced"]
"""Steps of an acceptance. `published`: its message is in the log, and that is not recorded yet."""

# The server stops itself, all its threads, at the step that is named in a file beside its log. So a test finds it in
# that very moment, and can do to it what it likes. Or one push waits at its step, and the rest goes on.
STOPPING = """
import os, signal, sys, threading, time
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.store import ReplicaStore

def at(step, flag=sys.argv[1] + "-stop-at", hold=sys.argv[1] + "-hold-at", held=sys.argv[1] + "-held"):
    if os.path.exists(hold) and open(hold).read() == step:
        os.rename(hold, held)
        while os.path.exists(held):
            time.sleep(0.001)
    if os.path.exists(flag) and open(flag).read() == step:
        os.unlink(flag)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread, or it would run on for a while

def announced(catalogue, *arguments, was=Catalogue.announced):
    at("published")
    was(catalogue, *arguments)
    at("announced")

ReplicaStore.__init__.__kwdefaults__["checkpoint"] = at
Catalogue.announced = announced
"""


class ReplicaHost(ServerProcess):
    """Entered: started."""

    def __init__(self, log: Path, **settings: Any) -> None:
        super().__init__(log, **settings)
        self.directory = log.with_name(log.name + "-replicas")
        self._flag, self._hold, self._held = (
            log.with_name(f"{log.name}-{end}") for end in ("stop-at", "hold-at", "held")
        )

    def start(self) -> None:
        with patch.object(server_process, "PROGRAM", STOPPING + server_process.PROGRAM):
            super().start()

    def remote(self, name: ReplicaName, port: int | None = None) -> str:
        return f"ws://127.0.0.1:{port or self.port}/{name.path}"

    def name_for(self, text: str) -> ReplicaName:
        return ReplicaName("test", f"r{hashlib.sha256(text.encode()).hexdigest()[:12]}.db")

    # --- its process ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop_at(self, step: str) -> None:
        """The server dies when the next push comes to this step."""
        _write_whole(self._flag, step)

    def hold_at(self, step: str) -> None:
        """The next push that comes to this step waits there until it is released."""
        _write_whole(self._hold, step)

    def wait_held(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not self._held.exists():
            assert time.monotonic() < until_s, "no push came to that step"
            time.sleep(0.001)

    def release(self) -> None:
        self._held.unlink()

    def wait_stopped(self, client: subprocess.Popen[bytes] | None = None) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is None:
            assert client is None or client.poll() is None, "the client ended before that step"
            assert time.monotonic() < until_s, "no push came to that step"
            time.sleep(0.001)  # the system tells of it in no other way that has an end

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    # --- what it keeps ----------------------------------------------------------------------------------------------

    def store(self) -> ReplicaStore:
        """As a command sees it, beside the server."""
        return ReplicaStore(self.directory, VersionRetention(), SystemClock()).open()

    def newest(self, name: ReplicaName) -> int:
        with self.store() as store:
            found = store.catalogue.find(name)
            return 0 if found is None else found.newest

    def check(self, *names: ReplicaName, verify_all: bool = True) -> list[Version]:
        """Versions follow each other without a gap, each is proved, no file lies there that belongs to none of them,
        and the log has one message for each. Returns the versions of the first name, oldest first."""
        homes: dict[str, list[str]] = {}
        found: list[list[Version]] = []
        with self.store() as store:
            for name in names:
                versions = [*reversed(store.catalogue.versions(name))]
                numbers = [version.number for version in versions]
                assert numbers == [*range(1, len(numbers) + 1)]
                assert [version.base for version in versions] == [number - 1 for number in numbers]
                for number in numbers if verify_all else numbers[-1:]:
                    verdict = store.verify(name, number)
                    assert verdict.ok, verdict
                files = [f"{number}.pages" for number in numbers[:-1]] + [f"{numbers[-1]}.db"]
                homes[store.catalogue.get(name).id] = sorted(files)
                found.append(versions)
            assert {replica.name for replica in store.catalogue.replicas()} == set(names)
        self.wait_for_files(homes)
        for name, versions in zip(names, found, strict=True):
            self.check_messages(name, versions)
        return found[0]

    def files(self) -> dict[str, list[str]]:
        """Directory of a replica -> what lies in it; all else is the catalogue's."""
        homes = [each for each in self.directory.iterdir() if each.is_dir()]
        others = {each.name for each in self.directory.iterdir()} - {home.name for home in homes}
        assert {name for name in others if not name.startswith("catalogue.db")} == {"serving.lock"}
        return {home.name: sorted(file.name for file in home.iterdir()) for home in homes}

    def wait_for_files(self, homes: dict[str, list[str]]) -> None:
        """Until only these are left, and no process is at work there, for this or a killed server: a kill
        or an error is reported before all is swept up."""
        eventually(lambda: (self.files(), tools_at(self.directory)), (homes, []))

    def check_messages(self, name: ReplicaName, versions: list[Version]) -> None:
        """What a crash left unpublished is published soon after the start, so this waits."""
        reported: list[tuple[int, int, str | None]] = []
        ids: set[str] = set()
        reader = uuid.uuid4().hex
        with closing(headwater.open(self.url)) as log, log.subscribe(reader, name.topic, start="first") as subscription:
            while len(reported) < len(versions):
                messages = subscription.fetch(100, timeout=PATIENCE_S)
                assert messages, f"only {reported} of {len(versions)} are published"
                for message in messages:
                    reported.append((message.data["version"], message.data["base"], message.data["dbhash"]))
                    ids.add(message.id)
                    message.ack()
            assert subscription.fetch(1, timeout=0) == []
        assert sorted(reported) == [(version.number, version.base, version.dbhash) for version in versions]
        assert all(re.fullmatch(r"replica-[0-9a-f]{16}-\d+", id) for id in ids)
        assert len(ids) == len(versions)


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)
