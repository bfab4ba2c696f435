"""One grammar for all commands: LOG and its default, one meaning a flag, one shape of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater.cli import hints
from headwater.cli.arguments import Command, default_lake, default_log
from headwater.cli.commands import TARGETS, load_command
from headwater.errors import InvalidConfigurationError
from headwater.ports.clock import SystemClock
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention


def commands(name: str | None = None, found: Any = None) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name."""
    if found is None:
        for each in TARGETS:
            yield from commands(each, load_command(each))
    elif hasattr(found, "commands"):
        for word, each in found.commands.items():
            yield from commands(f"{name} {word}", each)
    else:
        assert name is not None
        yield name, found


ALL = dict(commands())


def options(command: Any) -> Iterator[tuple[str, Any]]:
    for each in command.params:
        if each.param_type_name == "option":
            yield from ((spelling, each) for spelling in each.opts)


# --- the tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_json(name: str) -> None:
    assert "--json" in dict(options(ALL[name]))


@pytest.mark.parametrize("name", ALL)
def test_flags_are_in_kebab_case_and_the_seeds_camel_case_is_understood(name: str) -> None:
    command = ALL[name]
    assert isinstance(command, Command)
    for flag, _ in options(command):
        assert re.fullmatch(r"--[a-z]+(-[a-z]+)*|-[a-zA-Z]", flag), flag
        camel = re.sub("(?<=[a-z])-([a-z])", lambda found: found[1].upper(), flag)
        assert command.in_our_spelling([camel, f"{camel}=x", "--", camel]) == [flag, f"{flag}=x", "--", camel]


def test_a_short_flag_means_one_thing() -> None:
    meanings = defaultdict(set)
    for command in ALL.values():
        for _, each in options(command):
            for short in (spelling for spelling in each.opts if not spelling.startswith("--")):
                meanings[short].add(each.name)
    same = {"-n": {"limit", "last", "count"}, "-o": {"out", "output", "page"}}  # so many; where to
    for short, names in meanings.items():
        assert len(names - same.get(short, set())) <= (0 if short in same else 1), (short, names)
    assert meanings["-f"] == {"follow"}


def test_from_is_a_sender_and_start_a_position() -> None:
    shown = {
        flag: {
            name: each.help for name, command in ALL.items() for spelling, each in options(command) if spelling == flag
        }
        for flag in ("--from", "--start")
    }
    assert set(shown["--from"]) == {"publish", "subscribe", "tail"}
    assert set(shown["--start"]) == {"subscribe", "tail", "forward", "subscriptions seek"}
    wheres = {each.metavar for command in ALL.values() for flag, each in options(command) if flag == "--where"}
    assert wheres == {"FILTER", "SQL"}


@pytest.mark.parametrize("name", ALL)
def test_log_comes_first(name: str) -> None:
    metavars = [each.metavar for each in ALL[name].params if each.param_type_name == "argument"]
    assert "LOG" not in metavars[1:]


@pytest.mark.parametrize("name", ALL)
def test_help_fits_eighty_columns_and_names_no_type_of_python(
    run: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)  # which typer reads from the environment when it is imported
    shown = run(*name.split(), "--help")
    assert (shown.code, shown.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert not re.search(r"<(bool|str|int|float|path)>", shown.out)
    assert (ALL[name].help or "").splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", ALL)
def test_help_uses_plain_words(name: str) -> None:
    command = ALL[name]
    texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
    for text in texts:
        assert not re.search(r"\b(told|whoever|who|nobody|somebody|anew|so long|so many)\b", text), text
        assert not re.search(r"(?<!dead )(?<!Dead )\bletters?\b", text), text


def test_what_the_hints_name_is_there() -> None:
    commands = set(ALL)
    assert {each for each in hints._COMMANDS if not each.startswith("--")} <= commands | {
        name.split()[0] for name in ALL
    }
    for others in hints._COMMANDS.values():
        assert not set(others.split()) & commands
    flags = {flag for command in ALL.values() for each in command.params for flag in [*each.opts, each.metavar or ""]}
    for here in hints._OPTIONS:
        assert here.removeprefix("the argument ").split(" ")[0] in flags, here


# --- the default of LOG ---------------------------------------------------------------------------------------------


@pytest.fixture
def default(log: headwater.Log, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three orders and a note, in the log that HEADWATER_LOG names; the working directory is another."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HEADWATER_LOG", str(path))
    return path


def test_log_may_be_left_out_of_every_command(run: Any, default: Path) -> None:
    assert run("publish", "orders.new", '{"order": 4}', "--json").json["seq"] == 5
    assert [line["seq"] for line in run("tail", "orders.>", "-n", "1", "--json").json_lines] == [5]
    assert [line["seq"] for line in run("tail", "--start", "5", "--json").json_lines] == [5]
    assert [each["topic"] for each in run("topics", "notes.*", "--json").json["items"]] == ["notes.made"]
    assert run("subscribe", "billing", "orders.>", "--no-follow", "-n", "1", "--json").json_lines[0]["seq"] == 1
    assert run("lag", "billing", "--json").json["items"][0]["lag"] == 3
    assert run("subscriptions", "--json").json["items"][0]["id"] == "billing"
    assert run("subscriptions", "seek", "billing", "first", "--json").json["lag"] == 4
    assert run("retention", "set", "logs.>", "--max-age", "1d", "--json").json["pattern"] == "logs.>"
    assert run("retention", "--json").json["items"][0]["pattern"] == "logs.>"
    assert run("dlq", "--json").json == {"items": []}
    assert run("stats", "--json").json["path"] == str(default)
    assert run("doctor", "--json").json["path"] == str(default)
    assert run("forward", "file:copy.jsonl", "--once", "--json").json["forwarded"] == 5
    assert not list(Path().glob("*.db"))


def test_a_log_that_is_named_goes_before_the_default(run: Any, default: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    assert run("publish", other, "a", "1").code == 0
    assert run("publish", "--log", other, "b", "2").code == 0
    assert run("publish", "--file", "/dev/null", other, "c").code == 0
    assert [each["topic"] for each in run("topics", other, "--json").json["items"]] == ["a", "b"]
    assert [line["seq"] for line in run("tail", other, "a", "--json").json_lines] == [1]
    assert run("tail", "missing.db").err.startswith("error: there is no log missing.db")  # it looks like a log


def test_the_name_of_a_log_that_is_almost_right(run: Any, path: Path, log: headwater.Log) -> None:
    missing = run("tail", path.with_name(path.name.replace(".db", "s.db")))
    assert missing.err.splitlines()[-1] == f"next: Did you mean {path}?"


def test_without_a_default_log_is_the_first_argument(run: Any, path: Path, log: headwater.Log) -> None:
    missing = run("topics")
    assert missing.code == 2
    assert missing.err.splitlines() == [
        "error: Missing argument 'LOG'",
        "next: Name it, like events.db, or set HEADWATER_LOG; headwater topics --help",
    ]
    assert run("tail", "orders.>").err.splitlines() == [
        "error: there is no log orders.>",
        "next: LOG is the first argument: name a file like events.db, or set HEADWATER_LOG",
    ]


def test_the_default_is_read_from_the_file_of_settings_too(
    run: Any, path: Path, log: headwater.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "headwater.toml"
    settings.write_text(f'[cli]\nlog = "{path}"\nlake = "./lake"\n[profiles.test.cli]\nlog = "other.db"\n')
    assert run("topics", "--json").json["items"]
    assert (default_log(), default_lake()) == (str(path), "./lake")
    assert run("config", "check").code == 0
    monkeypatch.setenv("HEADWATER_PROFILE", "test")
    assert (default_log(), default_lake()) == ("other.db", "./lake")
    monkeypatch.setenv("HEADWATER_LOG", "mine.db")
    monkeypatch.setenv("HEADWATER_LAKE", "s3://bucket/lake")
    assert (default_log(), default_lake()) == ("mine.db", "s3://bucket/lake")
    shown = {each["key"]: each for each in run("config", "show", "--json").json["items"]}
    assert (shown["cli.log"]["value"], shown["cli.log"]["source"]) == ("mine.db", "HEADWATER_LOG")
    monkeypatch.delenv("HEADWATER_LOG")
    settings.write_text("[cli\n")
    with pytest.raises(InvalidConfigurationError, match="cannot be read for"):
        default_log()


def test_a_server_serves_the_default_unless_its_settings_name_another(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(**environment: str) -> str:
        process = start("serve", "--port", "0", "--json", env=environment, cwd=tmp_path)
        line = process.stderr.readline()
        process.terminate()
        process.wait(10)
        return str(json.loads(line)["log"])

    assert served(HEADWATER_LOG="mine.db").endswith("mine.db")
    assert served(HEADWATER_LOG="mine.db", HEADWATER_SERVER_LOG="of-the-server.db").endswith("of-the-server.db")
    assert served(HEADWATER_LOG="ws://host:1").endswith("events.db")


# --- what a shell offers --------------------------------------------------------------------------------------------


def offered(words: str, cwd: Path, **environment: str) -> list[str]:
    """What bash shows after Tab behind these words."""
    environment |= {"_HEADWATER_COMPLETE": "complete_bash", "COMP_WORDS": words}
    number = len(words.split()) - (0 if words.endswith(" ") else 1)
    environment |= {"COMP_CWORD": str(number), "PATH": "/bin"}
    asked = subprocess.run(
        [sys.executable, "-m", "headwater"], capture_output=True, text=True, cwd=cwd, env=environment, timeout=60
    )
    return asked.stdout.split()


def test_completion_offers_topics_and_subscriptions(log: headwater.Log, path: Path, tmp_path: Path) -> None:
    log.subscribe("billing", "orders.>").close()
    assert offered("headwater tail events.db or", tmp_path) == ["orders.new"]
    assert offered("headwater publish events.db ", tmp_path) == ["notes.made", "orders.new"]
    assert offered("headwater lag events.db ", tmp_path) == ["billing"]
    assert offered("headwater subscriptions rm events.db b", tmp_path) == ["billing"]
    assert offered("headwater dlq ls events.db --subscription ", tmp_path) == ["billing"]
    assert offered("headwater topics ev", tmp_path) == ["events.db"]
    assert offered("headwater tail n", tmp_path, HEADWATER_LOG=str(path)) == ["notes.made"]
    assert offered("headwater tail missing.db ", tmp_path) == []


def test_completion_offers_replicas(run: Any, tmp_path: Path) -> None:
    directory = tmp_path / "events.db-replicas"
    with ReplicaStore(directory, VersionRetention(), SystemClock()).open(serve=True):
        pass
    for name in ("shop/app.db", "shop/users.db"):
        assert run("replica", "key", "create", directory, name, "--push").code == 0
    assert offered("headwater replica log events.db-replicas ", tmp_path) == ["shop/app.db", "shop/users.db"]
    assert offered("headwater replica verify events.db-replicas shop/u", tmp_path) == ["shop/users.db"]
    assert offered("headwater replica log sh", tmp_path) == ["shop/app.db", "shop/users.db"]


def test_completion_needs_no_library(log: headwater.Log, path: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom headwater.cli import main\ntry:\n    main()\nfinally:\n"
        "    slow = ('msgspec', 'asyncio', 'pydantic', 'rich', 'headwater.broker', 'headwater.wiring')\n"
        "    print([name for name in slow if name in sys.modules], file=sys.stderr)"
    )
    environment = {
        "_HEADWATER_COMPLETE": "complete_bash",
        "COMP_WORDS": "headwater tail events.db or",
        "COMP_CWORD": "3",
        "PATH": "/bin",
    }
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert (asked.stdout.split(), asked.stderr.split("\n")[-2]) == (["orders.new"], "[]")


# --- one family -----------------------------------------------------------------------------------------------------


def test_a_replica_is_pushed_pulled_and_copied(run: Any, tmp_path: Path, serve: Any, path: Path) -> None:
    app, back, copy = (tmp_path / name for name in ("app.db", "back.db", "copy.db"))
    apsw.Connection(str(app)).execute("CREATE TABLE a (b); INSERT INTO a VALUES (1)")
    url = f"{serve().url}/shop/app.db"
    assert run("replica", "push", app, url, "--dry-run").out.startswith("would move")
    assert run("replica", "push", app, url, "--message", "first", "--json").json["version"] == 1
    assert run("replica", "pull", url, back, "--json").json["kind"] == "pull"
    assert run("replica", "copy", app, copy).out.startswith("copied")
    wrong = run("replica", "push", url, back)
    assert (wrong.code, wrong.err.splitlines()[1]) == (
        2,
        "next: headwater replica pull does that; push takes FILE URL",
    )
    follow = run("replica", "follow", app, copy)
    assert follow.code == 2
