"""The systemd unit and the container file in `examples/` name what there is, and what they run works."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cli.commands import load_command
from headwater.server.listener import CLOSE_SECONDS_MAX
from headwater.settings import ServerSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT = EXAMPLES / "systemd" / "headwater.service"
CONTAINER = EXAMPLES / "container" / "Containerfile"


def unit() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def instructions(name: str) -> list[str]:
    text = CONTAINER.read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def exec_form(name: str) -> list[str]:
    words: list[str] = json.loads(instructions(name)[-1])
    return words


def commands_named() -> list[list[str]]:
    """Every `headwater …` in the two files, as the words after the program's name."""
    in_container = re.findall(r"data headwater (token .*)$", CONTAINER.read_text(), re.MULTILINE)
    [in_unit] = re.findall(r"sh -c 'headwater (token .*)'$", UNIT.read_text(), re.MULTILINE)
    tokens = [shlex.split(line) for line in [in_unit, *in_container]]
    return [shlex.split(unit()["ExecStart"])[1:], exec_form("CMD"), *tokens]


@pytest.mark.parametrize("words", commands_named(), ids=lambda words: " ".join(words[:2]))
def test_commands_and_flags_exist(words: list[str]):
    left = list(words)
    command = load_command(left.pop(0))
    while hasattr(command, "commands"):
        command = command.commands[left.pop(0)]
    known = {spelling for parameter in command.params for spelling in parameter.opts}
    assert [word for word in left if word.startswith("--") and word not in known] == []


def test_all_commands_are_found():
    assert sorted(words[0] for words in commands_named()) == ["serve", "serve", "token", "token"]


def serves(start, run, words: list[str], place: str, directory: Path):
    """Run what a file runs, with its directory here and on a port that is free."""
    here = [word.replace(place, str(directory)) for word in words]
    run("token", "create", "--tokens", here[here.index("--tokens") + 1], "--admin")
    port = here.index("--port") + 1
    here[port] = "0"
    process = start(*here)
    return process, json.loads(process.stderr.readline())


def test_the_unit_starts_and_stops_a_server(start, run, tmp_path: Path):
    program, *words = shlex.split(unit()["ExecStart"])
    assert (program, words[0]) == ("headwater", "serve")
    process, first = serves(start, run, words, "%S/headwater", tmp_path)
    assert first["log"] == str(tmp_path / "events.db")
    process.send_signal(getattr(signal, unit()["KillSignal"]))
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_the_unit_waits_longer_than_the_server_takes_to_stop():
    longest_s = ServerSettings().shutdown_timeout + CLOSE_SECONDS_MAX
    assert float(unit()["TimeoutStopSec"].removesuffix("s")) > longest_s


def test_systemd_understands_the_unit(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("ExecStart=headwater", f"ExecStart={sys.executable}"))
    verified = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_container_runs_without_privileges_and_keeps_its_log_in_a_volume():
    assert instructions("FROM")[-1].startswith("python:3.11-slim")
    assert instructions("USER") == ["headwater"]
    assert instructions("VOLUME") == ["/data"]
    assert exec_form("ENTRYPOINT") == ["headwater"]
    assert exec_form("CMD")[:2] == ["serve", "/data/events.db"]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert [word for word in copied if not (EXAMPLES.parent / word).exists()] == []


def test_the_container_serves_and_its_health_check_tells(start, run, tmp_path: Path):
    process, first = serves(start, run, exec_form("CMD"), "/data", tmp_path)
    port = first["url"].rpartition(":")[2]
    [check] = re.findall(r"CMD (\[.*\])", instructions("HEALTHCHECK")[-1])
    python, *words = json.loads(check)
    assert python == "python"
    default = exec_form("CMD")[exec_form("CMD").index("--port") + 1]
    assert instructions("EXPOSE") == [default]
    probe = [sys.executable, *(word.replace(f":{default}/", f":{port}/") for word in words)]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}

    def healthy() -> bool:
        return subprocess.run(probe, env=environment, stderr=subprocess.DEVNULL, timeout=30).returncode == 0

    assert healthy()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not healthy()
