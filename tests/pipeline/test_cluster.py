"""A cluster without a shared disk: two workers with folders of their own, the log in PostgreSQL, the lake on S3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lake_world import assert_derived
from s3_server import CREDENTIALS
from standalone import EXECUTORS, standalone_cluster

import headwater
from headwater.pipeline.lake import BRONZE, Lake
from headwater.pipeline.logs import log_identity

MESSAGES = 30_000


@pytest.mark.long
def test_run_audit_sql_and_report(
    tmp_path: Path, s3_lake: str, postgres_url: str, figures: Callable[[str], None]
) -> None:
    lake = s3_lake  # the workers inherit its credentials, and their executors from them
    driver = tmp_path / "driver"
    driver.mkdir()

    def command(master: str, name: str, *arguments: str) -> str:
        conf = [word for key, value in EXECUTORS.items() for word in ("--conf", f"{key}={value}")]
        words = ["pipeline", name, "--lake", lake, *arguments, "--master", master, *conf]
        done = subprocess.run([sys.executable, "-m", "headwater", *words], cwd=driver, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for line in (f"$ headwater pipeline {name} --master spark://…", *done.stdout.splitlines()):
            figures(f"  {line}")
        return done.stdout

    def publish(count: int) -> None:
        with headwater.open(postgres_url, maintenance_interval=None, durability="relaxed") as log:
            log.publish_many([(f"orders.{n % 5}", {"n": n}) for n in range(count)])
            log.publish_many([("mails.new", {"n": n}, {"id": f"id {n}"}) for n in range(100)])

    with standalone_cluster(tmp_path) as master:
        publish(MESSAGES)
        command(master, "run", "--log", postgres_url)
        publish(1_000)
        command(master, "run", "--log", postgres_url)
        command(master, "audit", "--log", postgres_url, "--out", "audit.html")
        counted = command(master, "sql", "SELECT count(*) AS messages FROM silver_messages", "--json")
        report = subprocess.run(
            [sys.executable, "-m", "headwater", "pipeline", "report", "--lake", lake, "--out", "report.html"],
            cwd=driver,
            capture_output=True,
            text=True,
        )
        assert report.returncode == 0, report.stderr
    opened = Lake.open(lake)
    messages = opened.table(BRONZE).read().sort_by("seq").to_pylist()
    assert str(len(messages)) in counted
    assert_derived(opened, messages, log_identity(postgres_url)[0], False)
    executors = [path for worker in ("worker-0", "worker-1") for path in (tmp_path / worker / "work").glob("app-*/*")]
    assert {path.parts[-4] for path in executors} == {"worker-0", "worker-1"}  # both took part
    assert not list(tmp_path.rglob("*.parquet"))  # nothing of the lake is on a disk
    audit_page, report_page = ((driver / f"{name}.html").read_text() for name in ("audit", "report"))
    assert "The lake is whole" in audit_page
    assert not any(CREDENTIALS["AWS_SECRET_ACCESS_KEY"] in page for page in (audit_page, report_page))
