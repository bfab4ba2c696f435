"""`headwater topics`, `subscriptions`, `lag`, `stats`, `top`."""

import os
import socket
from pathlib import Path

import pytest

import headwater
from headwater.cli.inspect import Sample, rates


@pytest.fixture
def billing(log: headwater.Log) -> headwater.Log:
    """The log with a subscription that has acked one of its three messages."""
    with log.subscribe("billing", "orders.>") as subscription:
        [message] = subscription.fetch(1)
        message.ack()
    return log


def test_topics(run, log, path: Path):
    lines = run("topics", path).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["notes.made", "1"], ["orders.new", "3"]]
    [orders] = run("topics", path, "orders.>", "--json").items
    assert (orders["topic"], orders["messages"], orders["last_seq"]) == ("orders.new", 3, 3)
    assert run("topics", path, "none.>").out == "no topics match none.>\n"
    assert run("topics", path, "a..b").code == 2


def test_subscriptions(run, billing, path: Path):
    assert run("subscriptions", path).out.splitlines()[1].split()[:5] == ["billing", "orders.>", "exclusive", "1", "2"]
    [info] = run("subscriptions", "--json", path).items
    assert (info["id"], info["lag"], info["acked"], info["holder"]) == ("billing", 2, 1, None)
    with billing.subscribe("billing", "orders.>"):
        assert run("subscriptions", "ls", path, "--json").items[0]["holder"]


def test_names_with_brackets_are_shown_as_they_are(run, log, path: Path):
    log.publish("odd.[red]", 1)
    assert "odd.[red]" in run("topics", path).out


def test_seek(run, billing, path: Path):
    assert run("subscriptions", "seek", path, "billing", "3").out == "billing begins after seq 2; 1 message to come\n"
    back = run("subscriptions", "seek", path, "billing", "-1h", "--json")
    assert back.json == {"id": "billing", "position": 0, "lag": 3}
    assert run("subscriptions", "seek", path, "billing", "--start", "3", "--json").json["position"] == 2
    assert run("subscriptions", "seek", path, "billing").code == 2
    assert run("subscriptions", "seek", path, "billing", "3", "--start", "3").code == 2
    assert run("subscriptions", "seek", path, "nobody", "first").code == 2
    assert run("subscriptions", "pause", path, "billing").out.startswith("paused billing; deliver again with: ")
    assert "paused since" in run("subscriptions", path).out
    assert run("subscriptions", "resume", path, "billing", "--json").json == {"resumed": "billing", "lag": 1}
    assert "paused since" not in run("subscriptions", path).out
    assert run("subscriptions", "pause", path, "nobody").code == 2
    assert run("subscriptions", "seek", path, "billing", "somewhere").code == 2
    with billing.subscribe("billing", "orders.>"):
        assert run("subscriptions", "seek", path, "billing", "first").code == 3


def test_rm(run, billing, path: Path):
    assert run("subscriptions", "rm", path, "billing", "--json").json == {"removed": "billing"}
    assert run("subscriptions", path, "--json").json == {"items": []}
    assert run("subscriptions", "rm", path, "billing").code == 2


def test_lag(run, billing, path: Path):
    heading, shown = run("lag", path).out.splitlines()
    assert shown.split()[:2] == ["billing", "2"]
    assert heading.split()[-1] == "position", "the last seq of the log may belong to another topic"
    found = run("lag", path, "billing", "--json").json
    assert (found["last_seq"], found["items"][0]["lag"]) == (4, 2)
    assert run("lag", path, "nobody").code == 2


def test_lag_is_an_alarm(run, billing, path: Path):
    assert run("lag", path, "--max", 2, "--max-age", "1h").code == 0
    late = run("lag", path, "--max", 1)
    assert (late.code, late.err) == (1, "too far behind: billing\n")
    assert run("lag", path, "--max-age", "long").code == 2


def test_stats(run, billing, path: Path):
    assert "4 of 40 B in 2 topics" in run("stats", path).out
    found = run("stats", path, "--json").json
    assert (found["messages"], found["last_seq"], found["dead_letters"]) == (4, 4, 0)
    assert [topic["topic"] for topic in found["topics"]] == ["notes.made", "orders.new"]
    assert found["subscriptions"][0]["id"] == "billing"
    assert found["file_bytes"] > 0


def test_top_once(run, billing, path: Path):
    lines = run("top", path, "--once", "-i", 0.1).out.splitlines()
    assert lines[0].startswith("events.db   0/s in   4 messages")
    assert any(line.split()[:3] == ["billing", "0/s", "2"] for line in lines)
    found = run("top", path, "--once", "-i", 0.1, "--json").json
    assert found["subscriptions"][0]["acked_per_second"] == 0


def test_top_streams_json_until_it_is_ended(start, log, path: Path):
    process = start("top", path, "--json", "-i", 0.1)
    assert process.stdout.readline().startswith('{"seconds":')
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")


def test_rates(log):
    before = Sample(0.0, log.statistics())
    log.publish_many([("orders.new", 1)] * 20)
    log.publish("fresh", 1)
    with log.subscribe("billing", ">") as subscription:
        subscription.ack_many(subscription.fetch(6))
    found = rates(before, Sample(2.0, log.statistics()))
    assert found.published == 10.5
    assert found.topics == {"orders.new": 10.0, "fresh": 0.5, "notes.made": 0.0}
    assert found.acked == {"billing": 3.0}


def test_a_shared_subscription_shows_its_consumers(run, log, path: Path):
    with log.subscribe("work", "orders.>", mode="shared"), log.subscribe("work", "orders.>", mode="shared"):
        [info] = run("subscriptions", path, "--json").items
        assert (info["holder"], len(info["consumers"])) == (None, 2)
        assert (
            run("subscriptions", path)
            .out.splitlines()[1]
            .endswith(f"  2 consumers: {socket.gethostname()}:{os.getpid()}")
        )
        assert "1, 1 held" in run("stats", path).out
    assert "free since" in run("subscriptions", path).out
