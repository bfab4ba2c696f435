"""Every command that takes a LOG takes a server: against a real `headwater serve`."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import trustme
from server_program import free_port

import headwater
from headwater.cli import arguments


@pytest.fixture
def url(server) -> str:
    return server.url


@pytest.fixture
def file(server) -> Path:
    """The same log, for this process to look at beside the server."""
    return Path(server.first["log"])


def seqs(result) -> list[int]:
    return [line["seq"] for line in result.json_lines]


# --- use ------------------------------------------------------------------------------------------------------------


def test_publish_tail_and_subscribe(run, finish, url: str):
    one = run("publish", url, "used.one", '{"order": 1}', "--from", "shop", "--json").json
    assert (one["topic"], one["duplicate"]) == ("used.one", False)
    lines = "".join(json.dumps({"order": number}) + "\n" for number in range(2, 12))
    assert finish("publish", url, "used.many", input=lines).out.startswith("published 10 messages  seq ")
    assert [line["data"]["order"] for line in run("tail", url, "used.>", "--json").json_lines] == list(range(2, 12))
    assert 'used.one  {"order":1}  from=shop' in run("tail", url, "used.one").out
    taken = run("subscribe", url, "used", "used.>", "--count", 3, "--json")
    assert [line["data"]["order"] for line in taken.json_lines] == [1, 2, 3]
    rest = run("subscribe", url, "used", "used.>", "--no-follow", "--batch", 4, "--json")
    assert [line["data"]["order"] for line in rest.json_lines] == list(range(4, 12))
    [info] = run("lag", url, "used", "--json").items
    assert (info["lag"], info["acked"]) == (0, 11)


def test_a_batch_larger_than_a_frame_goes_in_parts(finish, url: str):
    lines = "".join(json.dumps({"fill": "x" * 50_000}) + "\n" for _ in range(150))  # 7.5 MB; a frame takes 4
    assert finish("publish", url, "large", input=lines).out.startswith("published 150 messages")


def test_a_copy_goes_through_a_pipe_from_server_to_file(run, finish, url: str, path: Path):
    run("publish", url, "copied.a", '{"n": 1}', "--type", "number")
    copied = run("tail", url, "copied.>", "--start", "first", "--json").out
    finish("publish", path, input=copied)
    with headwater.open(path) as log, log.subscribe("all", ">") as subscription:
        [message] = subscription.fetch()
        assert (message.topic, message.data, message.type) == ("copied.a", {"n": 1}, "number")


def test_following_goes_on_when_the_server_comes_back(serve, start):
    served = serve()
    port = served.url.rpartition(":")[2]
    follower = start("subscribe", served.url, "billing", "orders.>")
    with headwater.open(served.url) as log:
        log.publish("orders.new", 1)
        assert "orders.new  1" in follower.stdout.readline()
    served.stop()
    assert follower.stderr.readline() == f"lost {served.url}; trying again\n"
    again = serve("--port", port)
    assert follower.stderr.readline() == f"connected again to {served.url}\n"
    with headwater.open(again.url) as log:
        log.publish("orders.new", 2)
        assert "orders.new  2" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.communicate(timeout=20) == ("", "")
        assert follower.returncode == 130
        info = log.subscription("billing")
        assert (info.holder, info.lag) == (None, 0)


# --- look -----------------------------------------------------------------------------------------------------------

LOOKING = (
    ["topics", "LOG", "looked.>"],
    ["topics", "LOG", "looked.>", "--json"],
    ["subscriptions", "LOG"],
    ["subscriptions", "ls", "LOG", "--json"],
    ["lag", "LOG", "looker"],
    ["lag", "LOG", "looker", "--max", "0"],
    ["tail", "LOG", "looked.>"],
    ["tail", "LOG", "looked.>", "--start", "-1h", "--json"],
    ["dlq", "LOG", "-s", "looker"],
    ["dlq", "ls", "LOG", "-s", "looker", "--json"],
    ["dlq", "stats", "LOG", "-s", "looker"],
    ["dlq", "export", "LOG", "-s", "looker"],
    ["retention", "LOG"],
    ["subscriptions", "seek", "LOG", "nobody", "first"],
)


@pytest.fixture(scope="module")
def looked_at(server):
    """Three messages; a subscription that has acked one, rejected one and not seen one."""
    with headwater.open(server.url) as log:
        log.publish_many([("looked.at", {"n": 1}), ("looked.at", {"n": 2}), ("looked.away", {"n": 3})])
        with log.subscribe("looker", "looked.>") as subscription:
            first, second = subscription.fetch(2)
            first.ack()
            second.reject("did not like it")
        log.retain("looked.old.>", max_age=3600)


def words(out: str) -> list[list[str]]:
    """What was printed, without how long the oldest message has waited: that goes on."""
    return [re.sub(r'(?<="oldest_unacked_s": )[\d.]+|[\d.]+ s\b', "so long", line).split() for line in out.splitlines()]


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_a_server_is_looked_at_like_a_file(run, looked_at, url: str, file: Path, command):
    there = run(*(url if word == "LOG" else word for word in command), "--token", "any")
    here = run(*(file if word == "LOG" else word for word in command))
    assert (there.code, there.err, words(there.out)) == (here.code, here.err, words(here.out))
    assert there.out + there.err


def test_stats(run, looked_at, url: str, file: Path):
    there, here = run("stats", url, "--json").json, run("stats", file, "--json").json
    assert there["path"] == url
    assert here.keys() - there.keys() == {"file_bytes", "wal_bytes"}
    assert there["topics"] == here["topics"]
    shown = run("stats", url).out
    assert shown.splitlines()[0].split() == ["log", url]
    assert "on disk" not in shown


def test_top(run, looked_at, url: str):
    assert run("top", url, "--once", "-i", 0.1).out.startswith(f"{url}   0/s in   ")
    [looker] = [
        each for each in run("top", url, "--once", "-i", 0.1, "--json").json["subscriptions"] if each["id"] == "looker"
    ]
    assert looker["lag"] == 1


# --- keep -----------------------------------------------------------------------------------------------------------


def test_dead_letters(run, url: str, tmp_path: Path):
    with headwater.open(url) as log:
        log.publish("died", {"n": 1})
        with log.subscribe("undertaker", "died") as subscription:
            subscription.fetch()[0].reject("no use")
    [letter] = run("dlq", "--token", "any", url, "-s", "undertaker", "--json").items
    assert "no use" in run("dlq", "show", url, letter["id"]).out
    run("dlq", "export", url, "-s", "undertaker", "-o", tmp_path / "letters")
    assert run("dlq", "redrive", url, letter["id"]).out == "1 dead letter redriven\n"
    [again] = run("subscribe", url, "undertaker", "died", "--no-follow", "--json").json_lines
    assert again["data"] == {"n": 1}
    assert run("dlq", url, "-s", "undertaker").out == "no dead letters\n"
    assert run("dlq", "import", url, tmp_path / "letters").out == "imported 1 dead letter\n"
    assert run("dlq", "purge", url, "-s", "undertaker", "--yes").out == "deleted 1 dead letter\n"


def test_doctor(run, url: str, file: Path):
    found = run("doctor", url, "--json")
    assert found.code == 0
    levels = {finding["check"]: finding["level"] for finding in found.items}
    assert (levels["server"], levels["environment"], levels["integrity"], levels["writing"]) == (
        "ok",
        "note",
        "ok",
        "ok",
    )
    shown = run("doctor", url).out
    assert f"ready, with Headwater {headwater.__version__}" in shown
    assert f"On its machine: headwater doctor {file}" in shown


def test_doctor_of_a_log_in_memory(serve, run):
    assert "in the server's memory: gone when the server stops" in run("doctor", serve(log="memory:").url).out


def test_bench_through_a_server(run, tmp_path: Path, url: str):
    result = run("bench", tmp_path, "--seconds", 0.7, "--server", "--json")
    assert result.json["through_server"] is True
    assert all(each["per_second"] > 0 for each in result.items)
    assert list(tmp_path.iterdir()) == []
    refused = run("bench", url)
    assert refused.code == 2
    assert "this would fill a log that others use" in refused.err


# --- getting in -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path, run) -> tuple[Path, str]:
    file = tmp_path / "headwater.tokens"
    made = run("token", "create", "--tokens", file, "--publish", "orders.>", "--read", "orders.>")
    return file, made.out.strip()


def test_a_token_opens_the_door(serve, run, tokens, monkeypatch):
    file, token = tokens
    url = serve("--tokens", file).url
    stranger = run("publish", url, "orders.new", "1")
    assert (stranger.code, stranger.out) == (3, "")
    assert stranger.err.splitlines() == [
        f"error: {url}: this server requires a token",
        "next: Pass --token, or set HEADWATER_TOKEN; on the server's machine, headwater token create makes one",
    ]
    assert "the token is unknown or expired" in run("topics", url, "--token", "hw_wrong").err
    assert run("publish", url, "orders.new", "1", "--token", token).code == 0
    monkeypatch.setenv("HEADWATER_TOKEN", token)
    assert seqs(run("tail", url, "orders.>", "--json")) == [1]
    not_allowed = run("publish", url, "secrets", "1")
    assert (not_allowed.code, "no publish right" in not_allowed.err) == (3, True)
    not_seen = run("tail", url, "secrets.>")
    assert (not_seen.code, "no read right" in not_seen.err, "no topic matches" in not_seen.err) == (3, True, False)
    assert "orders.new" in run("topics", url).out
    assert run("subscriptions", url).code == 3  # it may neither consume nor manage


def test_publishing_needs_the_right_to_publish_only(serve, run, finish, tmp_path: Path, monkeypatch):
    file, lines = tmp_path / "headwater.tokens", tmp_path / "orders.jsonl"
    token = run("token", "create", "--tokens", file, "--publish", "orders.>").out.strip()
    monkeypatch.setenv("HEADWATER_TOKEN", token)
    url = serve("--tokens", file).url
    one = ("publish", url, "orders.new", "1")
    assert run(*one).out == "1  orders.new\n"
    assert run(*one, "--id", "the-one").out == "2  orders.new\n"
    assert run(*one, "--id", "the-one").out == "2  orders.new  was published before with this id\n"
    assert run(*one, "--id", "the-one", "--json").json["duplicate"] is True
    lines.write_text("".join(f'{{"topic": "orders.new", "data": 1, "id": "{id}"}}\n' for id in ("a", "the-one", "a")))
    tally = finish("publish", url, "--json", input=lines.read_text()).json
    assert tally == {"published": 1, "duplicates": 2, "first_seq": 3, "last_seq": 3, "lines": 3}
    assert run("publish", url, "--file", lines).out == "published 0 messages  3 ids known before\n"
    assert finish("publish", url, "orders.new", input="1\n2\n").out == "published 2 messages  seq 4 to 5\n"


def test_wss_with_a_certificate_of_our_own(serve, run, tmp_path: Path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    url = serve("--host", "localhost", "--tls-certificate", tmp_path / "server.pem").url
    assert url.startswith("wss://localhost:")
    assert run("publish", url, "a", "1", "--ca", tmp_path / "ca.pem").out == "1  a\n"
    refused = run("publish", url, "a", "1")
    assert refused.code == 3
    assert "its certificate is not trusted" in refused.err
    assert "--ca FILE" in refused.err


@pytest.mark.parametrize(
    "command",
    [["publish", "LOG", "a", "1"], ["tail", "LOG", "-f"], ["topics", "LOG"], ["doctor", "LOG"], ["top", "LOG"]],
    ids=" ".join,
)
def test_no_server_there(run, command, monkeypatch):
    monkeypatch.setattr(arguments, "CONNECT_S_MAX", 0.3)
    url = f"ws://127.0.0.1:{free_port()}"
    result = run(*(url if word == "LOG" else word for word in command))
    assert (result.code, result.out) == (3, "")
    assert result.err.splitlines() == [
        f"error: {url}: connection refused",
        "next: Is the server running? headwater serve LOG",
    ]


def test_an_unreachable_server_is_given_up_on_soon(run, monkeypatch):
    assert arguments.CONNECT_S_MAX <= 3
    monkeypatch.setattr(arguments, "CONNECT_S_MAX", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        began = time.monotonic()
        result = run("topics", f"ws://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 20
    assert result.code == 3
    assert len(result.err.splitlines()) == 2
    nowhere = run("topics", "ws://nowhere.invalid:1")
    assert (nowhere.code, "the host is unknown" in nowhere.err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["topics", "http://localhost:8765"], "next: Did you mean ws://localhost:8765?"),
        (["topics", "https://localhost:8765/x"], "next: Did you mean wss://localhost:8765/x?"),
        (["topics", "events.db", "--token", "x"], "error: --token is for a server, and events.db is a file"),
        (["topics", "events.db", "--ca", "x"], "error: --ca is for a server, and events.db is a file"),
        (["topics", "ws://localhost:port"], "next: Write ws://host:8765"),
        (["topics", "wss://localhost:1", "--ca", "none.pem"], "error: none.pem: the certificates cannot be read"),
    ],
)
def test_addresses_that_cannot_be_used(run, arguments, output):
    result = run(*arguments)
    assert result.code == 2
    assert output in result.err


def test_a_token_that_manages_some_topics_handles_their_dead_letters(serve, run, tmp_path: Path):
    file = tmp_path / "headwater.tokens"
    every, some = (
        run("token", "create", "--tokens", file, *rights).out.strip()
        for rights in (("--publish", ">", "--read", ">", "--consume", "*", "--manage", ">"), ("--manage", "orders.>"))
    )
    url = serve("--tokens", file).url
    with headwater.open(url, token=every) as log:
        log.publish("orders.new", 1)
        with log.subscribe("billing", "orders.>") as billing:
            billing.fetch()[0].reject()
    of_orders = (url, "--topic", "orders.>", "--subscription", "billing", "--token", some)
    listed = run("dlq", *of_orders, "--json")
    assert ([letter["id"] for letter in listed.items], listed.err) == ([1], "")
    redriven = run("dlq", "redrive", *of_orders, 1)
    assert (redriven.out, redriven.err) == ("1 dead letter redriven\n", "")
    assert "there is no subscription 'biling'" in run("dlq", *of_orders, "--subscription", "biling").err
