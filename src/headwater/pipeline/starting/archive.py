"""An archive of loaded classes that halves the start of a JVM: which one fits, and how it is made.

Java 25 and newer keep an AOT cache, older ones a CDS archive. Either fits one Java and one set of jars, so its name is
made of both; after an upgrade another name is looked for, and is not there until `headwater pipeline warm` makes it. A
JVM checks again, and goes without an archive that does not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.pipeline.starting.cache import cache_folder, private_folder, write_whole
from headwater.pipeline.starting.flags import GARBAGE_COLLECTOR, spark_flags
from headwater.pipeline.starting.java import Java, find_java

AOT_FEATURE_MIN = 25
TRAINING_S_MAX = 600.0
ARCHIVES_KEPT_MAX = 4  # of about 200 MB each: one for each environment in use
LAST_WORDS_MAX = 5

# A JVM that does not like an archive goes on without; but it would say so at every start, and on stdout.
_QUIET = "-Xlog:disable"


@dataclass(frozen=True)
class Archive:
    """The archive that fits a Java and a PySpark, made or not."""

    file: Path
    is_aot: bool

    @property
    def is_there(self) -> bool:
        """Whether it is there and whole: a JVM checks what an archive was made of, but crashes on half of one."""
        try:
            return self.size == int(self._size_note.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return False

    @property
    def size(self) -> int:
        return self.file.stat().st_size

    @property
    def _size_note(self) -> Path:
        return self.file.with_name(f"{self.file.name}.size")

    def keep(self, made: Path) -> None:
        """Put a file that a JVM has made in its place."""
        with made.open("rb") as written:
            os.fsync(written.fileno())
        made.replace(self.file)
        write_whole(self._size_note, str(self.size), 0o600)

    def remove(self) -> None:
        self._size_note.unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)

    def flags_to_use(self) -> list[str]:
        if self.is_aot:
            return [f"-XX:AOTCache={self.file}", "-XX:AOTMode=auto", _QUIET]
        return [f"-XX:SharedArchiveFile={self.file}", "-Xshare:auto", _QUIET]

    def flags_to_make(self) -> list[str]:
        """The JVM with these writes the archive when it ends."""
        option = "AOTCacheOutput" if self.is_aot else "ArchiveClassesAtExit"
        return [f"-XX:{option}={self.file}", _QUIET]


def spark_folder() -> Path | None:
    """Where PySpark is installed; found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def spark_version() -> str:
    return importlib.metadata.version("pyspark")


def archive_for(java: Java, spark: Path) -> Archive:
    """Where the archive of this Java with this PySpark is, if it has been made."""
    is_aot = java.feature >= AOT_FEATURE_MIN
    name = f"spark-{spark_version()}-java-{_plain(java.version)}-{_fingerprint(java, spark)}"
    return Archive(cache_folder() / "archives" / f"{name}{'.aot' if is_aot else '.jsa'}", is_aot)


def _plain(version: str) -> str:
    return re.sub(r"[^\w.+-]", "_", version)


def _fingerprint(java: Java, spark: Path) -> str:
    """Changes with what the JVM itself compares: flags, its own modules, and every jar by path, size and time."""
    told = hashlib.sha256("\n".join([GARBAGE_COLLECTOR, *spark_flags(java.feature)]).encode())
    for file in (java.home / "lib" / "modules", *sorted((spark / "jars").glob("*.jar"))):
        with contextlib.suppress(OSError):
            state = file.stat()
            told.update(f"{file}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return told.hexdigest()[:16]


# --- making one -----------------------------------------------------------------------------------------------------


def train_archive(java: Java | None = None, on_step: Callable[[str], object] | None = None) -> Archive:
    """Run a little of everything in a Spark of its own, and keep what it loaded. Takes about a minute.

    `on_step` is called with a line of text whenever the next part begins. An archive that is there is made again.
    """
    java = java or find_java()
    spark = spark_folder()
    if spark is None:
        raise HeadwaterError("PySpark is not installed", next="pip install 'headwater[spark]'")
    archive = archive_for(java, spark)
    try:
        private_folder(archive.file.parent)
        beside = archive.file.with_name(f".{os.getpid()}-{archive.file.name}")
        with _gone_at_the_end(beside):
            _run_training(java, beside, on_step or (lambda step: None))
            archive.keep(beside)
        _remove_old(archive)
    except OSError as exc:
        next = "Set XDG_CACHE_HOME to a folder that can be written to"
        raise HeadwaterError(exc.strerror or str(exc), where=str(archive.file.parent), next=next) from exc
    return archive


@contextlib.contextmanager
def _gone_at_the_end(file: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for left in file.parent.glob(f"{file.name}*"):  # a JVM that makes an AOT cache writes a second file beside it
            left.unlink(missing_ok=True)


def _run_training(java: Java, file: Path, on_step: Callable[[str], object]) -> None:
    # A process of its own: this one may have a Spark already, and an archive is written when a JVM ends.
    command = [sys.executable, "-m", "headwater.pipeline.starting.training", str(file)]
    environ = {**os.environ, "JAVA_HOME": str(java.home)}
    last_words: deque[str] = deque(maxlen=LAST_WORDS_MAX)
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        too_long = threading.Timer(TRAINING_S_MAX, process.kill)
        too_long.start()
        try:
            for line in process.stdout:
                if line.startswith(STEP):
                    on_step(line.removeprefix(STEP).strip())
                elif line.strip():
                    last_words.append(line.strip())
        except BaseException:
            process.kill()
            raise
        finally:
            too_long.cancel()
    if process.returncode != 0 or not file.is_file():
        why = " / ".join(last_words) or f"ended with {process.returncode}"
        raise HeadwaterError(
            f"no archive was made ({why})",
            where=f"Java {java.version}, {java.home}",
            next="Spark works without it, and starts more slowly",
        )


STEP = "step: "


def _remove_old(newest: Archive) -> None:
    """Those of Javas and jars that are gone are never asked for again; only a few are kept."""
    others = [file for kind in ("*.jsa", "*.aot") for file in newest.file.parent.glob(f"spark-{kind}")]
    others.remove(newest.file)
    for file in sorted(others, key=lambda file: -file.stat().st_mtime)[ARCHIVES_KEPT_MAX - 1 :]:
        Archive(file, newest.is_aot).remove()
