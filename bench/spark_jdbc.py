"""Spark's own way to a SQLite file: JDBC with xerial's driver, as Debian has it."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headwater.errors import HeadwaterError
from headwater.pipeline.starting.cache import cache_folder, private_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PACKAGES = ("libxerial-sqlite-jdbc-java", "libxerial-sqlite-jdbc-jni")
OWN_JAR = "SQLITE_JDBC_JAR"
FETCH_S_MAX = 120
HOW_TO_GET_IT = (
    f"As root: apt-get install {PACKAGES[0]}; where there is no Debian, set {OWN_JAR} to xerial's own sqlite-jdbc jar"
)
# Without it, Spark takes SQLite's integers for 32 bits and hands out wrong numbers, and the view's id for a decimal.
TRUE_TYPES = (
    "seq BIGINT, id STRING, version BIGINT, priority BIGINT, published_at BIGINT, deliver_at BIGINT, expires_at BIGINT,"
    " size BIGINT"
)


class JdbcDriver(NamedTuple):
    """Debian's jar has its native half beside it; xerial's own carries it inside."""

    jar: Path
    native: Path | None

    def conf(self) -> dict[str, str]:
        conf = {"spark.driver.extraClassPath": str(self.jar)}
        if self.native is not None:
            where = f"-Dorg.sqlite.lib.path={self.native.parent} -Dorg.sqlite.lib.name={self.native.name}"
            conf["spark.driver.extraJavaOptions"] = where
        return conf


def find_driver() -> JdbcDriver:
    """As given, as installed, as fetched before, or fetched now."""
    if given := os.environ.get(OWN_JAR):
        return JdbcDriver(Path(given), None)
    fetched = cache_folder() / "bench-jdbc"
    return _driver_under(Path("/")) or _driver_under(fetched) or _fetch(fetched)


def _driver_under(root: Path) -> JdbcDriver | None:
    jar = root / "usr/share/java/xerial-sqlite-jdbc.jar"
    natives = glob.glob(f"{root}/usr/lib/*/jni/libsqlitejdbc.so") + glob.glob(f"{root}/usr/lib/jni/libsqlitejdbc.so")
    return JdbcDriver(jar.resolve(), Path(natives[0])) if jar.exists() and natives else None


def _fetch(folder: Path) -> JdbcDriver:
    """Neither step needs root."""
    try:
        private_folder(folder)
        _run(["apt-get", "download", *PACKAGES], folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(folder)], folder)
    except (OSError, subprocess.SubprocessError) as exc:
        raise HeadwaterError(f"the JDBC driver for SQLite is not here ({exc})", next=HOW_TO_GET_IT) from exc
    found = _driver_under(folder)
    if found is None:
        raise HeadwaterError(f"no JDBC driver in what {PACKAGES} brought", where=str(folder), next=HOW_TO_GET_IT)
    return found


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=FETCH_S_MAX, capture_output=True)


def jdbc(spark: SparkSession, log: Path, *, partitions: int = 1, upto: int = 0, table: str = "history") -> DataFrame:
    """The columns that our source has; times stay numbers and headers text, which is less work than we do.

    The view `history` has the ids; the table `messages` has them only where the publisher gave one.
    """
    reader = (
        spark.read.format("jdbc")
        .option("url", f"jdbc:sqlite:file:{log}?mode=ro")
        .option("driver", "org.sqlite.JDBC")
        .option("dbtable", table)
        .option("customSchema", TRUE_TYPES)
    )
    if partitions > 1:
        reader = reader.option("partitionColumn", "seq").option("lowerBound", 1).option("upperBound", upto)
        reader = reader.option("numPartitions", partitions)
    return reader.load().drop("checked")
