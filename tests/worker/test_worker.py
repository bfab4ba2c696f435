"""`headwater worker`: its processes start, stop in order, crash and come back, are recycled and reloaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from eventually import eventually

import headwater

Module = Callable[[str], Path]
Start = Callable[..., Any]

SYNC = """
    import os, time
    import headwater

    log = headwater.open("jobs.db")

    @log.on("jobs", id="workers", mode="shared", lease=2, ack_wait=2, backoff=0.1)
    def work(message):
        if message.data == "crash" and message.attempt == 1:
            os._exit(9)
        if message.data == "slow":
            open("begun", "w").close()
            while not os.path.exists("release"):
                time.sleep(0.01)
        with open("done.txt", "a") as file:
            file.write(f"{message.data} {os.getpid()}\\n")
"""
ENDLESS = f"""{SYNC}
    import threading
    threading.Thread(target=threading.Event().wait).start()
"""
ASYNC = """
    import asyncio, os
    import headwater

    async def log():
        log = await headwater.open_async("jobs.db")

        @log.on("jobs", id="workers", mode="shared")
        async def work(message):
            if message.data == "slow":
                open("begun", "w").close()
                while not os.path.exists("release"):
                    await asyncio.sleep(0.01)
            with open("done.txt", "a") as file:
                file.write(f"{message.data} {os.getpid()}\\n")

        return log
"""
MANAGED = """
    from contextlib import contextmanager
    import headwater

    @contextmanager
    def log():
        with headwater.open("jobs.db") as opened:

            @opened.on("jobs", id="workers", mode="shared")
            def work(message):
                with open("done.txt", "a") as file:
                    file.write(f"{message.data} 0\\n")

            yield opened
        open("closed", "w").close()
"""


def publish(directory: Path, *data: Any) -> None:
    with headwater.open(directory / "jobs.db") as log:
        log.publish_many([("jobs", each) for each in data])


def done(directory: Path) -> list[str]:
    file = directory / "done.txt"
    return sorted(line.split()[0] for line in file.read_text().splitlines()) if file.exists() else []


def left(directory: Path) -> tuple[int, int]:
    """Of the subscription: what is not settled, and what is in flight."""
    with headwater.open(directory / "jobs.db") as log:
        info = log.subscription("workers")
        return info.lag, info.in_flight


# --- running and stopping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SYNC, ASYNC, MANAGED], ids=["log", "async factory", "context manager"])
def test_it_handles_messages_and_ends_with_0(module: Module, start: Start, tmp_path: Path, source: str) -> None:
    module(source)
    publish(tmp_path, *range(20))
    worker = start("--processes", "2")
    eventually(lambda: done(tmp_path), sorted(map(str, range(20))))
    worker.pids(2)
    worker.signal()
    assert worker.end() == 0, worker.text()
    assert left(tmp_path) == (0, 0)
    assert (tmp_path / "closed").exists() == (source is MANAGED)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_signal_lets_handlers_finish_and_gives_back_the_rest(
    module: Module, start: Start, tmp_path: Path, source: str, how: signal.Signals
) -> None:
    module(source)
    publish(tmp_path, "slow", *range(5))
    worker = start()
    eventually((tmp_path / "begun").exists, True)
    worker.signal(how)
    worker.wait_for("are stopping")
    eventually(lambda: left(tmp_path), (6, 1))  # given back while the handler still runs
    (tmp_path / "release").touch()
    assert worker.end() == 0, worker.text()
    assert done(tmp_path) == ["slow"]
    assert left(tmp_path) == (5, 0)


def test_a_second_signal_kills(module: Module, start: Start, tmp_path: Path, alive: Callable[[int], bool]) -> None:
    module(SYNC)
    publish(tmp_path, "slow")
    worker = start()
    eventually((tmp_path / "begun").exists, True)
    [pid] = worker.pids(1)
    worker.signal()
    worker.wait_for("stopping: the processes")
    until = time.monotonic() + 30
    while worker.process.poll() is None and time.monotonic() < until:  # one that follows at once counts as the same
        worker.signal()
        time.sleep(0.1)
    assert worker.end() == 130, worker.text()
    eventually(lambda: alive(pid), False)


def test_a_process_that_does_not_end_is_killed(module: Module, start: Start, tmp_path: Path) -> None:
    module(ENDLESS)
    worker = start("--shutdown-timeout", "0s")
    worker.pids(1)
    worker.signal()
    assert worker.end() == 1, worker.text()
    assert "did not end in time" in worker.text()


def test_processes_end_when_their_supervisor_is_killed(
    module: Module, start: Start, tmp_path: Path, alive: Callable[[int], bool]
) -> None:
    module(SYNC)
    publish(tmp_path, "slow", *range(5))
    worker = start()
    eventually((tmp_path / "begun").exists, True)
    [pid] = worker.pids(1)
    worker.process.kill()
    worker.wait_for("are stopping")
    (tmp_path / "release").touch()
    eventually(lambda: alive(pid), False)
    assert done(tmp_path) == ["slow"]
    assert left(tmp_path) == (5, 0)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_end_ends_after_its_supervisor_was_killed(
    module: Module, start: Start, alive: Callable[[int], bool]
) -> None:
    module(ENDLESS)
    worker = start("--shutdown-timeout", "0s")
    [pid] = worker.pids(1)
    worker.kill()
    eventually(lambda: alive(pid), False)


def test_a_process_that_crashes_is_started_again(module: Module, start: Start, tmp_path: Path) -> None:
    module(SYNC)
    publish(tmp_path, "crash", "fine")
    worker = start()
    worker.wait_for(r"error +process 1 \(pid \d+\) ended with 9; the next one starts in 1 s")
    eventually(lambda: done(tmp_path), ["crash", "fine"])
    assert len(set(worker.pids(2))) == 2
    worker.signal()
    assert worker.end() == 0, worker.text()


def test_the_stack_of_a_failed_handler_begins_with_it(module: Module, start: Start, tmp_path: Path) -> None:
    module("""
        import headwater

        log = headwater.open("jobs.db")

        @log.on("jobs", id="workers", mode="shared", max_attempts=1)
        def work(message):
            raise ValueError(message.data)
    """)
    publish(tmp_path, "no")
    worker = start()
    worker.wait_for("is dead-lettered in subscription workers")
    worker.signal()
    assert worker.end() == 0, worker.text()
    with headwater.open(tmp_path / "jobs.db") as log:
        [letter] = log.dead_letters.list()
    for text in (letter.stack or "", worker.text()):
        frames = [line for line in text.splitlines() if line.lstrip().startswith("File ")]
        assert len(frames) == 1, text
        assert frames[0].endswith("in work")


def test_a_process_that_is_killed_is_started_again_while_the_others_work(
    module: Module, start: Start, tmp_path: Path
) -> None:
    module(SYNC)
    worker = start("--processes", "2", "--healthz", "127.0.0.1:0")
    first, _ = worker.pids(2)
    assert worker.health()[0] == 200
    os.kill(first, signal.SIGKILL)
    worker.wait_for(r"was killed by SIGKILL; the next one starts in 1 s")
    status, document = worker.health()
    assert (status, document["status"]) == (503, "failing")
    assert sorted(each["state"] for each in document["processes"]) == ["running", "waiting"]
    publish(tmp_path, "a")
    eventually(lambda: done(tmp_path), ["a"])
    worker.pids(3)
    eventually(lambda: worker.health()[0], 200)
    assert sorted(each["restarts"] for each in worker.health()[1]["processes"]) == [0, 1]


def test_a_log_that_is_locked_is_tried_again(module: Module, start: Start, tmp_path: Path) -> None:
    module(SYNC.replace('"jobs.db"', '"jobs.db", busy_timeout=0.05'))
    connection = apsw.Connection(str(tmp_path / "jobs.db"))
    connection.execute("BEGIN EXCLUSIVE")
    worker = start()
    worker.wait_for(r"process 1 \(pid \d+\) ended with 3: .*jobs.db: .*lock.*; the next one starts in 2 s")
    connection.execute("ROLLBACK")
    connection.close()
    worker.pids(1)


# --- recycling --------------------------------------------------------------------------------------------------------


def test_a_process_is_started_anew_after_so_many_messages(module: Module, start: Start, tmp_path: Path) -> None:
    module(SYNC)
    publish(tmp_path, *range(25))
    worker = start("--max-tasks", "10")
    eventually(lambda: done(tmp_path), sorted(map(str, range(25))))
    assert len(worker.wait_for(r"info +process 1 \(pid \d+\) is started anew: it has handled 10 messages", 2)) == 2
    lines = (tmp_path / "done.txt").read_text().splitlines()
    by_pid: dict[str, int] = {}
    for line in lines:
        pid = line.split()[1]
        by_pid[pid] = by_pid.get(pid, 0) + 1
    assert sorted(by_pid.values()) == [5, 10, 10]


@pytest.mark.parametrize("why", ["recycled", "failed"])
def test_a_process_that_does_not_end_is_killed_though_the_worker_goes_on(
    module: Module, start: Start, tmp_path: Path, why: str
) -> None:
    module(
        "import threading\n"
        + SYNC.replace("\n    ", "\n")
        + "if not os.path.exists('once'):\n"
        + "    open('once', 'w').close()\n"
        + "    threading.Thread(target=threading.Event().wait).start()\n"
        + ("    raise RuntimeError('not yet')\n" if why == "failed" else "")
    )
    publish(tmp_path, 1, 2)
    worker = start("--shutdown-timeout", "0s", *(["--max-tasks", "1"] if why == "recycled" else []))
    eventually(lambda: set(done(tmp_path)), {"1", "2"})
    assert "process 1 did not end in time" in worker.text()


def test_a_process_is_started_anew_when_it_is_too_large(module: Module, start: Start, tmp_path: Path) -> None:
    module(SYNC + "        if message.data == 'large':\n            log.kept = bytearray(300_000_000)\n")
    publish(tmp_path, "large")
    worker = start("--max-memory", "200MiB")
    worker.wait_for(r"is started anew: it uses 3\d\d MiB of memory")
    publish(tmp_path, "after")
    eventually(lambda: done(tmp_path), ["after", "large"])


# --- threads, reload -------------------------------------------------------------------------------------------------


def test_threads_are_those_of_shared_handlers_without_their_own(module: Module, start: Start, tmp_path: Path) -> None:
    module(
        """
        import headwater, threading

        log = headwater.open("jobs.db")
        gates = {name: threading.Barrier(3) for name in ("shared", "own", "exclusive")}

        def handle(message):
            gate = gates[message.topic]
            try:
                gate.wait(3)
                word = "together"
            except threading.BrokenBarrierError:
                word = "alone"
            with open("done.txt", "a") as file:
                file.write(f"{message.topic}:{word} 0\\n")

        log.on("shared", id="shared", mode="shared")(handle)
        log.on("own", id="own", mode="shared", concurrency=1)(handle)
        log.on("exclusive", id="exclusive")(handle)
        """
    )
    with headwater.open(tmp_path / "jobs.db") as log:
        log.publish_many([(topic, number) for topic in ("shared", "own", "exclusive") for number in range(3)])
    start("--threads", "3")
    expected = ["exclusive:alone"] * 3 + ["own:alone"] * 3 + ["shared:together"] * 3
    eventually(lambda: done(tmp_path), expected)


def test_a_change_of_a_file_starts_the_processes_anew(module: Module, start: Start, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("WORD = 'one'\n")
    source = SYNC.replace("import headwater\n", "import headwater, helper\n", 1).replace(
        "{message.data}", "{helper.WORD}"
    )
    module(source)
    worker = start("--reload")
    worker.pids(1)
    publish(tmp_path, "a")
    eventually(lambda: done(tmp_path), ["one"])
    helper.write_text("WORD = 'second'\n")
    worker.wait_for("helper.py has changed")
    worker.pids(2)
    publish(tmp_path, "b")
    eventually(lambda: done(tmp_path), ["one", "second"])
    module("this is no Python")
    worker.wait_for("the module cannot be run: SyntaxError.*waiting for a change")
    module(source)
    worker.pids(3)
    worker.signal()
    assert worker.end() == 0, worker.text()


# --- what cannot be run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("", "tasks", "not a module and a name: 'tasks'"),
        ("", "tasks:log", "tasks has no log"),
        ("", "elsewhere:log", "there is no module elsewhere"),
        ("import elsewhere", "tasks:log", "ModuleNotFoundError: No module named 'elsewhere' (tasks.py:1)"),
        ("log = 5", "tasks:log", "log is no log but int"),
        ("log = lambda: 5", "tasks:log", "log is no log but int"),
        ("def log(url): ...", "tasks:log", "log(url) needs arguments, and a worker has none to give"),
        ("def log(): raise KeyError('DATABASE_URL')", "tasks:log", "KeyError: 'DATABASE_URL' (tasks.py:1)"),
        (
            "import headwater\ndef log(): return headwater.open_async('tasks.db')",
            "tasks:log",
            "log returns headwater.open_async(…) without await: there is no log yet that could have handlers",
        ),
        ("import io\nlog = io.StringIO", "tasks:log", "the factory returned StringIO, not a log of headwater.open()"),
        (
            "import headwater\nasync def log(): return headwater.open('jobs.db')",
            "tasks:log",
            "the factory returned Log, not a log of headwater.open_async()",
        ),
        ("async def log(): pass", "tasks:log", "the factory returned NoneType, not a log of headwater.open_async()"),
        ("import headwater\nlog = headwater.open('jobs.db')", "tasks:log", "no handlers and no schedules"),
        ("log = oops", "tasks:log", "NameError: name 'oops' is not defined (tasks.py:1)"),
        ("", "tasks.py:log", "next: write tasks:log, not tasks.py:log"),
        ("", "./shop/tasks.py:log", "next: write shop.tasks:log, not ./shop/tasks.py:log"),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_says_why(
    module: Module, start: Start, source: str, target: str, why: str
) -> None:
    module(source)
    worker = start(target=target)
    assert worker.end() == 2, worker.text()
    assert why in worker.text()
    assert "finish their messages" not in worker.text()


def make_other_tables(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE customers (name)")
    connection.close()


def make_other_subscription(path: Path) -> None:
    with headwater.open(path) as log:
        log.subscribe("workers", "jobs", mode="exclusive").close()


@pytest.mark.parametrize(
    ("file", "prepare", "where", "why", "next"),
    [
        (
            "jobs.db",
            lambda path: path.write_bytes(b"no database" * 1000),
            "{path}",
            "not a database",
            "Name another file",
        ),
        ("jobs.db", make_other_tables, "{path}", "other tables (customers, …) and no log", "pass adopt=True"),
        ("away/jobs.db", lambda path: None, "{path.parent}", "the directory does not exist", "mkdir -p {path.parent}"),
        ("jobs.db", make_other_subscription, "workers", "mode", ""),
    ],
    ids=["not SQLite", "other tables", "no directory", "other settings"],
)
def test_a_log_that_cannot_be_used_ends_the_first_start(
    module: Module,
    start: Start,
    tmp_path: Path,
    file: str,
    prepare: Callable[[Path], object],
    where: str,
    why: str,
    next: str,
) -> None:
    path = tmp_path / file
    module(SYNC.replace("jobs.db", file))
    prepare(path)
    worker = start()
    assert worker.end() == 2, worker.text()
    *logged, error, advice = worker.text().splitlines()
    assert error.startswith(f"error: {where.format(path=path)}: "), worker.text()
    assert why in error
    assert advice.startswith("next: ")
    assert next.format(path=path) in advice
    assert not any("the next one starts" in line for line in logged)


def test_wrong_options_end_with_2(module: Module, start: Start) -> None:
    module(SYNC)
    for arguments, why in [
        (["--healthz", "nowhere"], "--healthz is no address"),
        (["--healthz", "203.0.113.1:9"], "--healthz cannot listen there"),
        (["--max-memory", "1MiB"], "--max-memory is 16MiB at least"),
        (["--processes", "0"], "--processes"),
    ]:
        worker = start(*arguments)
        assert worker.end() == 2, worker.text()
        assert why in worker.text()


# --- the service manager ---------------------------------------------------------------------------------------------


def test_systemd_is_notified(module: Module, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    module(SYNC)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        worker = start("--processes", "2")
        assert notified.recv(100) == b"READY=1"
        worker.pids(2)
        worker.signal()
        assert notified.recv(100) == b"STOPPING=1"
        assert worker.end() == 0
