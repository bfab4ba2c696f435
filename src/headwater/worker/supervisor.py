"""The supervisor of `headwater worker`: starts processes, starts them again when they end, and stops them in order.

    starting ─► running ─── crashed ──► waiting ─ backoff ─► starting
                   │ ▲
                   └─┴─ recycled (--max-tasks, --max-memory), or files have changed (--reload)
    a signal ─► stopping: the processes finish their messages and give back the rest; a second signal kills them

The supervisor neither imports the module nor opens the log. It talks to a process by two pipes (`worker.process`), and
closes one of them to stop it: a process whose supervisor is killed stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

import h11
import msgspec

from headwater.errors import InvalidOptionError
from headwater.worker.process import UNUSABLE, ProcessOptions, Report, WorkerOptions, modified

logger = logging.getLogger("headwater.worker")

BACKOFF_S, BACKOFF_S_MAX = 1.0, 30.0
STEADY_S = 60.0  # after it has run for this long, a process that crashes is a first failure again
KILL_AFTER_S = 5.0  # that a process gets beyond its own shutdown timeout
SAME_SIGNAL_S = 0.5  # a wrapper such as timeout(1) may pass on what the process got by itself
START_S = 60.0  # in which a process that starts counts as healthy, if others run
SILENT_S = 30.0  # a process reports each second; after this time without a report it is not healthy
RELOAD_S = 0.5
REPORT_BYTES_MAX = 4 * 1024 * 1024
HEALTH_CONNECTIONS_MAX = 64
HEALTH_BYTES_MAX = 8_192
HEALTH_S = 5.0

ENDED, KILLED, INTERRUPTED = 0, 1, 130

State = Literal["starting", "running", "waiting", "stopping", "stopped"]


def restart_delay_s(failures: int) -> float:
    """How long a process that failed so many times in a row waits before it is started again."""
    return min(BACKOFF_S * 2.0 ** (failures - 1), BACKOFF_S_MAX) if failures else 0.0


def ended_by(code: int) -> str:
    """Words for the exit code of a process."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Slot:
    """The place of one process at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: State = "starting"
        self.process: asyncio.subprocess.Process | None = None
        self.control: int | None = None  # closed to stop the process
        self.report = Report("starting")
        self.files: dict[str, int] = {}  # and when each had been changed as the process imported it
        self.restarts = 0
        self.failures = 0
        self.began_s = self.heard_s = time.monotonic()
        self.is_wanted_anew = False
        self.killing: asyncio.TimerHandle | None = None  # it is to end, and has so long for it

    def stop(self) -> None:
        if self.control is not None:
            os.close(self.control)
            self.control = None

    def kill(self) -> bool:
        if self.process is None or self.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return True

    def is_healthy(self, now_s: float, *, others_run: bool) -> bool:
        if self.state == "starting":
            return others_run and now_s - self.began_s < START_S
        is_heard = now_s - self.heard_s < SILENT_S
        return self.state == "running" and is_heard and "failed" not in self.report.handlers.values()

    def health(self, now_s: float) -> dict[str, Any]:
        report = self.report
        is_silent = self.state == "running" and now_s - self.heard_s >= SILENT_S
        return {
            "process": self.number,
            "pid": None if self.process is None else self.process.pid,
            "state": "silent" if is_silent else self.state,
            "tasks": report.tasks,
            "memory_bytes": report.memory,
            "restarts": self.restarts,
            "handlers": report.handlers,
        }


class Supervisor:
    """`notify` passes the words of systemd to the service manager."""

    def __init__(self, options: WorkerOptions, notify: Callable[[Literal["READY=1", "STOPPING=1"]], None]) -> None:
        self._options = options
        self._notify = notify
        self._slots = [Slot(number) for number in range(1, options.processes + 1)]
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # replaced at each change
        self._is_ready = False
        self._unusable: Report | None = None
        self._asked_s: float | None = None
        self._code = ENDED
        self._connections = 0

    async def run(self) -> int:
        """Run until a signal, or until a process finds that the module cannot be run. Returns the exit code."""
        options = self._options
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        server = await self._serve_health() if options.healthz is not None else None
        processes = "a process" if options.processes == 1 else f"{options.processes} processes"
        logger.info("starting %s of %s", processes, options.target)
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        watcher = asyncio.create_task(self._watch_files()) if options.reload else None
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
        self._stop()
        _, running = await asyncio.wait(keepers, timeout=options.shutdown_timeout_s + KILL_AFTER_S)
        if running:
            logger.error("processes did not end in time and are killed: their messages are delivered again")
            self._kill_all()
            self._code = self._code or KILLED
        for outcome in await asyncio.gather(*keepers, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        for task in (watcher, stopping):
            if task is not None:
                task.cancel()
        if server is not None:
            server.close()
        if self._unusable is not None:
            next = self._unusable.next or "Fix it, and start the worker again"
            raise InvalidOptionError(self._unusable.error, where=self._unusable.where or options.target, next=next)
        logger.info("all processes have ended")
        return self._code

    # --- processes ----------------------------------------------------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Run a process in this slot until the worker stops."""
        while not self._stopping.is_set():
            changed = self._changed
            code = await self._run_process(slot)
            if self._stopping.is_set():
                break
            delay_s = self._after(slot, code)
            slot.state = "waiting"
            slot.restarts += 1
            if delay_s is None:
                if not self._options.reload:
                    self._unusable = slot.report
                    break
                logger.error("the module cannot be run: %s; waiting for a change of its files", _describe(slot.report))
            waiting = [asyncio.create_task(event.wait()) for event in (changed, self._stopping)]
            await asyncio.wait(waiting, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        slot.state = "stopped"

    def _after(self, slot: Slot, code: int) -> float | None:
        """Log how a process ended, and return when the next one starts; None if a restart would not help."""
        report, pid = slot.report, slot.process.pid if slot.process is not None else 0
        ran_s = time.monotonic() - slot.began_s
        if slot.is_wanted_anew:
            slot.is_wanted_anew, slot.failures = False, 0
            return 0.0
        if code == 0 and report.recycling:
            slot.failures = 0
            logger.info("process %d (pid %d) is started anew: %s", slot.number, pid, report.recycling)
            return 0.0
        slot.failures = 1 if ran_s >= STEADY_S else slot.failures + 1
        why = f": {text}" if (text := _describe(report)) else ""
        if code == UNUSABLE and report.error and (self._options.reload or not self._is_ready):
            return None
        delay_s = restart_delay_s(slot.failures)
        log = logger.info if code == 0 else logger.error
        log("process %d (pid %d) %s%s; the next one starts in %g s", slot.number, pid, ended_by(code), why, delay_s)
        return delay_s

    async def _run_process(self, slot: Slot) -> int:
        reports, reports_out = os.pipe()
        control_in, slot.control = os.pipe()
        given = ProcessOptions(self._options, slot.number, reports_out, control_in)
        slot.state, slot.report = "starting", Report("starting")
        slot.began_s = slot.heard_s = time.monotonic()
        try:
            # In a session of its own: a Ctrl-C in the terminal is for the supervisor alone.
            slot.process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headwater.worker.process",
                msgspec.json.encode(given).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(reports_out, control_in),
                start_new_session=True,
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(reports_out)
            os.close(control_in)
        if self._stopping.is_set():
            slot.stop()
        reading = asyncio.create_task(self._read_reports(slot, reports))
        code = await process.wait()
        if slot.killing is not None:
            slot.killing.cancel()
            slot.killing = None
        with contextlib.suppress(TimeoutError):  # a program that a handler started may have kept the pipe
            await asyncio.wait_for(reading, 1.0)
        slot.stop()
        return code

    async def _read_reports(self, slot: Slot, pipe: int) -> None:
        reader = asyncio.StreamReader(limit=REPORT_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        try:
            while line := await reader.readline():
                slot.report = _report.decode(line)
                slot.heard_s = time.monotonic()
                slot.files = slot.files if slot.report.files is None else slot.report.files
                if slot.report.is_ending:
                    self._kill_later(slot)
                if slot.report.state == "running" and slot.state == "starting":
                    slot.state = "running"
                    logger.info("process %d (pid %d) runs", slot.number, slot.process.pid if slot.process else 0)
                    self._look_ready()
        finally:
            transport.close()

    def _look_ready(self) -> None:
        if not self._is_ready and all(slot.state == "running" for slot in self._slots):
            self._is_ready = True
            self._notify("READY=1")

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            self._stop()
        elif now_s - self._asked_s >= SAME_SIGNAL_S:
            logger.warning("a second signal: the processes are killed")
            self._code = INTERRUPTED
            self._kill_all()

    def _stop(self) -> None:
        if self._stopping.is_set():
            return
        if any(slot.state == "running" for slot in self._slots):
            logger.info("stopping: the processes finish their messages")
        self._stopping.set()
        self._notify("STOPPING=1")
        for slot in self._slots:
            slot.state = "stopping"
            slot.stop()

    def _kill_later(self, slot: Slot) -> None:
        """Kill a process that was asked to end and hangs, also when the worker goes on: a hanging process handles no
        message."""
        if slot.killing is None:
            after_s = self._options.shutdown_timeout_s + KILL_AFTER_S
            slot.killing = asyncio.get_running_loop().call_later(after_s, self._kill_late, slot)

    def _kill_late(self, slot: Slot) -> None:
        if slot.kill():
            logger.error("process %d did not end in time and is killed: its messages are delivered again", slot.number)

    def _kill_all(self) -> None:
        for slot in self._slots:
            slot.kill()

    # --- reload -------------------------------------------------------------------------------------------------------

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            seen = modified({file for slot in self._slots for file in slot.files})
            changed = {file for slot in self._slots for file, at in slot.files.items() if seen[file] != at}
            if changed:
                logger.info("%s has changed: the processes are started anew", os.path.relpath(min(changed)))
                woken, self._changed = self._changed, asyncio.Event()
                for slot in self._slots:
                    slot.files = seen.copy()  # until the next process says what it has imported
                    slot.is_wanted_anew = slot.state in ("starting", "running")
                    slot.stop()
                    if slot.is_wanted_anew:
                        self._kill_later(slot)
                woken.set()

    # --- health -------------------------------------------------------------------------------------------------------

    def health(self) -> tuple[bool, dict[str, Any]]:
        now_s = time.monotonic()
        others_run = any(slot.state == "running" for slot in self._slots)
        is_healthy = all(slot.is_healthy(now_s, others_run=others_run) for slot in self._slots)
        status = "stopping" if self._stopping.is_set() else "ok" if is_healthy else "failing"
        return status == "ok", {"status": status, "processes": [slot.health(now_s) for slot in self._slots]}

    async def _serve_health(self) -> asyncio.Server:
        assert self._options.healthz is not None
        host, port = self._options.healthz
        try:
            server = await asyncio.start_server(self._answer, host, port, limit=HEALTH_BYTES_MAX)
        except OSError as exc:
            raise InvalidOptionError(
                f"--healthz cannot listen there ({exc.strerror or exc})",
                where=f"{host}:{port}",
                next="Use another port",
            ) from exc
        bound = server.sockets[0].getsockname()
        logger.info("health is at http://%s:%d/healthz", bound[0], bound[1])
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= HEALTH_CONNECTIONS_MAX:
                async with asyncio.timeout(HEALTH_S):
                    await self._exchange(reader, writer)
        except (TimeoutError, OSError, h11.RemoteProtocolError):
            pass  # a client that sends no request, or none that can be read
        finally:
            self._connections -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEALTH_BYTES_MAX)
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(await reader.read(HEALTH_BYTES_MAX))
        if not isinstance(event, h11.Request):
            return
        is_known = event.target.partition(b"?")[0] == b"/healthz" and event.method in (b"GET", b"HEAD")
        is_ok, document = self.health() if is_known else (False, {"status": "health is at /healthz"})
        body = msgspec.json.encode(document) + b"\n"
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
        ]
        status = (200 if is_ok else 503) if is_known else 404
        writer.write(
            http.send(h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)) or b""
        )
        writer.write(http.send(h11.Data(data=b"" if event.method == b"HEAD" else body)) or b"")
        await writer.drain()


_report = msgspec.json.Decoder(Report)


def _describe(report: Report) -> str:
    """The whole text of an error."""
    text = f"{report.where}: {report.error}" if report.where else report.error
    return f"{text}. {report.next}" if report.next else text
