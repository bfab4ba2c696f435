"""The code of the how-tos runs: on files, on a real PostgreSQL and with a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import apsw
import psycopg
import pytest
from command_line import serving, shell_environment

import headwater

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (HOWTO / page).read_text(), re.MULTILINE | re.DOTALL)


def run(program: str, folder: Path) -> str:
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_work_queue(tmp_path: Path) -> None:
    jobs, once, timed = blocks("work-queue.md")
    (tmp_path / "jobs.py").write_text(jobs)
    assert run(once, tmp_path) == "ready: True dead: ['Reject: no such image']\n"
    assert run(timed, tmp_path) == "reported: True schedules: ['nightly', 'tick']\n"


def test_the_outbox_on_sqlite(tmp_path: Path) -> None:
    program = "\n".join(block for block in blocks("outbox.md") if not block.startswith("# postgres"))
    assert run(program, tmp_path) == "reserved lamp\n"
    assert run(program, tmp_path) == "reserved lamp\n"
    connection = apsw.Connection(str(tmp_path / "shop.db"))
    assert connection.execute("SELECT count(*) FROM reserved").get == 2
    connection.close()
    with headwater.open(tmp_path / "app.db") as log:
        assert log.last_seq() == 2


def test_the_outbox_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    program = "\n".join(block for block in blocks("outbox.md") if block.startswith("# postgres"))
    psycopg_url = postgres_url.replace("postgres://", "postgresql://", 1)
    program = program.replace("postgresql://app@db.example.org/shop", psycopg_url)
    program = program.replace(
        "postgresql+psycopg://app@db.example.org/shop", psycopg_url.replace("postgresql://", "postgresql+psycopg://", 1)
    )
    run(program.replace("postgres://app@db.example.org/shop", postgres_url), tmp_path)
    with psycopg.connect(psycopg_url) as connection:
        assert connection.execute("SELECT order_id FROM invoices").fetchall() == [(17,), (18,)]
        for statement in "".join(blocks("outbox.md", "sql")).splitlines():
            connection.execute(statement.encode())
        connection.commit()
        assert connection.execute("SELECT count(*) FROM headwater.history").fetchone() == (4,)


@pytest.mark.parametrize("page", ["backup.md", "serve.md"])
def test_the_commands(page: str, tmp_path: Path) -> None:
    environment = shell_environment(tmp_path / "bin")
    for block in blocks(page, "sh"):
        words = ["bash", "-ec", block]
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr


def test_replicating_from_python(tmp_path: Path) -> None:
    with apsw.Connection(str(tmp_path / "app.db")) as connection:
        connection.execute("CREATE TABLE stock (item TEXT)")
    with serving(tmp_path) as port:
        assert run("\n".join(blocks("replicate.md")).replace("8765", port), tmp_path) == "1 True\n"


def test_methods_of_a_server(tmp_path: Path) -> None:
    """The page's server and the page's client, in one process."""
    [server] = blocks("methods.md")
    [client] = blocks("methods.md", "text")
    program = f"""
import os
import sys
import threading
{server.replace('serve("events.db")', 'serve("events.db", port=0)').replace("server.run()", "# run below")}
ready = threading.Event()

def start():
    import asyncio
    asyncio.run(server.serve_until_stopped(lambda _: ready.set()))

thread = threading.Thread(target=start)
thread.start()
ready.wait(30)
{client.replace('"ws://127.0.0.1:8765"', "server.url")}
sys.stdout.flush()
os._exit(0)  # the server runs on another thread
"""
    assert "{'customer': 'c-1', 'name': 'Ada'}" in run(program, tmp_path)


@pytest.mark.parametrize("page", ["index.md", "reference/options.md", "reference/transports.md", "howto/deploy.md"])
def test_other_pages(page: str, tmp_path: Path) -> None:
    """Their blocks are one program."""
    program = "\n".join(blocks(f"../{page}"))
    assert "headwater" in program
    run(program, tmp_path)
