"""`headwater demo`, `bench` and `serve --demo`."""

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from pathlib import Path


def test_bench(run, tmp_path: Path):
    result = run("bench", tmp_path, "--seconds", 0.7, "--json")
    assert result.code == 0
    assert len(result.items) == 4
    assert all(each["per_second"] > 0 for each in result.items)
    assert list(tmp_path.iterdir()) == []
    assert run("bench", tmp_path / "missing").code == 2


def test_bench_for_people(run, tmp_path: Path):
    shown = run("bench", tmp_path, "--seconds", 0.7, "--durability", "relaxed").out
    assert "publish_many, 1,000 at a time" in shown
    assert "synchronous=NORMAL" in shown


def test_demo(finish, tmp_path: Path):
    result = finish("demo", "--dir", tmp_path / "here")
    assert (result.code, result.err) == (0, "")
    for claim in (
        "✓ the first process died of SIGKILL",
        "✓ order 4 came first, marked as attempt 2",
        "✓ payment 1 was delivered again and paid",
        "✓ the row was delivered like any other message",
        "✓ each was acked once, and no subscription is behind",
        "17 claims checked",
    ):
        assert claim in result.out
    assert "✗" not in result.out
    again = finish("demo", "--dir", tmp_path / "here")
    assert (again.code, again.out) == (2, "")
    assert "a demo has been here" in again.err


# --- serve --demo -----------------------------------------------------------------------------------------------------


ROWS, COLUMNS = 40, 100


def lines_until(process, pattern: str) -> list[str]:
    lines: list[str] = []
    while not lines or not re.search(pattern, lines[-1]):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        lines.append(line.rstrip("\n"))
    return lines


def test_into_a_pipe_it_prints_a_line_a_second(start, run, tmp_path: Path):
    process = start("serve", "--demo", env={"TMPDIR": str(tmp_path)})
    lines = lines_until(process, r"\b[1-9]\d* dead")
    [url] = re.findall(r"ws://127\.0\.0\.1:\d+", lines[0])
    assert any(line.strip().endswith(f"dlq {url}") for line in lines)
    assert re.match(
        r"\d\d:\d\d:\d\d  [\d.]+/s published, billing lag \d+, mailer lag \d+, live [\d.]+/s, \d+ dead, 8 connections$",
        lines[-1],
    )
    letter = run("dlq", url, "--json").items[0]
    assert (letter["subscription"], letter["reason"], letter["attempts"]) == ("mailer", "max_attempts", 3)
    topics = {topic["topic"] for topic in run("topics", url, "--json").items}
    assert topics >= {"mails.welcome", "orders.new", "sensors.attic", "sensors.cellar"}
    subscriptions = {each["id"]: each for each in run("subscriptions", url, "--json").items}
    assert {id: each["mode"] for id, each in subscriptions.items()} == {"billing": "exclusive", "mailer": "shared"}
    assert all(each["acked"] > 0 for each in subscriptions.values())
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_it_draws_a_table_in_place(start, tmp_path: Path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = start("serve", "--demo", stdout=slave, env={"TMPDIR": str(tmp_path), "TERM": "xterm"})
    os.close(slave)
    drawn = ""
    while drawn.count("connections") < 3:
        drawn += os.read(master, 65_536).decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    os.close(master)
    assert "\x1b[1A" in drawn  # up again, and over what stood there
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    for words in (r"billing +orders\.> +exclusive", r"mailer +mails\.\* +shared", r"display +sensors\.\* +live"):
        assert re.search(words, shown)
    assert list(tmp_path.iterdir()) == []
