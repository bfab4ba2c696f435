"""Spark sessions: settings for a log on one machine; elsewhere Spark keeps its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.errors import InvalidOptionError
from headwater.pipeline.jvm import Jvm, Scratch, find_java, spark_folder
from headwater.version import install_hint

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

JVM_END_S_MAX = 10.0
TASK_ATTEMPTS_MAX = 4  # Spark's default on clusters; local[N] alone allows one attempt

# What every session needs, wherever it runs: these change results or what can be asked, not how fast.
EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    # A plan may show the options of a source, and one of them is a url: not with the password in it.
    "spark.sql.redaction.string.regex": r"(?<=://[^/@\s]{0,200}:)[^/@\s]+(?=@)|(?<=[?&]password=)[^&\s,\]]+",
}
DRIVER = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
LOCALLY = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    # By default a file of a checkpoint costs two forks, and carries two checksums: Hadoop's, and Spark's own.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # From 33 files on Spark would start a job with a task for each to list them; on a local disk that is instant.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # The assumed cost of opening a file when files are assigned to tasks: on a local disk next to nothing.
    "spark.sql.files.openCostInBytes": "262144",
}
# A query over few rows ends before generated code and a second plan have paid for themselves.
SHORT_QUERIES = {"spark.sql.codegen.wholeStage": "false", "spark.sql.adaptive.enabled": "false"}
_WAREHOUSE = "spark.sql.warehouse.dir"


def session(
    app: str = "headwater",
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    scratch: Path | None = None,
    short: bool = False,
) -> SparkSession:
    """A session: inside this process, on a cluster (`master`), or through Spark Connect (`remote`).

    `conf` overrides every setting made here. Temporary files go into a folder of their own below `scratch`, which is
    removed at the end. `short` is for a few queries over little data: it compiles less, and long queries are slower.
    """
    return Spark(app, master, remote, conf, scratch, short).session


class Spark:
    """A Spark that is ready when it is needed: its JVM starts here and now, and is waited for on first use.

    `context` is enough for `run_tasks`; `session` also loads Spark SQL, which takes as long as all the rest.
    """

    def __init__(
        self,
        app: str = "headwater",
        master: str | None = None,
        remote: str | None = None,
        conf: Mapping[str, str] | None = None,
        scratch: Path | None = None,
        short: bool = False,
    ) -> None:
        if master is not None and remote is not None:
            raise InvalidOptionError("both a master and a remote are given", next="Leave out one of them")
        installed = spark_folder()
        if installed is None:
            raise InvalidOptionError("PySpark is not installed", next=install_hint("spark"))
        if master is None and remote is None:
            remote = os.environ.get("SPARK_REMOTE") or None
        self.is_connect = remote is not None
        self._given = {"spark.app.name": app} | {name: str(value) for name, value in (conf or {}).items()}
        self._master = with_attempts(remote or master or self._given.pop("spark.master", None))
        self._short = short
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with _lock:
            self._begin(installed, scratch)

    @property
    def context(self) -> SparkContext:
        """The SparkContext, for RDDs. Not through Spark Connect, which has none."""
        from pyspark import SparkConf, SparkContext

        with self._starting() as settings:
            return SparkContext.getOrCreate(SparkConf().setAll(list(settings.items())))

    @property
    def session(self) -> SparkSession:
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        with self._starting() as settings:
            session = SparkSession.builder.config(map=dict(settings)).getOrCreate()
        # PySpark logs an error of a query as kilobytes of JSON before it raises it.
        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
        return session

    def wait(self) -> None:
        """Wait until it is up."""
        _ = self.session if self.is_connect else self.context

    def close(self) -> None:
        """Ends it. A local JVM is killed, which takes no time and loses nothing: all results are in Python by now, and
        its temporary files are removed here. A cluster's driver is stopped, so that its executors are freed."""
        with _lock:
            logs_events = self._given.get("spark.eventLog.enabled", "false") != "false"
            if _jvm is not None and self._master.startswith("local[") and not logs_events:
                end_jvm(0.0)
            else:
                _disconnect(stop=True)

    @property
    def _is_elsewhere(self) -> bool:
        """A Spark Connect server that is not ours: it has its own JVM and settings."""
        return self.is_connect and not self._master.startswith("local")

    def _begin(self, installed: Path, parent: Path | None) -> None:
        """Start the JVM, if this process has none."""
        global _jvm
        if _jvm is not None and _jvm.has_ended:
            end_jvm()
        core = sys.modules.get("pyspark.core.context")
        if self._is_elsewhere or _jvm is not None or (core is not None and core.SparkContext._gateway is not None):
            return
        java, scratch = find_java(), Scratch(parent)
        settings = settings_for(self._master, self._given, scratch.folder, short=self._short)
        _jvm = Jvm(java, installed, {"spark.master": self._master} | settings, scratch)
        atexit.register(end_jvm)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[dict[str, str]]:
        """PySpark is connected to the JVM; the settings to start with."""
        on_interrupt = signal.getsignal(signal.SIGINT)
        with _lock:
            where = {"spark.remote" if self.is_connect else "spark.master": self._master}
            if self._is_elsewhere or _jvm is None:  # a JVM that is not ours keeps its settings
                settings = EVERYWHERE | self._given
            else:
                settings = settings_for(self._master, self._given, _jvm.scratch.folder, short=self._short)
                _jvm.connect({"spark.master": self._master} | settings)
                if self.is_connect:  # the JVM has the rest; a client that asks again earns a warning for each
                    is_run_time = {name for name in settings if name.startswith("spark.sql.") and name != _WAREHOUSE}
                    settings = {name: settings[name] for name in is_run_time}
            try:
                yield settings | where
            finally:
                # PySpark puts its own handler there. It gives way to one that the program has chosen.
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and on_interrupt is not signal.default_int_handler:
                    signal.signal(signal.SIGINT, on_interrupt)


_jvm: Jvm | None = None
_lock = threading.RLock()


def end_jvm(wait_s: float = JVM_END_S_MAX) -> None:
    """End the JVM that this process started, if it did, and remove its temporary files. Happens by itself at exit.

    With `wait_s` = 0 it is killed.
    """
    global _jvm
    with _lock:
        jvm, _jvm = _jvm, None
        atexit.unregister(end_jvm)
        if jvm is not None and jvm.owner == os.getpid():  # a fork leaves it to its parent
            _disconnect(stop=wait_s > 0, forget=True)
            jvm.end(wait_s)


def _disconnect(*, stop: bool, forget: bool = False) -> None:
    """Stops PySpark's sessions, and makes it forget the JVM, which it would otherwise call until the end and report as
    gone. What was never imported has nothing to stop; errors mean that the JVM died before."""
    connect = sys.modules.get("pyspark.sql.connect.session")
    with contextlib.suppress(Exception):
        if connect is not None and (active := connect.SparkSession.getActiveSession()) is not None:
            if "SPARK_LOCAL_REMOTE" in os.environ:
                active.client.close()  # open, it would look for the server for minutes at exit
            active.stop()
    core = sys.modules.get("pyspark.core.context")
    context = None if core is None else core.SparkContext._active_spark_context
    with contextlib.suppress(Exception):
        if stop and context is not None:
            context.stop()
    if core is None or not forget:
        return
    if server := getattr(context, "_accumulatorServer", None):
        # Its own shutdown waits up to a second for a thread that the JVM's end wakes, and that complains about it.
        server.server_shutdown = True
        server.handle_error = lambda *about: None
    with contextlib.suppress(Exception):
        core.SparkContext._gateway.shutdown()
    core.SparkContext._active_spark_context = core.SparkContext._gateway = core.SparkContext._jvm = None
    if (sql := sys.modules.get("pyspark.sql.session")) is not None:  # a later session would be this one again
        sql.SparkSession._instantiatedSession = sql.SparkSession._activeSession = None


# --- settings -------------------------------------------------------------------------------------------------------


def with_attempts(master: str | None) -> str:
    """The master, with more than one attempt for each task where that must be asked for; by default all cores here."""
    if master is None:
        return f"local[{cores()},{TASK_ATTEMPTS_MAX}]"
    plain = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    return f"local[{plain[1] or 1},{TASK_ATTEMPTS_MAX}]" if plain else master


def cores() -> int:
    """The cores that this process may use: in a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings_for(master: str, given: Mapping[str, str], folder: Path, *, short: bool = False) -> dict[str, str]:
    """All settings of a session with its driver in this process: ours, overridden by the given ones."""
    settings = EVERYWHERE | DRIVER
    options = [f"-Djava.io.tmpdir={folder}"]
    theirs = " ".join(given.get(f"spark.driver.{kind}JavaOptions", "") for kind in ("default", "extra"))
    if "log4j" not in theirs:
        options.append(f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}")
    if master.startswith("local["):
        count = master.removeprefix("local[").partition(",")[0].rstrip("]")
        settings |= LOCALLY
        settings["spark.sql.shuffle.partitions"] = count if count.isdigit() else str(cores())
        settings["spark.local.dir"] = str(folder)
        settings[_WAREHOUSE] = str(folder / "warehouse")
        if not re.search(r"-XX:\+Use\w+GC\b", theirs):  # with two collectors the JVM refuses to start
            options.append("-XX:+UseParallelGC")
        if short:
            settings |= SHORT_QUERIES
            options.append("-XX:TieredStopAtLevel=1")  # the better compiler takes more than it gives
    # Spark puts these before the user's own `extraJavaOptions`, of which the last word counts.
    settings["spark.driver.defaultJavaOptions"] = shlex.join(options)
    return settings | dict(given)
