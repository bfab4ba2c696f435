"""`headwater subscribe` and `headwater tail`."""

import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

import headwater


def seqs(result) -> list[int]:
    return [line["seq"] for line in result.json_lines]


# --- subscribe ------------------------------------------------------------------------------------------------------


def test_subscribe_acks_what_it_prints_and_goes_on_after_it(run, log, path: Path):
    first = run("subscribe", path, "billing", "orders.>", "--count", 2, "--no-follow", "--json")
    assert (first.code, seqs(first)) == (0, [1, 2])
    rest = run("subscribe", path, "billing", "orders.>", "--no-follow")
    assert [line.split()[0] for line in rest.out.splitlines()] == ["3"]
    assert 'orders.new  {"order":3}  from=shop type=order' in rest.out
    assert log.subscription("billing").lag == 0


def test_no_ack_gives_all_back(run, log, path: Path):
    assert seqs(run("subscribe", path, "billing", "orders.>", "--no-follow", "--no-ack", "--json")) == [1, 2, 3]
    again = run("subscribe", path, "billing", "orders.>", "--no-follow", "--json")
    assert [(line["seq"], line["attempt"]) for line in again.json_lines] == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("batch", [1, 100])
def test_filters_start_mode_and_batch(run, log, path: Path, batch: int):
    def wanted(id, *options):
        return seqs(run("subscribe", path, id, ">", "--no-follow", "--json", "--batch", batch, *options))

    assert wanted("a", "--from", "shop") == [1, 2, 3]
    assert wanted("b", "--where", "data.order >= 2") == [2, 3]
    assert wanted("c", "--start", "3") == [4]
    assert wanted("d", "--start", "new") == []
    assert wanted("e", "--start", "-1h", "--mode", "shared") == [1, 2, 3, 4]
    assert {info.lag for info in log.subscriptions()} == {0}


def test_subscribe_refuses(run, log, path: Path):
    with log.subscribe("held", "orders.>"):
        result = run("subscribe", path, "held", "orders.>", "--no-follow")
        assert result.code == 3
        assert "already active" in result.err
    assert run("subscribe", path, "held", "notes.>", "--no-follow").code == 2
    assert run("subscribe", path, "x", "a.>.b", "--no-follow").code == 2
    assert run("subscribe", path, "x", ">", "--where", "data =", "--no-follow").code == 2
    assert run("subscribe", path, "x", ">", "--start", "yesterday", "--no-follow").code == 2
    assert run("subscribe", path, "x", ">", "--mode", "ephemeral").code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start, log, path: Path, number: int):
    process = start("subscribe", path, "billing", "orders.>")
    lines = [process.stdout.readline() for _ in range(3)]
    log.publish("orders.new", {"order": 4})
    lines.append(process.stdout.readline())
    assert '{"order":4}' in lines[-1]
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")
    info = log.subscription("billing")
    assert (info.holder, info.lag) == (None, 0)


# --- tail -----------------------------------------------------------------------------------------------------------


def test_tail_shows_the_last_and_keeps_nothing(run, log, path: Path):
    log.publish_many([("n", number) for number in range(5, 1_001)])
    assert seqs(run("tail", path, "--json")) == list(range(991, 1_001))
    assert seqs(run("tail", path, "-n", 2, "--json")) == [999, 1_000]
    assert seqs(run("tail", path, "-n", 2, "orders.>", "--json")) == [2, 3]
    assert seqs(run("tail", path, "orders.>", "--where", "data.order == 1", "--json")) == [1]
    assert run("tail", path, "-n", 0).out == ""
    assert log.subscriptions() == []


def test_tail_from(run, log, path: Path):
    assert seqs(run("tail", path, "--from", "first", "--json")) == [1, 2, 3, 4]
    assert seqs(run("tail", path, "--from", "3", "--json")) == [3, 4]
    assert seqs(run("tail", path, "--from", "-1h", "-n", 1, "--json")) == [4]
    assert seqs(run("tail", path, "--from", "2099-01-01", "--json")) == []
    assert run("tail", path, "--from", "sometime").code == 2


def test_tail_follows(start, log, path: Path):
    process = start("tail", path, "orders.>", "-n", 1, "-f")
    assert '{"order":3}' in process.stdout.readline()
    log.publish("orders.new", {"order": 4})
    assert '{"order":4}' in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


def test_tail_shows_data_that_cannot_be_read_and_sends_no_control_characters(run, log, path: Path):
    log.publish("odd", "\x9b2J")
    hand_made = apsw.Connection(str(path))
    hand_made.execute("INSERT INTO messages (topic, data) VALUES ('odd', ?)", ('"\\ud800"',))
    hand_made.close()
    assert '"\\x9b2J"' in run("tail", path).out
    found = run("tail", path, "-n", 1, "--json").json
    assert found["data"] == '"\\ud800"'  # as text, for it is no JSON that could be shown as such


def test_a_reader_that_has_had_enough_is_no_error(path: Path):
    with headwater.open(path) as log:
        log.publish_many([("n", "x" * 200)] * 5_000)
    for options in ("", "--json"):
        command = (
            f"{sys.executable} -m headwater tail {path} --from first {options} | head -n 1; echo ${{PIPESTATUS[0]}}"
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        first, code = done.stdout.splitlines()
        assert (code, done.stderr) == ("0", "")
        assert "xxx" in first
