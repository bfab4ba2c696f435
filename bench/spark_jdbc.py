"""Spark's own way to read a SQLite file: JDBC with xerial's driver from Debian; `history` has all messages."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER, PARTITIONS = "local[2]", 2
PACKAGES = ("libxerial-sqlite-jdbc-java", "libxerial-sqlite-jdbc-jni")
OWN_JAR = "SQLITE_JDBC_JAR"
FETCH_S_MAX = 120
# Without it, Spark reads SQLite's integers as 32 bits and returns wrong numbers, and the view's id as a decimal.
TRUE_TYPES = (
    "seq BIGINT, id STRING, version BIGINT, priority BIGINT, published_at BIGINT, deliver_at BIGINT, expires_at BIGINT,"
    " size BIGINT"
)


class JdbcDriver(NamedTuple):
    """Debian's jar needs a separate native library; xerial's own jar contains it."""

    jar: Path
    native: Path | None

    def conf(self) -> dict[str, str]:
        conf = {"spark.driver.extraClassPath": str(self.jar)}
        if self.native is not None:
            where = f"-Dorg.sqlite.lib.path={self.native.parent} -Dorg.sqlite.lib.name={self.native.name}"
            conf["spark.driver.extraJavaOptions"] = where
        return conf


def find_driver() -> JdbcDriver:
    """The given jar, the installed one, one fetched before, or one fetched now."""
    if given := os.environ.get(OWN_JAR):
        return JdbcDriver(Path(given), None)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fetched = Path(cache) / "headwater" / "bench-jdbc"
    return _driver_under(Path("/")) or _driver_under(fetched) or _fetch(fetched)


def _driver_under(root: Path) -> JdbcDriver | None:
    jar = root / "usr/share/java/xerial-sqlite-jdbc.jar"
    natives = glob.glob(f"{root}/usr/lib/*/jni/libsqlitejdbc.so") + glob.glob(f"{root}/usr/lib/jni/libsqlitejdbc.so")
    return JdbcDriver(jar.resolve(), Path(natives[0])) if jar.exists() and natives else None


def _fetch(folder: Path) -> JdbcDriver:
    """Neither step needs root."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _run(["apt-get", "download", *PACKAGES], folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(folder)], folder)
    except (OSError, subprocess.SubprocessError) as exc:
        raise RuntimeError(_how_to_get_it(str(exc))) from exc
    found = _driver_under(folder)
    if found is None:
        raise RuntimeError(_how_to_get_it(f"{PACKAGES} brought none"))
    return found


def _how_to_get_it(why: str) -> str:
    return (
        f"the JDBC driver for SQLite is not here ({why}). As root: apt-get install {PACKAGES[0]}; where there is no "
        f"Debian, set {OWN_JAR} to xerial's own sqlite-jdbc jar"
    )


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=FETCH_S_MAX, capture_output=True)


def jdbc(spark: SparkSession, log: str, *, partitions: int = 1, upto: int = 0) -> DataFrame:
    """The columns of Headwater's source; times stay numbers and headers text, which is less work than in Headwater."""
    reader = (
        spark.read.format("jdbc")
        .option("url", f"jdbc:sqlite:file:{log}?mode=ro")
        .option("driver", "org.sqlite.JDBC")
        .option("dbtable", "history")
        .option("customSchema", TRUE_TYPES)
    )
    if partitions > 1:
        reader = reader.option("partitionColumn", "seq").option("lowerBound", 1).option("upperBound", upto)
        reader = reader.option("numPartitions", partitions)
    return reader.load()
