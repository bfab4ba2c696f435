"""A Spark session with settings that suit a log on one machine, and that keeps out of the way anywhere else."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.errors import InvalidOption
from headwater.pipeline.starting.archive import archive_for, spark_folder
from headwater.pipeline.starting.flags import GARBAGE_COLLECTOR
from headwater.pipeline.starting.java import Java, find_java
from headwater.pipeline.starting.launch import JVM_END_S_MAX, Jvm, can_launch, start_jvm
from headwater.pipeline.starting.scratch import Scratch, make_scratch
from headwater.pipeline.starting.shim import spark_java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ATTEMPTS_MAX = 4  # local[N] alone allows one: a hiccup would end the query

# What every session of ours wants, wherever it runs: it changes results or what can be asked, not how fast.
EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    # A plan may show the options of a source, and one of them is a url: not with the password in it.
    "spark.sql.redaction.string.regex": r"(?<=://[^/@\s]{0,200}:)[^/@\s]+(?=@)|(?<=[?&]password=)[^&\s,\]]+",
}
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
STREAMS = {
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
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
    # From 33 files on Spark would start a job with a task for each to list them; here that takes no time at all.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # What opening a file is taken to cost when files are dealt out to tasks: on a local disk next to nothing.
    "spark.sql.files.openCostInBytes": "262144",
}
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_CHOOSES_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


@dataclass
class _Running:
    """The JVM of this process, if it is ours to end. PySpark keeps to its first one, also for later sessions."""

    jvm: Jvm | None
    scratch: Scratch
    owner: int = field(default_factory=os.getpid)


_running: _Running | None = None
_one_at_a_time = threading.RLock()
_WAREHOUSE = "spark.sql.warehouse.dir"
_LOCAL = re.compile(r"local(?:\[(\d+|\*)\])?")


def session(
    app: str = "headwater",
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    scratch: Path | None = None,
) -> SparkSession:
    """A session: inside this process, on a cluster (`master`), or through Spark Connect (`remote`).

    `conf` overrides every setting made here. Temporary files go into a folder of their own below `scratch`, which is
    removed at the end.
    """
    if master is not None and remote is not None:
        raise InvalidOption("both a master and a remote are given", next="Leave out one of them")
    spark = spark_folder()
    if spark is None:
        raise InvalidOption("PySpark is not installed", next="pip install 'headwater[spark]'")
    if master is None and remote is None:
        remote = os.environ.get("SPARK_REMOTE") or None
    given = {name: str(value) for name, value in (conf or {}).items()}
    given.setdefault("spark.app.name", app)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with _one_at_a_time:
        if remote is not None and not remote.startswith("local"):
            return _built(EVERYWHERE | given | {"spark.remote": remote})
        wanted = with_attempts(remote or master or given.pop("spark.master", None))
        return _with_jvm(spark, wanted, given, scratch, is_remote=remote is not None)


def end_jvm(wait_s: float = JVM_END_S_MAX) -> None:
    """End the JVM that this process started, if it did, and remove its temporary files. Happens by itself at exit."""
    global _running
    with _one_at_a_time:
        running, _running = _running, None
        if running is not None and running.owner == os.getpid():  # a fork leaves it to its parent
            if running.jvm is not None:
                _let_go()
                running.jvm.end(wait_s)
            running.scratch.remove()


def _let_go() -> None:
    """PySpark would talk to the JVM until the last moment, and complain that it is gone."""
    from pyspark import SparkContext

    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is not None and "SPARK_LOCAL_REMOTE" in os.environ:
        with contextlib.suppress(Exception):  # open, its client would look for the server for minutes at exit
            through_connect = connect.SparkSession.getActiveSession()
            through_connect.client.close()
            through_connect.stop()
    with contextlib.suppress(Exception):  # the JVM may have died before
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
    with contextlib.suppress(Exception):
        if SparkContext._gateway is not None:
            SparkContext._gateway.shutdown()
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None


def session_for_training(flags: Sequence[str]) -> SparkSession:
    """A local session on a JVM that is given these flags, and no archive."""
    spark = spark_folder()
    assert spark is not None
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return _with_jvm(spark, with_attempts(None), {"spark.app.name": "training"}, None, is_remote=False, flags=flags)


def _with_jvm(
    spark: Path,
    master: str,
    given: Mapping[str, str],
    parent: Path | None,
    *,
    is_remote: bool,
    flags: Sequence[str] | None = None,
) -> SparkSession:
    from pyspark import SparkContext

    if _running is not None and _running.jvm is not None and _running.jvm.has_ended:
        end_jvm()
    where = {"spark.remote" if is_remote else "spark.master": master}
    if SparkContext._active_spark_context is not None:  # there is one session's JVM in a process: it is that one
        return _built(EVERYWHERE | dict(given) | where)
    if _running is not None:  # its JVM is there still, from a session that was stopped
        return _built(settings_for(master, given, _running.scratch.folder) | where)
    java, held = find_java(), make_scratch(parent)
    settings = settings_for(master, given, held.folder)
    try:
        if SparkContext._gateway is None and can_launch(master, settings, os.environ, spark):
            archive = archive_for(java, spark) if flags is None else None
            launched = {"spark.master": master, **settings}
            environ = _jvm_environment(spark)
            jvm, gateway = start_jvm(java, spark, launched, environ, held.folder, archive=archive, flags=flags or ())
            _keep(_Running(jvm, held))
            with _environment(gateway.as_environment()):
                return _built((_at_run_time(settings) if is_remote else settings) | where)
        with _environment({"JAVA_HOME": str(_java_home_for_scripts(java, held))}):
            built = _built(settings | where)
    except BaseException:
        if _running is None:
            held.remove()
        raise
    process = getattr(SparkContext._gateway, "proc", None)
    _keep(_Running(Jvm(process) if process else None, held))
    return built


def _at_run_time(settings: Mapping[str, str]) -> dict[str, str]:
    """What a client may set: the server's JVM was told the rest at its start, and to ask again earns a warning each."""
    return {name: value for name, value in settings.items() if name.startswith("spark.sql.") and name != _WAREHOUSE}


def _java_home_for_scripts(java: Java, held: Scratch) -> Path:
    try:
        return spark_java_home(java)
    except OSError:  # there is no place for a cache
        return spark_java_home(java, held.folder)


def _built(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _keep(running: _Running) -> None:
    global _running
    if _running is None:
        atexit.register(end_jvm)
    _running = running


def _jvm_environment(spark: Path) -> dict[str, str]:
    environ = {**os.environ, "PYSPARK_DRIVER_PYTHON": sys.executable}
    # Without SPARK_HOME a worker imports PySpark from its site-packages, where it is compiled, and not from a zip,
    # where it is not: half a second less for each. Another Python may have no PySpark, and needs the zip.
    if environ["PYSPARK_PYTHON"] != sys.executable:
        environ["SPARK_HOME"] = str(spark)
    return environ


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """For the length of a start; processes that we start later must not take our JVM for theirs."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- settings -------------------------------------------------------------------------------------------------------


def with_attempts(master: str | None) -> str:
    """The master, with more than one chance for each task where that must be asked for; by default all cores here."""
    if master is None:
        return f"local[{cores()},{TASK_ATTEMPTS_MAX}]"
    plain = _LOCAL.fullmatch(master)
    return f"local[{plain[1] or 1},{TASK_ATTEMPTS_MAX}]" if plain else master


def cores() -> int:
    """Those that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings_for(master: str, given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """All settings of a session whose driver is here: ours, and over them what was given."""
    settings = {**EVERYWHERE, **STREAMS, "spark.ui.showConsoleProgress": "false"}
    options = [f"-Djava.io.tmpdir={folder}"]
    theirs = " ".join(given.get(f"spark.driver.{kind}JavaOptions", "") for kind in ("default", "extra"))
    if "log4j" not in theirs:
        options.append(f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}")
    if master.startswith("local["):
        count = master.removeprefix("local[").partition(",")[0].rstrip("]")
        settings |= LOCALLY
        settings["spark.sql.shuffle.partitions"] = count if count.isdigit() else str(cores())
        settings["spark.local.dir"] = str(folder)
        settings[_WAREHOUSE] = str(folder / "warehouse")
        if not _CHOOSES_COLLECTOR.search(theirs):  # two collectors, and the JVM refuses to start
            options.append(GARBAGE_COLLECTOR)
    # Spark puts these before the user's own `extraJavaOptions`, of which the last word counts.
    settings["spark.driver.defaultJavaOptions"] = shlex.join(options)
    return settings | dict(given)
