"""A real standalone cluster from the PySpark package: a master and two workers, each a process with folders of its
own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from headwater.pipeline.jvm import find_java

WORKERS = 2
START_S_MAX = 90.0
END_S_MAX = 20.0
EXECUTORS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "800m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_UNTIL_STDIN_ENDS = '"$@" & cat; kill $!; wait $!'  # so a daemon does not outlive tests that are killed


@contextmanager
def standalone_cluster(folder: Path) -> Iterator[str]:
    """The address of its master."""
    with ExitStack() as stack:
        log = _own_folder(folder, "master") / "log"
        stack.enter_context(_daemon(log, _MASTER, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"))
        url = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        for number in range(WORKERS):
            own = _own_folder(folder, f"worker-{number}")
            log = own / "log"
            size = ("--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(own / "work"))
            stack.enter_context(_daemon(log, _WORKER, "--host", "127.0.0.1", *size, url))
            _wait_for(log, r"Successfully registered with master (\S+)")
        yield url


def _own_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@contextmanager
def _daemon(log: Path, *arguments: str) -> Iterator[None]:
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(log.parent),
    }
    command = ["sh", "-c", _UNTIL_STDIN_ENDS, "sh", str(spark_class), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=log.parent,
            process_group=0,
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(log: Path, pattern: str) -> str:
    until = time.monotonic() + START_S_MAX
    while not (found := re.search(pattern, log.read_text(errors="replace"))):
        if time.monotonic() > until:
            raise TimeoutError(f"{log.name} never printed {pattern!r}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)  # it tells by its log alone
    return found[1]
