"""One process of `headwater worker`: imports the module, runs its handlers, and reports to the supervisor.

    python -m headwater.worker.process OPTIONS

Two pipes join it to the supervisor. On one it writes reports, a JSON object a line. The other one has an end only: when
the supervisor closes it, or dies, the process stops as by SIGTERM. The process is started, not forked, so it opens its
log itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Literal, TypeVar

import msgspec

from headwater.api._async import AsyncLog
from headwater.api._runtime import Opening
from headwater.api._sync import Log
from headwater.broker.handlers import Handlers, Registration
from headwater.errors import (
    CallError,
    ConflictError,
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    InvalidOptionError,
    LeaseLostError,
    LockedError,
    OutcomeUnknownError,
    OverloadedError,
    SubscriptionActiveError,
    TransportError,
)
from headwater.formats import format_size
from headwater.server import logging as logs

logger = logging.getLogger("headwater.worker")

Opened = TypeVar("Opened", Log, AsyncLog)

# How a process ends. The supervisor starts it again after every code but DONE without `recycling`, and UNUSABLE.
DONE, FAILED, UNUSABLE = 0, 3, 2

# A process that cannot start because of a lasting error is not started again: a restart does not help. Of Headwater's
# errors those that may pass are named; of all others only those of the program's text last.
PASSING_AT_START = (
    ConnectionError,  # also UnavailableError and UnreachableError
    TimeoutError,
    LockedError,
    ConflictError,
    DiskFullError,
    InputOutputError,
    OutcomeUnknownError,
    SubscriptionActiveError,
    LeaseLostError,
    OverloadedError,
    CallError,
    TransportError,
)
# Of the program, as long as no process has been ready.
LASTING_AT_START = (
    HeadwaterError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
)

REPORT_S = 1.0
ORPHAN_S = 10.0  # that a process which does not end has beyond its shutdown timeout, if its supervisor is gone
FILES_MAX = 10_000
OPENED_BY = {Log: "headwater.open()", AsyncLog: "headwater.open_async()"}
ASYNC_HELP = "Name an async function that opens the log, declares its handlers and returns it"
TARGET_HELP = "Name a module and a log or a factory in it, like shop.tasks:log"


class WorkerOptions(msgspec.Struct, frozen=True):
    target: str
    processes: int
    threads: int | None
    reload: bool
    healthz: tuple[str, int] | None
    max_tasks: int | None
    max_memory: int | None
    shutdown_timeout_s: float
    log_format: Literal["text", "json"]
    log_level: str


class ProcessOptions(msgspec.Struct, frozen=True):
    """What the supervisor gives to a process. `number` counts processes from 1; `reports` and `control` are pipes."""

    worker: WorkerOptions
    number: int
    reports: int
    control: int


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """`state`: starting, running or failed. `is_ending`: it is to end soon. `where`, `error` and `next`: where and why
    it failed, and what to do. `files`: what has been imported and is the application's own, with its time of change
    then; only if there are more than before."""

    state: str
    tasks: int = 0
    memory: int = 0
    handlers: dict[str, str] = {}
    recycling: str = ""
    is_ending: bool = False
    where: str = ""
    error: str = ""
    next: str = ""
    files: dict[str, int] | None = None


# --- the module -------------------------------------------------------------------------------------------------------


def find_target(target: str) -> Any:
    """The object that `module:name` names; the name may have dots."""
    module_name, separator, path = target.partition(":")
    if not separator or not module_name or not path:
        raise InvalidOptionError(f"not a module and a name: {target[:80]!r}", next=TARGET_HELP)
    if module_name.endswith(".py") or "/" in module_name:
        written = f"{module_name.removesuffix('.py').strip('./').replace('/', '.')}:{path}"
        raise InvalidOptionError(
            f"{module_name} is a file, not a module", where=target, next=f"write {written}, not {target}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
            raise InvalidOptionError(
                f"there is no module {module_name}",
                where=target,
                next="Run the command in the directory that holds it, or set PYTHONPATH",
            ) from exc
        raise
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise InvalidOptionError(f"{module_name} has no {path}", where=target, next=TARGET_HELP) from None
    return found


def make_context(target: str, found: Any) -> Any:
    """What has the log inside: a log, or what a factory without arguments returns: a log, a context manager of one, or
    a coroutine that returns one."""
    if isinstance(found, AsyncLog):
        raise InvalidOptionError(
            "an asyncio log belongs to the event loop that opened it", where=target, next=ASYNC_HELP
        )
    if not isinstance(found, Log) and callable(found):
        name = target.partition(":")[2]
        _refuse_arguments(target, name, found)
        found = found()
        if isinstance(found, Opening):
            found.close()
            raise InvalidOptionError(
                f"{name} returns headwater.open_async(…) without await: there is no log yet that could have handlers",
                where=target,
                next=ASYNC_HELP,
            )
    if inspect.iscoroutine(found) or hasattr(found, "__aenter__") or hasattr(found, "__enter__"):
        return found
    raise InvalidOptionError(
        f"{target.partition(':')[2]} is no log but {type(found).__name__}",
        where=target,
        next="Name a log from headwater.open(), or a function without arguments that returns one",
    )


def _refuse_arguments(target: str, name: str, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind()
    except TypeError:
        raise InvalidOptionError(
            f"{name}{signature} needs arguments, and a worker has none to give",
            where=target,
            next="Name a function without arguments that returns the log; its settings may come from the environment",
        ) from None


def _checked(target: str, log: Any, kind: type[Opened]) -> Opened:
    if not isinstance(log, kind):
        raise InvalidOptionError(
            f"the factory returned {type(log).__name__}, not a log of {OPENED_BY[kind]}",
            where=target,
            next="An async factory returns that of headwater.open_async(), any other that of headwater.open()",
        )
    if not log._handlers.has_declared:
        raise InvalidOptionError(
            "the log has no handlers and no schedules", where=target, next="Declare one with @log.on before it is run"
        )
    return log


def own_files(exc: BaseException | None = None) -> list[str]:
    """The files of imported modules that belong to no installed package: those that change in development. Of a module
    that could not be imported, those that its error names."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    if exc is not None:
        files += [frame.filename for frame in traceback.extract_tb(exc.__traceback__)]
        files.append(getattr(exc, "filename", None))  # of a SyntaxError
    installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
    paths = {os.path.abspath(file) for file in files if isinstance(file, str) and file.endswith(".py")}
    return sorted(path for path in paths if not path.startswith(installed) and os.path.exists(path))[:FILES_MAX]


def modified(files: Iterable[str]) -> dict[str, int]:
    """When each of them was changed, in nanoseconds; 0 for one that is not there."""
    found = {}
    for file in files:
        try:
            found[file] = os.stat(file).st_mtime_ns
        except OSError:
            found[file] = 0
    return found


# --- running ----------------------------------------------------------------------------------------------------------


class WorkerProcess:
    def __init__(self, options: ProcessOptions) -> None:
        self._given = options
        self._options = options.worker
        self._tasks = 0
        self._state = "starting"
        self._recycling = ""
        self._handlers: Handlers | None = None
        self._stop: Callable[[], object] | None = None
        self._is_asked = False
        self._is_ending = False
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._files: dict[str, int] = {}

    def run(self) -> int:
        """The exit code."""
        options = self._options
        for pipe in (self._given.reports, self._given.control):
            os.set_inheritable(pipe, False)  # not for the programs that handlers start
        handler = logs.set_up(options.log_format, options.log_level)
        handler.addFilter(self._name_process)
        threading.Thread(target=self._watch_control, name="headwater-control", daemon=True).start()
        sys.path.insert(0, os.getcwd())
        try:
            found = find_target(options.target)
            root = logging.getLogger()
            if not root.handlers:  # the application configures no logging of its own
                root.addHandler(handler)
                root.setLevel(options.log_level.upper())
            context = make_context(options.target, found)
            # Logs have both methods, to say which statement opens them; other context managers have one.
            if isinstance(context, Log) or not (inspect.iscoroutine(context) or hasattr(context, "__aenter__")):
                self._run_blocking(context)
            else:
                asyncio.run(self._run_async(context))
        except Exception as exc:
            return self._fail(exc)
        return DONE

    def _name_process(self, record: logging.LogRecord) -> bool:
        record.worker = self._given.number
        return True

    def _fail(self, exc: Exception) -> int:
        """Report why the process ends. A module that cannot be imported and a file that is no log stay so; other errors
        may pass, as that of a database that is away."""
        is_lasting = isinstance(exc, LASTING_AT_START) and not isinstance(exc, PASSING_AT_START)
        is_unusable = self._state == "starting" and is_lasting
        if not isinstance(exc, HeadwaterError):
            logger.error("the worker failed", exc_info=exc)
        self._state, self._is_ending = "failed", True
        self._report(exc)
        return UNUSABLE if is_unusable else FAILED

    def _run_blocking(self, context: AbstractContextManager[Any]) -> None:
        with context as opened:
            log: Log = _checked(self._options.target, opened, Log)
            self._prepare(log._handlers, log._handlers.ask_to_stop)
            try:
                log.run(self._options.shutdown_timeout_s)
            finally:
                self._is_ending = True

    async def _run_async(self, context: Any) -> None:
        if inspect.iscoroutine(context) and not hasattr(context, "__aenter__"):
            context = await context
            if isinstance(context, Log) or not hasattr(context, "__aenter__"):
                _checked(self._options.target, context, AsyncLog)
        async with context as opened:
            log: AsyncLog = _checked(self._options.target, opened, AsyncLog)
            loop, ask_to_stop = asyncio.get_running_loop(), log._handlers.ask_to_stop

            def stop() -> None:
                if asyncio._get_running_loop() is loop:
                    ask_to_stop()
                else:
                    loop.call_soon_threadsafe(ask_to_stop)

            self._prepare(log._handlers, stop)
            try:
                await log.run(self._options.shutdown_timeout_s)
            finally:
                self._is_ending = True  # threads of the application may keep it from that

    def _prepare(self, handlers: Handlers, stop: Callable[[], object]) -> None:
        handlers.change_registrations(self._as_worker)
        handlers.on_started = self._on_started
        self._handlers = handlers
        with self._lock:
            self._stop = stop
        threading.Thread(target=self._keep_reporting, name="headwater-reports", daemon=True).start()

    def _on_started(self) -> None:
        self._state = "running"
        self._report()
        if self._is_asked:
            self._ask_to_stop()

    def _as_worker(self, registration: Registration) -> Registration:
        """Make the handler count its messages. A shared handler without a `concurrency` of its own gets that of
        --threads."""
        handler, threads = registration.handler, self._options.threads
        is_shared = registration.options.get("mode") == "shared"

        @wraps(handler)
        def counted(message: Any) -> Any:
            self._count_task()
            return handler(message)

        if not hasattr(counted, "__qualname__"):
            counted.__qualname__ = repr(handler)
        if threads is not None and is_shared and registration.concurrency is None:
            registration = registration._replace(concurrency=threads)
        return registration._replace(handler=counted)

    def _count_task(self) -> None:
        with self._lock:
            self._tasks += 1
            is_enough = self._tasks == self._options.max_tasks
        if is_enough:
            self._recycle(f"it has handled {self._tasks:,} messages")

    def _recycle(self, why: str) -> None:
        if not self._recycling and not self._is_asked:
            self._recycling = why
            self._report()
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        with self._lock:
            self._is_asked, stop = True, self._stop
        if stop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: it has ended already
                stop()

    # --- to and from the supervisor -----------------------------------------------------------------------------------

    def _watch_control(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._given.control, 1):
                pass
        self._ask_to_stop()
        time.sleep(self._options.shutdown_timeout_s + ORPHAN_S)
        os._exit(FAILED)  # the supervisor would have killed it by now, so it is gone

    def _keep_reporting(self) -> None:
        while True:
            time.sleep(REPORT_S)
            memory, most = memory_bytes(), self._options.max_memory
            if most is not None and memory > most:
                self._recycle(f"it uses {format_size(memory)} of memory")
            self._report()

    def _report(self, exc: Exception | None = None) -> None:
        states = {} if self._handlers is None else self._handlers.health()
        where, error, next = _described(exc)
        with self._reporting:
            new = [file for file in own_files(exc) if file not in self._files] if self._options.reload else []
            self._files |= modified(new)
            report = Report(
                state=self._state,
                tasks=self._tasks,
                memory=memory_bytes(),
                handlers={id: health["state"] for id, health in states.items()},
                recycling=self._recycling,
                is_ending=self._is_ending or bool(self._recycling),
                where=where,
                error=error,
                next=next,
                files=self._files if new else None,
            )
            line = memoryview(msgspec.json.encode(report) + b"\n")
            with contextlib.suppress(OSError):  # the supervisor is gone
                while line:
                    line = line[os.write(self._given.reports, line) :]


def _described(exc: Exception | None) -> tuple[str, str, str]:
    if exc is None:
        return "", "", ""
    if isinstance(exc, HeadwaterError):
        return exc.where, exc.why, exc.next
    place = traceback.extract_tb(exc.__traceback__)[-1]
    return "", f"{type(exc).__name__}: {exc} ({os.path.relpath(place.filename)}:{place.lineno})", ""


def memory_bytes() -> int:
    """What the process has in memory now; where that is not known, the most that it had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    code = WorkerProcess(msgspec.json.decode(sys.argv[1], type=ProcessOptions)).run()
    logging.shutdown()
    sys.exit(code)
