"""`headwater dlq`."""

from pathlib import Path

import pytest

import headwater


@pytest.fixture
def dead_lettered(log: headwater.Log) -> headwater.Log:
    """The log with dead letters 1 (rejected), 2 (out of attempts) and 3 (rejected, a note)."""
    with log.subscribe("billing", "orders.>", max_attempts=1) as billing:
        first, second, third = billing.fetch(3)
        first.reject("no such customer")
        second.nack(error="Timeout: bank\nsecond line")
        third.ack()
    with log.subscribe("notes", "notes.>") as notes:
        notes.fetch(1)[0].reject("[red]illegible\x1b[2J")
    return log


def ids(result) -> list[int]:
    return [letter["id"] for letter in result.items]


def test_ls(run, dead_lettered, path: Path):
    lines = run("dlq", path).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
    assert lines[2].endswith("max_attempts         1  Timeout: bank")
    assert lines[3].endswith("[red]illegible\\x1b[2J")
    assert ids(run("dlq", path, "--json")) == [1, 2, 3]
    assert ids(run("dlq", "ls", path, "--subscription", "billing", "--reason", "rejected", "--json")) == [1]
    assert ids(run("dlq", "ls", path, "--topic", "notes.*", "--json")) == [3]
    assert ids(run("dlq", "ls", path, "--error", "^Time", "--json")) == [2]
    assert ids(run("dlq", "ls", path, "--limit", 1, "--after", 1, "--json")) == [2]
    assert run("dlq", "ls", path, "--error", "(").code == 2


@pytest.mark.parametrize("command", [["ls"], ["stats"], ["redrive"], ["purge"], ["export"]])
def test_a_subscription_that_is_not_there_is_noted(run, dead_lettered, path: Path, command: list[str]):
    done = run("dlq", *command, path, "--subscription", "biling")
    assert (done.code, done.err) == (0, "there is no subscription 'biling'; headwater subscriptions lists them\n")
    dead_lettered.subscribe("empty", "orders.>").close()
    assert run("dlq", *command, path, "--subscription", "empty").err == ""
    dead_lettered.delete_subscription("billing")  # its dead letters stay
    assert "no subscription" not in run("dlq", *command, path, "--subscription", "billing").err


def test_show(run, dead_lettered, path: Path):
    shown = run("dlq", "show", path, 2).out
    assert "max_attempts" in shown
    assert '{"order":2}' in shown
    assert run("dlq", "show", path, 1, "--json").json["message"]["data"] == {"order": 1}
    assert run("dlq", "show", path, 9).code == 2
    assert run("dlq", "show", path, "x").code == 2


def test_stats(run, dead_lettered, path: Path):
    assert run("dlq", "stats", path).out.startswith("3 dead letters, 0 being redriven\n")
    found = run("dlq", "stats", path, "--json").json
    assert found["by_reason"] == {"rejected": 2, "max_attempts": 1}
    assert found["by_subscription"] == {"billing": 2, "notes": 1}


def test_redrive(run, dead_lettered, path: Path):
    assert run("dlq", "redrive", path).code == 2  # --all is required
    assert run("dlq", "redrive", path, 1, "--json").json == {"redriven": 1, "failed": {}}
    with dead_lettered.subscribe("billing", "orders.>") as billing:
        [message] = billing.fetch(10)
        assert message.data == {"order": 1}
        message.ack()
    assert ids(run("dlq", path, "--json")) == [2, 3]
    assert run("dlq", "redrive", path, "--all", "--to-topic", "again").out == "2 dead letters redriven\n"
    assert dead_lettered.topic_max_seq("again") > 0
    assert run("dlq", path).out == "no dead letters\n"


def test_a_dry_run_changes_nothing(run, dead_lettered, path: Path):
    assert run("dlq", "redrive", path, "--all", "--dry-run").out == "3 dead letters would be redriven\n"
    assert run("dlq", "purge", path, "--reason", "rejected", "--dry-run").out == "would delete 2 dead letters\n"
    dead_lettered.delete_subscription("notes")
    result = run("dlq", "redrive", path, 3, "--dry-run")
    assert (result.code, result.out) == (1, "0 dead letters would be redriven\n")
    assert result.err == "dead letter 3 would stay: subscription 'notes' is gone\n"
    assert [letter["redrives"] for letter in run("dlq", path, "--json").items] == [0, 0, 0]


def test_redrive_that_fails_is_a_finding(run, dead_lettered, path: Path):
    dead_lettered.delete_subscription("notes")
    result = run("dlq", "redrive", path, "--all")
    assert (result.code, result.out) == (1, "2 dead letters redriven\n")
    assert result.err == "dead letter 3 stays: subscription 'notes' is gone\n"


def test_purge(run, dead_lettered, path: Path):
    assert run("dlq", "purge", path).code == 2
    assert run("dlq", "purge", path, "--reason", "rejected", "--yes").out == "deleted 2 dead letters\n"
    assert run("dlq", "purge", path, "--all", "-y", "--json").json == {"purged": 1}


def test_export_and_import(run, dead_lettered, path: Path, tmp_path: Path):
    file = tmp_path / "letters.jsonl"
    to_stdout = run("dlq", "export", path, "--subscription", "billing")
    assert [letter["message"]["seq"] for letter in to_stdout.json_lines] == [1, 2]
    assert run("dlq", "export", path, "--out", file).err == f"3 dead letters in {file}\n"
    run("dlq", "purge", path, "--all", "--yes")
    assert run("dlq", "import", path, file, "--json").json == {"imported": 3}
    assert run("dlq", path, "--json").items[0]["error"] == "no such customer"
    file.write_text(file.read_text() + "{}\n")
    bad = run("dlq", "import", path, file)
    assert bad.code == 2
    assert "line 4" in bad.err
    assert len(run("dlq", path, "--json").items) == 3
    assert run("dlq", "import", path, tmp_path / "missing").code == 2
    assert run("dlq", "export", path, "--out", tmp_path / "no" / "where").code == 2
