"""Every step of the tutorial runs, in order and in one folder, and prints what the page says."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest
from command_line import shell_environment

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str, str]]:
    """Kind, content and, for a shell block that one follows, the output that the page shows."""
    found = STEP.findall((ROOT / "docs" / "tutorial.md").read_text())
    shown = [each[1] if each[0] == "text" else "" for each in found[1:]] + [""]
    return [(kind, content, output) for (kind, content), output in zip(found, shown, strict=True) if kind != "text"]


def as_shell(folder: Path, port: str) -> str:
    """One script for one bash, because background processes stay from step to step. The server gets a free port."""
    lines = ["set -m", "trap 'kill $(jobs -p)' EXIT"]
    for number, (kind, shown, _) in enumerate(steps()):
        content = shown.replace("8765", port)
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", content)
            assert name is not None, content
            (folder / f"step{number}").write_text(content)
            lines.append(f"cp step{number} {name[1]}")
        else:
            lines.append(f"{{\n{content}}} > output{number} 2>&1")
    return "\n".join(lines)


def pattern(shown: str) -> str:
    return ".*?".join(re.escape(part) for part in shown.rstrip().split("…"))


@pytest.mark.timeout(600)  # a dozen processes, two sessions of Spark
@pytest.mark.xdist_group("spark")
def test_every_step_prints_what_the_page_says(tmp_path: Path) -> None:
    folder = tmp_path / "first-hour"
    folder.mkdir()
    environment = shell_environment(tmp_path / "bin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        script = as_shell(folder, str(free.getsockname()[1]))
    ran = subprocess.run(
        ["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, timeout=580
    )
    assert sum(kind == "sh" for kind, *_ in steps()) >= 10
    for number, (kind, content, shown) in enumerate(steps()):
        if kind == "sh":
            printed = re.sub(r"^\[\d+\].*\n", "", (folder / f"output{number}").read_text(), flags=re.MULTILINE)
            if "--processes 2" in content:  # two processes share the last two orders
                first, second, *rest, last = printed.splitlines()
                printed = "\n".join([first, second, *sorted(rest, key=lambda line: line.partition("{")[2]), last])
            wanted = pattern(shown) if shown else ".*"
            assert re.fullmatch(wanted, printed.rstrip(), re.DOTALL), f"{content}\nprinted:\n{printed}\n{ran.stderr}"
