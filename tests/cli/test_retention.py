"""`headwater retention`."""

from pathlib import Path


def test_set_ls_run_rm(run, log, path: Path):
    assert run("retention", path).out.startswith("no policies: everything stays.")
    limits = ("--max-age", "7d", "--max-count", 1, "--max-bytes", "2GB")
    rule = run("retention", "set", path, "orders.>", *limits, "--json").json
    assert rule == {
        "pattern": "orders.>",
        "dialect": "nats",
        "max_age_s": 604_800.0,
        "max_count": 1,
        "max_bytes": 2_000_000_000,
        "keep_unacked": False,
    }
    assert run("retention", "ls", path, "--json").items == [rule]
    assert run("retention", path).out.splitlines()[1].split() == [
        "orders.>",
        "7",
        "d",
        "1",
        "1.86",
        "GiB",
        "goes",
        "too",
    ]
    assert run("retention", "run", path).out == "deleted 2 messages\n  2 under orders.>\n"
    assert run("retention", "run", path, "--json").json["pruned"] == {}
    assert {topic.topic: topic.count for topic in log.topics()}["orders.new"] == 1
    assert run("retention", "rm", path, "orders.>").code == 0
    assert run("retention", "rm", path, "orders.>").code == 2


def test_what_is_refused(run, log, path: Path):
    assert "without a limit" in run("retention", "set", path, "orders.>").err
    assert run("retention", "set", path, "orders..", "--max-count", 1).code == 2
    assert run("retention", "set", path, "orders.>", "--max-age", "7").code == 2
    assert run("retention", "set", path, "orders.>", "--max-bytes", "much").code == 2
