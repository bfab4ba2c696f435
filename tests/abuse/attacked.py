"""A server with tokens in a process of its own, a victim in another, and the test in the role of the attacker.

    with Attacked(tmp_path, limits={"connections": 500}) as server:
        token = server.token(publish=["mine.>"])
        with server.victim() as victim:
            ...attack server.port with that token...
        server.assert_unharmed(victim)

The victim publishes one small message after the other, VICTIM_MESSAGES at least, receives each through a durable
subscription and acks it. Its latency is the time of a publish and of the delivery; the server's memory is the peak of
its resident set since the victim began. Both are printed, for the table in docs/explanation/security.md. An attack goes
on for as long as the victim's block, which may end before the victim's last message.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from server_process import ServerProcess
from websockets.sync.client import ClientConnection, connect

from headwater.server.auth import Scopes, TokenFile

PATIENCE_S = 60.0
VICTIM_P99_MS = 250.0
SERVER_RSS_MB = 400.0
# Beside another worker's tests the victim waits for a processor too; an attacker that stops the server would keep
# it waiting for far longer.
IS_BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
BESIDE_OTHERS = 4.0 if IS_BESIDE_OTHERS else 1.0
VICTIM_MESSAGES = 60 if IS_BESIDE_OTHERS else 200  # an attack lasts until the victim has sent them

VICTIM = """
import json, sys, threading, time, headwater
url, token, pause_s, count = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
published, delivered = [], []
with headwater.open(url, token=token) as log:
    mine = log.subscribe("victim", "victim.news")
    log.publish("victim.news", 0)
    mine.fetch(1, timeout=30)[0].ack()
    print("ready", flush=True)
    while not stop.wait(pause_s) or len(published) < count:
        began = time.perf_counter()
        log.publish("victim.news", {"text": "x" * 100})
        stored = time.perf_counter()
        [message] = mine.fetch(1, timeout=60)
        delivered.append(time.perf_counter() - began)
        published.append(stored - began)
        message.ack()
print(json.dumps({"published": published, "delivered": delivered}), flush=True)
"""


class Attacked(ServerProcess):
    """Settings are those of `headwater.serve`; `descriptors` is the soft limit of open files that the server starts
    with."""

    def __init__(self, directory: Path, *, log: str | None = None, descriptors: int | None = None, **settings: Any):
        super().__init__(directory / "log.db", log, tokens=str(directory / "tokens.json"), **settings)
        self.tokens = TokenFile(directory / "tokens.json")
        self._descriptors = descriptors

    def token(self, label: str = "attacker", **scopes: Any) -> str:
        return self.tokens.create(label, Scopes(**scopes), now_ms=time.time_ns() // 1_000_000)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def connect(self, token: str | None = None, **options: Any) -> ClientConnection:
        """A plain WebSocket, authenticated with the token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return connect(f"{self.url}/rpc", additional_headers=headers, max_size=None, **options)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def victim(self, pause_s: float = 0.01) -> Victim:
        token = self.token("victim", **VICTIM_SCOPES)
        self.forget_peak()
        return Victim(self.url, token, pause_s)

    # --- what it costs ------------------------------------------------------------------------------------------------

    def rss_mb(self) -> float:
        return self._status("VmRSS")

    def peak_mb(self) -> float:
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise AssertionError(f"no {name} in the status of process {self.pid}")

    def assert_unharmed(
        self, victim: Victim, *, p99_ms: float = VICTIM_P99_MS, rss_mb: float = SERVER_RSS_MB, attack: str = ""
    ) -> str:
        reported = f"{attack or 'attack'}: victim {victim.summary()}; server's peak {self.peak_mb():.0f} MB"
        print(f"\n{reported}")
        assert len(victim.published) >= VICTIM_MESSAGES, f"{reported}\n{self.errors()}"
        assert victim.p99_ms < p99_ms * BESIDE_OTHERS, reported
        assert self.peak_mb() < rss_mb, reported
        return reported

    # --- its life -----------------------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        if self._descriptors is None:
            return super().command()
        return ["bash", "-c", f'ulimit -Sn {self._descriptors}; exec "$@"', "bash", *super().command()]

    def __enter__(self) -> Self:
        self.token("first", publish=["first"])
        return super().__enter__()


VICTIM_SCOPES: dict[str, Any] = {"publish": ["victim.>"], "read": ["victim.>"], "consume": ["victim"]}
ATTACKER_SCOPES: dict[str, Any] = {
    "publish": ["mine.>"],
    "read": ["mine.>"],
    "consume": ["*"],
    "manage": [">"],
    "admin": True,
}


class Victim:
    """Runs from `__enter__`, which returns when its first message has come, to `__exit__`."""

    def __init__(self, url: str, token: str, pause_s: float) -> None:
        self._command = [sys.executable, "-c", VICTIM, url, token, str(pause_s), str(VICTIM_MESSAGES)]
        self.published: list[float] = []
        self.delivered: list[float] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert line_of(self._process) == "ready", "the victim could not begin"
        return self

    def wait(self) -> None:
        """Until it has sent its messages, while the attack goes on."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                reported = json.loads(line_of(self._process) or "{}")
            finally:
                self._process.kill()
        self.published, self.delivered = reported.get("published", []), reported.get("delivered", [])

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._process.kill()
            self._process.wait()
        elif self._process.returncode is None:
            self.wait()

    @property
    def p99_ms(self) -> float:
        """Of publishing and of delivering, whichever is worse."""
        return max(_at(self.published, 0.99), _at(self.delivered, 0.99))

    def summary(self) -> str:
        return (
            f"{len(self.published)} messages, publish p50 {_at(self.published, 0.5):.1f} p99 "
            f"{_at(self.published, 0.99):.1f} ms, delivery p50 {_at(self.delivered, 0.5):.1f} p99 "
            f"{_at(self.delivered, 0.99):.1f} ms"
        )


def call(connection: ClientConnection, method: str, params: Any = None, id: int = 1) -> dict[str, Any]:
    """One call and its answer; notifications that come before it are passed over."""
    connection.send(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}}))
    while True:
        answer = json.loads(connection.recv(PATIENCE_S))
        if isinstance(answer, dict) and answer.get("id") == id:
            return answer


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    return process.stdout.readline().decode().strip() if readable else ""


def _at(values: list[float], share: float) -> float:
    """In milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000 if values else 0.0
