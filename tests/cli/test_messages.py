"""`headwater publish`, `subscribe` and `tail`."""

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

import headwater
from headwater.cli.arguments import parse_start
from headwater.errors import InvalidOptionError


def messages_of(path: Path) -> list[headwater.Message]:
    with headwater.open(path) as log:
        return [each.message for each in log.subscribe("t", ">", mode="ephemeral", start="first").messages()]


def test_one_message(run, path: Path):
    result = run("publish", path, "orders.new", '{"order": 17}')
    assert (result.code, result.out) == (0, "1  orders.new\n")
    assert result.err == f"made a new log: {path}\n"
    assert run("publish", path, "orders.new", "2", "--json").json == {
        "seq": 2,
        "topic": "orders.new",
        "duplicate": False,
    }
    assert [message.data for message in messages_of(path)] == [{"order": 17}, 2]


def test_all_options(run, path: Path):
    headers = ("--from", "a", "--to", "b", "--reply-to", "c", "--correlation-id", "d", "--type", "e")
    options = ("--id", "i1", *headers, "--priority", 3, "--delay", "1h", "--ttl", "2h")
    assert run("publish", path, "orders.new", "hello", "--text", *options, "-H", "x=1", "-H", "y=a=b").code == 0
    [message] = messages_of(path)
    assert (message.id, message.from_, message.to, message.reply_to) == ("i1", "a", "b", "c")
    assert (message.correlation_id, message.type, message.priority) == ("d", "e", 3)
    assert (message.headers, message.data) == ({"x": "1", "y": "a=b"}, "hello")
    assert message.expires_ms - message.deliver_ms == 3_600_000
    assert 3_500_000 < message.deliver_ms - message.published_ms < 3_700_000


def test_the_same_id_is_stored_once(run, path: Path):
    first = run("publish", path, "orders.new", "1", "--id", "a")
    again = run("publish", path, "orders.new", "1", "--id", "a")
    assert (first.out, again.out) == ("1  orders.new\n", "1  orders.new  was published before with this id\n")
    assert run("publish", path, "orders.new", "1", "--id", "a", "--json").json["duplicate"] is True


def test_what_is_refused(run, path: Path):
    for arguments, why in [
        (("orders.new", "{order}"), "DATA is not JSON"),
        (("orders.*", "1"), "kept for patterns"),
        (("orders.new", "1", "--delay", "10"), "must be a duration"),
        (("orders.new", "1", "-H", "x"), "a header is NAME=VALUE"),
        (("orders.new", "1", "--file", "x"), "exclude each other"),
        (("orders.new", "1", "--topic", "x"), "given twice"),
        (("orders.new", "--file", "missing.jsonl"), "cannot be read"),
    ]:
        result = run("publish", path, *arguments)
        assert result.code == 2, arguments
        assert why in result.err
    assert not path.exists() or messages_of(path) == []


def test_lines_that_say_their_topic(run, path: Path, tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    lines = [
        {"topic": "a.b", "data": 1, "from": "x", "headers": {"k": 1}, "ttl": "1h", "delay": 5},
        {"topic": "a.c", "data": None, "deliver_at": "2030-01-01T00:00:00Z", "expires_at": None},
        {"topic": "a.d", "data": 3, "id": "one"},
        {"topic": "a.d", "data": 3, "id": "one"},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    result = run("publish", path, "--file", file, "--type", "t", "--json")
    assert result.json == {"published": 3, "duplicates": 1, "first_seq": 1, "last_seq": 3, "lines": 7}
    first, second, _ = messages_of(path)
    assert (first.data, first.from_, first.headers, first.type) == (1, "x", {"k": 1}, "t")
    assert first.expires_ms - first.deliver_ms == 3_595_000
    assert (second.data, second.deliver_at.year) == (None, 2030)


def test_a_bad_line_is_named_and_all_before_it_is_published(run, path: Path, tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    for bad, why in [
        ("{oops", "not JSON"),
        ("[1]", "not an object with topic and data"),
        ('{"topic": "a..b", "data": 1}', "token is empty"),
        ('{"topic": "a.b", "data": 1, "colour": "red"}', "unknown publish option 'colour'"),
        ('{"topic": "a.b", "data": 1, "ttl": "soon"}', "must be a duration"),
    ]:
        path.unlink(missing_ok=True)
        good = ['{"topic": "a.b", "data": 1}'] * 1_700
        file.write_text("\n".join([*good[:1_500], bad, *good[1_500:]]))
        result = run("publish", path, "--file", file)
        assert result.code == 2
        assert result.err.splitlines()[1].startswith("error: line 1501: ")
        assert why in result.err
        assert "Published before it: 1,500 messages" in result.err
        assert len(messages_of(path)) == 1_500


def test_lines_from_a_pipe_with_a_topic(finish, path: Path):
    result = finish("publish", path, "numbers", input="".join(f"{number}\n" for number in range(2_500)))
    assert (result.code, result.out) == (0, "published 2,500 messages  seq 1 to 2500\n")
    assert [message.data for message in messages_of(path)] == list(range(2_500))


def test_a_slow_sender_waits_for_no_full_batch(start, path: Path):
    with headwater.open(path) as log, log.subscribe("t", ">", mode="ephemeral") as reader:
        sender = start("publish", path, "--topic", "slow", stdin=subprocess.PIPE)
        for number in (1, 2):
            sender.stdin.write(f"{number}\n")
            sender.stdin.flush()
            assert [message.data for message in reader.fetch(1, timeout=20)] == [number]
        sender.stdin.write("3")  # without a newline at the end
        out, _ = sender.communicate(timeout=20)
        assert (sender.returncode, out) == (0, "published 3 messages  seq 1 to 3\n")


def test_a_log_is_copied_by_a_pipe(run, finish, log, path: Path, tmp_path: Path):
    log.publish("orders.late", 4, delay=3600, id="mine")
    copied = run("tail", path, "--start", "first", "--json").out
    assert finish("publish", tmp_path / "copy.db", input=copied).code == 0
    copies, originals = messages_of(tmp_path / "copy.db"), messages_of(path)
    assert [each.to_json() | {"published_at": 0} for each in copies] == [
        each.to_json() | {"published_at": 0} for each in originals
    ]


def test_an_interrupt_tells_how_far_it_came(start, path: Path):
    with headwater.open(path) as log, log.subscribe("t", ">", mode="ephemeral") as reader:
        sender = start("publish", path, "--topic", "slow", stdin=subprocess.PIPE)
        sender.stdin.write("1\n")
        sender.stdin.flush()
        assert len(reader.fetch(1, timeout=20)) == 1
        sender.send_signal(signal.SIGINT)
        assert sender.wait(timeout=20) == 130
        assert sender.stdout.read() == "published 1 message  seq 1 to 1\n"
        assert "interrupted after line 1" in sender.stderr.read()


# --- subscribe and tail -----------------------------------------------------------------------------------------------


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
    assert wanted("c", "--start", "3") == [3, 4]
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
    assert seqs(run("tail", path, "--start", "first", "--json")) == [1, 2, 3, 4]
    assert seqs(run("tail", path, "--start", "3", "--json")) == [3, 4]
    assert seqs(run("tail", path, "--start", "-1h", "-n", 1, "--json")) == [4]
    assert seqs(run("tail", path, "--start", "2099-01-01", "--json")) == []
    assert run("tail", path, "--start", "sometime").code == 2


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
            f"{sys.executable} -m headwater tail {path} --start first {options} | head -n 1; echo ${{PIPESTATUS[0]}}"
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        first, code = done.stdout.splitlines()
        assert (code, done.stderr) == ("0", "")
        assert "xxx" in first


# --- where to begin -------------------------------------------------------------------------------------------------


def test_a_start_is_first_new_a_seq_or_a_time():
    found = [parse_start(text) for text in ("first", "new", "17", "0", "2026-07-29T12:00Z")]
    assert found == ["first", "new", 17, 0, datetime(2026, 7, 29, 12, tzinfo=UTC)]
    with pytest.raises(InvalidOptionError, match="--start is not a position: 'soon'"):
        parse_start("soon", "--start")
