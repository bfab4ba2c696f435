"""Starting Spark's JVM ourselves: no shell, no second JVM to work out the command, and an archive of classes.

Spark's own way (`spark-submit`) starts a JVM that prints the command which starts the JVM. For a Spark inside this
process the command is known, and PySpark takes a JVM that runs already. The JVM ends when its stdin does, so it
outlives neither the end of this process nor its death.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headwater.errors import HeadwaterError
from headwater.pipeline.starting.archive import Archive, spark_version
from headwater.pipeline.starting.flags import KNOWN_SPARK, spark_flags
from headwater.pipeline.starting.java import Java

JVM_START_S_MAX = 120.0
JVM_END_S_MAX = 10.0
JVM_POLL_S = 0.01

# With one of these somebody has set up a Spark of their own, and Spark's scripts know what to make of it.
_OWN_SPARK = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS")
_OWN_SETTINGS = ("spark.driver.extraLibraryPath",)


def can_launch(master: str, conf: Mapping[str, str], environ: Mapping[str, str], spark: Path) -> bool:
    """Whether the command is known: a Spark inside this process, as pip installed it."""
    return (
        os.name == "posix"
        and (master == "local" or master.startswith("local["))
        and spark_version().startswith(KNOWN_SPARK)
        and not any(environ.get(name) for name in _OWN_SPARK)
        and not any(name in conf for name in _OWN_SETTINGS)
        and not (spark / "conf").exists()
    )


def jvm_command(java: Java, spark: Path, conf: Mapping[str, str], archive_flags: Sequence[str]) -> list[str]:
    """The command that `spark-submit` would come to in the end."""
    jars = spark / "jars"
    first = sorted(map(str, jars.glob("slf4j-api-*.jar")))  # Spark puts it first, lest a jar that has a copy win
    added = [conf["spark.driver.extraClassPath"]] if conf.get("spark.driver.extraClassPath") else []
    options = [conf.get(f"spark.driver.{kind}JavaOptions", "") for kind in ("default", "extra")]
    return [
        str(java.executable),
        "-cp",
        os.pathsep.join([*added, *first, f"{jars}/*"]),
        f"-Xmx{conf.get('spark.driver.memory', '1g')}",
        *archive_flags,
        *(word for text in options for word in shlex.split(text)),
        *spark_flags(java.feature),
        "org.apache.spark.deploy.SparkSubmit",
        *(word for name, value in conf.items() for word in ("--conf", f"{name}={value}")),
        "pyspark-shell",
    ]


class Gateway(NamedTuple):
    """Where PySpark reaches the JVM, and the word that lets it in."""

    port: int
    secret: str

    def as_environment(self) -> dict[str, str]:
        return {"PYSPARK_GATEWAY_PORT": str(self.port), "PYSPARK_GATEWAY_SECRET": self.secret}


class Jvm:
    """A JVM that this process started, and that ends with it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, wait_s: float = JVM_END_S_MAX) -> None:
        """Let it end in order; one that takes too long is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_jvm(
    java: Java,
    spark: Path,
    conf: Mapping[str, str],
    environ: Mapping[str, str],
    folder: Path,
    *,
    archive: Archive | None = None,
    flags: Sequence[str] = (),
) -> tuple[Jvm, Gateway]:
    """Start it and wait until PySpark can connect. Should it not come up with the archive, it is tried without.

    `folder` must be private: the JVM leaves the word that lets PySpark in there, until it is read.
    """
    told = folder / "gateway"
    jvm_environ = {
        **environ,
        "JAVA_HOME": str(java.home),
        "SPARK_CONNECT_MODE": "0",
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told),
    }
    if archive is not None and archive.is_there:
        process = _start(jvm_command(java, spark, conf, [*archive.flags_to_use(), *flags]), jvm_environ)
        if gateway := _wait_for(told, process):
            return Jvm(process), gateway
    process = _start(jvm_command(java, spark, conf, flags), jvm_environ)
    if gateway := _wait_for(told, process):
        if archive is not None and archive.is_there:  # so it was the archive
            archive.remove()
        return Jvm(process), gateway
    ended = "did not come up in time" if process.returncode == -signal.SIGKILL else f"ended with {process.returncode}"
    raise HeadwaterError(
        f"Spark's JVM {ended}; what it said is above",
        where=f"Java {java.version}, {java.home}",
        next="Check spark.driver.memory and spark.driver.extraJavaOptions, or try another Java: set JAVA_HOME",
    )


def _start(command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.PIPE,  # its end is how the JVM learns of ours
        stdout=_stderr(),  # stdout belongs to the answer of whatever command this is
        stderr=_stderr(),
        process_group=0,  # Ctrl-C is for Python, which decides what becomes of the query
    )


def _stderr() -> int:
    """The real one, whatever sys.stderr is; a service may have none."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _wait_for(told: Path, process: subprocess.Popen[bytes]) -> Gateway | None:
    """What the JVM wrote once it listened; None if it ended without."""
    until = time.monotonic() + JVM_START_S_MAX
    try:
        while not told.exists():
            if process.poll() is not None:
                return None
            if time.monotonic() > until:
                process.kill()
                process.wait()
                return None
            time.sleep(JVM_POLL_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    content = told.read_bytes()
    told.unlink()
    port, length = struct.unpack(">ii", content[:8])
    return Gateway(port, content[8 : 8 + length].decode())
