"""`headwater demo`, `bench` and `serve --demo`."""

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import headwater
from headwater.cli import demo as story
from headwater.cli.demo import publish_traffic


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


DEMO_S_MAX = 300
PARTS = 8
CLAIMS = {
    "invoice 4 came as attempt 2, those after it for the first time",
    "payment 1 was delivered again and paid",
    "the row was delivered like any other message",
    "it received all 400 in order: none was lost, none is there twice",
    "restored.db has all 20,000 customers again",
    "it appended these two, and nothing else",
}


def claims_of(shown: str) -> set[str]:
    """What was checked; claims may be folded into two lines."""
    return {claim.strip() for claim in re.findall(r"✓ (.*)", re.sub(r"\n     (?=\S)", " ", shown))}


def without_spark(folder: Path) -> dict[str, str]:
    """An environment in which Python does not find PySpark."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['pyspark'] = None\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.timeout(DEMO_S_MAX)
def test_the_demo_without_the_extra_leaves_out_the_lake_says_so_and_replaces_the_last_one(finish, tmp_path: Path):
    here = tmp_path / "here"
    (here / "lake").mkdir(parents=True)
    for name, content in ((story.NEXT_STEPS, story.SIGNATURE), ("app.db", "of the last demo"), ("mine.txt", "stays")):
        (here / name).write_text(content)
    shown = finish("demo", "--dir", here, timeout=DEMO_S_MAX, env=without_spark(tmp_path / "site"))
    assert (shown.code, shown.err) == (0, "")
    claims = claims_of(shown.out)
    for claim in CLAIMS:
        assert any(each.startswith(claim) for each in claims), claim
    assert "✗" not in shown.out
    assert "Left out, because pyspark is not installed" in shown.out
    assert "without: The lake on Apache Spark" in shown.out
    assert (here / "mine.txt").read_text() == "stays"
    for name in ("app.db", "restored.db"):
        assert (here / name).read_bytes().startswith(b"SQLite format 3")
    assert not (here / "lake").exists()


def test_as_json(run, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(story, "missing_for_spark", lambda: "pyspark")
    parts = ["publish_history", "kill_and_resume", "dead_letter_and_redrive", "insert_with_sql", "serve_and_kill"]
    for name in [*parts, "restore_replica", "forward"]:
        monkeypatch.setattr(story, name, lambda narrator, folder: narrator.check(True, "something"))
    result = run("demo", "--dir", tmp_path / "here", "--json").json
    assert result["left_out"] == ["The lake on Apache Spark"]
    assert [part["claims"] for part in result["parts"]] == [1] * (PARTS - 1) + [0]
    assert result["claims"] == PARTS - 1


def test_a_directory_that_is_not_of_a_demo_is_refused_and_left_alone(run, tmp_path: Path):
    (tmp_path / "events.db").write_text("mine")
    refused = run("demo", "--dir", tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "files that are not of a demo" in refused.err
    assert (tmp_path / "events.db").read_text() == "mine"


def test_a_log_of_the_last_demo_that_is_still_open_is_not_removed(run, log, path: Path):
    (path.parent / story.NEXT_STEPS).write_text(story.SIGNATURE)
    refused = run("demo", "--dir", path.parent)
    assert refused.code == 2
    assert "another process has the log of the last demo open" in refused.err
    assert path.exists()


def test_a_claim_that_does_not_hold_ends_the_demo_with_1(run, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(story, "missing_for_spark", lambda: "pyspark")
    monkeypatch.setattr(story, "publish_traffic", lambda path, on_run: publish_traffic(path, messages=500) + 1)
    failed = run("demo", "--dir", tmp_path / "here")
    assert failed.code == 1
    assert re.search("✗ .* messages were published", failed.out)
    assert "2/8" not in failed.out
    assert "a claim does not hold" in failed.err


def lose_a_line(folder: Path) -> None:
    lines = (folder / "returns.jsonl").read_text().splitlines(keepends=True)
    (folder / "returns.jsonl").write_text("".join(lines[1:]))


def lose_a_customer(folder: Path) -> None:
    with closing(apsw.Connection(str(folder / "restored.db"))) as database:
        database.execute("DELETE FROM customers WHERE id = 7")


@pytest.mark.parametrize(
    ("part", "after", "damage", "claim"),
    [
        (story.forward, "forward", lose_a_line, "has all 2 returns, each once"),
        (story.restore_replica, "replica", lose_a_customer, "has all 19,999 customers again"),
    ],
)
def test_what_a_command_left_is_checked(tmp_path: Path, monkeypatch, capsys, part, after, damage, claim):
    with headwater.open(tmp_path / story.LOG) as log:
        log.publish_many([("returns.new", {"order": 1}), ("returns.new", {"order": 2})])
    run_command = story.command

    def and_damage(narrator, folder: Path, *arguments: str) -> str:
        out = run_command(narrator, folder, *arguments)
        if arguments[0] == after:
            damage(folder)
        return out

    monkeypatch.setattr(story, "command", and_damage)
    with pytest.raises(story.DemoFailed, match=claim):
        part(story.Narrator(tmp_path), tmp_path)
    assert "✗" in capsys.readouterr().out


def test_a_command_that_fails_is_shown_with_its_error(tmp_path: Path, capsys):
    with pytest.raises(story.DemoFailed, match="headwater sync ends with 0, not 2"):
        story.command(story.Narrator(tmp_path), tmp_path, "sync", "missing.db", "ws://127.0.0.1:1/shop/app.db")
    assert "missing.db" in capsys.readouterr().out


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
