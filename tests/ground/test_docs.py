"""The docs point at things that exist, their code runs, and their numbers are those of the code."""

import importlib
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from command_line import shell_environment

import headwater
from headwater import testing, wiring
from headwater.broker.subscribe import SubscribeOptions
from headwater.cli.commands import load_command
from headwater.client.options import RemoteOptions, read_options
from headwater.delivery.publishing import DedupeWindow
from headwater.message import PublishOptions
from headwater.ports.records import SubscriptionSpec

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwater"
REFERENCE = "docs/reference/options.md"
DOCS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]
WRITTEN = [*DOCS, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").rglob("*.*")))]
FILE_SUFFIXES = (".py", ".md", ".sql", ".toml", ".txt", ".lock", ".json", ".yml")
THE_READERS_OWN = {
    *("headwater.toml", "manifest.db", "conftest.py", "shop.py", "shop/app.db", "NS/NAME"),
    *("status.json", "publish.py", "read.py", "tasks.py", "run.py", "stock.py", "test_orders.py", "warnings.txt"),
}
LAKE_TABLES = ("bronze/", "silver/", "gold/", "metrics/", "typed/")
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|tmp|work|Users|mnt|opt|usr|var)/")


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text()


def prose(name: str) -> str:
    return re.sub(r"^```.*?^```$", "", text(name), flags=re.MULTILINE | re.DOTALL)


def table(name: str, first_heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading, without backticks."""
    lines = text(name).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


# --- what the docs point at -----------------------------------------------------------------------------------------


def paths_in(markdown: str) -> list[str]:
    """Names in backticks that look like paths: with a slash and nothing strange, or with a source file's suffix."""
    quoted = re.findall(r"`([\w.][\w./-]*)`", markdown)
    return [each for each in quoted if each.endswith(FILE_SUFFIXES) or "/" in each]


@pytest.mark.parametrize("name", DOCS)
def test_files_named_exist(name: str) -> None:
    named = {each for each in paths_in(prose(name)) if not each.startswith(LAKE_TABLES)} - THE_READERS_OWN
    assert {each for each in named if not any((base / each).exists() for base in (ROOT, PACKAGE))} == set()


def test_paths_are_recognised() -> None:
    assert paths_in("`broker/core.py` and `tests/crash`, `.ci/run`, not `ack_wait`, `sqlite:path` or `/regex/`") == [
        "broker/core.py",
        "tests/crash",
        ".ci/run",
    ]


def rows_of_changes() -> list[str]:
    _, _, rows = text("CONTRIBUTING.md").partition("| the change | the place |\n")
    return re.findall(r"^\| .*$", rows.partition("\n\n")[0], re.MULTILINE)


@pytest.mark.parametrize("row", rows_of_changes(), ids=lambda row: row.split("|")[1].strip())
def test_names_are_in_the_files_of_their_row(row: str) -> None:
    paths = [base / each for each in paths_in(row) for base in (ROOT, PACKAGE)]
    files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    code = "\n".join(file.read_text(errors="replace") for file in files)
    names = set(re.findall(r"`(\w+(?:\.\w+)*)`", row)) - set(paths_in(row))
    assert {name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)} == set()


def test_every_package_has_its_place_in_the_architecture() -> None:
    named = {row[0].rstrip("/") for row in table("ARCHITECTURE.md", "package")}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")} - {"version.py"}
    assert named == packages | modules


def anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(name), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCS)
def test_links_between_docs_resolve(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(name)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (Path(name).parent / path).as_posix() if path else name
        assert (ROOT / file).exists(), target
        assert not anchor or anchor.startswith("only-") or anchor in anchors(file), target  # only-dark: of an image


def test_every_page_has_one_kind_and_one_place_in_the_navigation() -> None:
    """The site has four kinds of pages. `make docs` checks its links a second time."""
    navigation = text("mkdocs.yml").split("\nnav:\n")[1]
    assert re.findall(r"^  - ([\w-]+):", navigation, re.MULTILINE) == [
        "Home",
        "Tutorial",
        "How-to",
        "Reference",
        "Explanation",
    ]
    listed = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(name.removeprefix("docs/") for name in DOCS if name.startswith("docs/"))


def test_the_home_page_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", text("docs/index.md")))
    pages = {name.removeprefix("docs/") for name in DOCS if name.startswith("docs/")}
    assert pages - linked == {"index.md"}


def test_every_dependency_has_its_reason() -> None:
    reasons = " ".join(row[0] for row in table("ARCHITECTURE.md", "part"))
    declared = re.findall(r'^    "([a-z-]+)>=', text("pyproject.toml"), re.MULTILINE)
    assert len(declared) > 8
    assert [name for name in declared if not re.search(rf"\b{name}\b", reasons)] == []


def test_make_targets_named_exist() -> None:
    named = {each for name in DOCS for each in re.findall(r"(?:`|^)make ([a-z-]+)", text(name), re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named - targets == set()


# --- what the docs say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_no_paths_of_a_machine(name: str) -> None:
    assert MACHINE_PATH.findall(text(name)) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_exactly_once_is_never_claimed_without_its_mechanism(name: str) -> None:
    for paragraph in re.split(r"\n\s*\n", text(name)):
        if re.search(r"exactly[\s-]+once", paragraph, re.IGNORECASE):
            assert "mechanism" in paragraph.lower()


def test_the_readme_stays_readable() -> None:
    assert len(text("README.md").splitlines()) <= 200


def test_limits_are_those_of_the_code() -> None:
    rows = table(REFERENCE, "limit")
    assert len(rows) > 15
    for name, value, meaning, path in rows:
        assert meaning, name
        module = importlib.import_module("headwater." + path.removesuffix(".py").replace("/", "."))
        assert int(value.replace(",", "")) == getattr(module, name), name


def seconds(documented: str) -> float:
    number, unit = documented.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


def test_open_options_are_those_of_the_code() -> None:
    documented = {name: default for name, default, _ in table(REFERENCE, "open option")}
    assert list(documented) == list(wiring.OpenOptions.__annotations__)
    assert seconds(documented["dedupe"]) * 1000 == DedupeWindow().span_ms
    assert int(documented["dedupe_count"].replace(",", "")) == DedupeWindow().count
    assert seconds(documented["maintenance_interval"]) == wiring.MAINTENANCE_S
    assert seconds(documented["busy_timeout"]) == wiring.BUSY_TIMEOUT_S
    assert (documented["durability"], documented["adopt"], documented["heartbeats"]) == ('"full"', "False", "True")


def test_subscribe_options_are_those_of_the_code() -> None:
    documented = {name: default for name, default, _ in table(REFERENCE, "subscribe option")}
    assert set(documented) == set(SubscribeOptions.__annotations__)
    spec = SubscriptionSpec("")
    spans_ms = {
        "ack_wait": spec.ack_wait_ms,
        "extension_max": spec.extension_ms_max,
        "lease": spec.lease_ms,
        "backoff": spec.retry.base_ms,
        "backoff_max": spec.retry.cap_ms,
    }
    assert {name: seconds(documented[name]) * 1000 for name in spans_ms} == spans_ms
    numbers = {
        "max_in_flight": spec.max_in_flight,
        "max_attempts": spec.retry.max_attempts,
        "backoff_factor": spec.retry.factor,
        "jitter": spec.retry.jitter,
    }
    assert {name: float(documented[name].replace(",", "")) for name in numbers} == numbers
    words = {
        "mode": spec.mode,
        "dialect": spec.dialect,
        "order": spec.order,
    }
    assert {name: documented[name].strip('"') for name in words} == words
    rest = {
        "where": spec.where,
        "order_key": spec.order_key,
        "inactive_timeout": spec.inactive_ms,
        "dead_letter_expired": spec.dead_letter_expired,
        "from_": spec.entities.get("from"),
        "to": spec.entities.get("to"),
        "broadcast": spec.entities.get("broadcast", False),
    }
    assert {name: documented[name] for name in rest} == {name: repr(value) for name, value in rest.items()}
    assert documented.keys() - {*spans_ms, *numbers, *words, *rest} == {"start", "timeout", "takeover"}


def test_connection_options_are_those_of_the_code() -> None:
    documented = {name: default for name, default, _ in table("docs/reference/server.md", "connection option")}
    assert set(documented) == set(RemoteOptions.__annotations__)
    settings = read_options("ws://localhost", {})
    assert seconds(documented["timeout"]) == settings.timeout_s
    assert seconds(documented["connect_timeout"]) == settings.connect_timeout_s
    assert seconds(documented["ping"]) == settings.ping_s
    backoff = settings.backoff
    assert (seconds(documented["reconnect_min"]), seconds(documented["reconnect_max"])) == (
        backoff.first_s,
        backoff.most_s,
    )
    assert (documented["reconnect"], documented["reconnect_attempts"]) == (
        f'"{backoff.strategy}"',
        str(backoff.attempts),
    )


def test_publish_options_are_all_named() -> None:
    [paragraph] = re.findall(r"`log\.publish`\ntakes (.*?)\. `log\.retain", text(REFERENCE), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(PublishOptions.__annotations__)


def test_there_is_a_place_for_the_speed() -> None:
    assert re.search(r"<!-- speed -->\n.*<!-- /speed -->", text("README.md"), re.DOTALL)


# --- what the docs run ----------------------------------------------------------------------------------------------


def runnable_blocks() -> list[tuple[str, str]]:
    """The blocks of the README with code or commands, but for the ones that install."""
    found = re.findall(r"^```(python|sh)\n(.*?)^```$", text("README.md"), re.MULTILINE | re.DOTALL)
    return [(kind, block) for kind, block in found if not block.startswith(("make ", "pip "))]


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shell_environment(tmp_path_factory.mktemp("shell") / "bin")


def run_block(kind: str, block: str, directory: Path, environment: dict[str, str]) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    block = block.replace("headwater serve events.db", f"headwater serve events.db --port {port}").replace("8765", port)
    words = (
        [sys.executable, "-c", block]
        if kind == "python"
        else ["bash", "-emc", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + block]
    )
    ran = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
    assert not re.search("Traceback|error:", ran.stderr), ran.stderr
    return ran.stdout


@pytest.mark.parametrize("number", range(len(runnable_blocks())))
def test_each_block_of_the_readme_runs_alone(number: int, tmp_path: Path, shell: dict[str, str]) -> None:
    printed = run_block(*runnable_blocks()[number], tmp_path, shell)
    wanted = [
        "orders.new {'order': 17}\norders.new {'order': 18}\n",
        "Reject: no address\n",
        "74.5\n",
        '{"order": 20}',
        "orders.new",
    ]
    assert wanted[number] in printed


@pytest.mark.timeout(600)  # some seventy processes
def test_the_blocks_of_the_readme_may_be_repeated(
    tmp_path: Path, shell: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine times in one folder. No message is given up, and none is left half done."""
    monkeypatch.chdir(tmp_path)
    for _ in range(9):
        for kind, block in runnable_blocks():
            if kind == "python":
                exec(block, {})  # that each runs as a program is tested above
            else:
                run_block(kind, block, tmp_path, shell)
    with headwater.open(tmp_path / "events.db") as log:
        assert log.statistics().messages == 9 * 4 + 1
        assert [(each.in_flight, each.dead) for each in log.subscriptions()] == [(0, 0)]
    with headwater.open(tmp_path / "mails.db") as log:
        assert {letter.reason for letter in log.dead_letters.list()} == {"rejected"}
        assert log.statistics().subscriptions[0].acked == 9
    with headwater.open(tmp_path / "sensors.db") as log:
        assert (log.subscription("average").lag, log.subscription("average").acked) == (0, 9 * 50)


def test_the_code_of_the_page_on_frameworks_runs(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", text("docs/howto/frameworks.md"), re.MULTILINE | re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("SecondLibraryError\n", "")


def test_the_code_of_the_page_on_testing_runs(tmp_path: Path) -> None:
    """The first line of each block names its file."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text("docs/howto/test.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == text("docs/howto/test.md").count("```python\n") > 3
    for name, code in blocks:
        with (tmp_path / name).open("a") as file:
            file.write(code)
    words = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    tests = sum(code.count("\ndef test_") + code.startswith("def test_") for _, code in blocks)
    assert f"{tests} passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_failure_shown_on_the_page_on_testing_is_that_of_the_code() -> None:
    [shown] = re.findall(
        r"^```text\n(expected a message.*?)^```$", text("docs/howto/test.md"), re.MULTILINE | re.DOTALL
    )
    with testing.open_log() as log:
        log.publish("orders.new", {"id": 21, "amount": 9})
        log.publish("invoices.sent", {"order": 21, "amount": 9})
        with pytest.raises(AssertionError) as caught:
            testing.assert_published(log, "invoices.sent", data={"order": 21, "amount": 10})
    assert [line.rstrip() for line in str(caught.value).splitlines()] == shown.splitlines()


def command_names(markdown: str) -> set[tuple[str, ...]]:
    """Every `headwater …` in code, as far as its words are names of commands."""
    found = re.findall(r"(?:^|`)headwater ((?:[a-z][a-z-]*(?![.\w:/]) ?)+)", markdown, re.MULTILINE)
    return {tuple(each.split()) for each in found}


def test_commands_are_recognised() -> None:
    assert command_names("`headwater dlq ls` or\nheadwater publish events.db orders.new 1\n") == {
        ("dlq", "ls"),
        ("publish",),
    }


@pytest.mark.parametrize("words", sorted({each for name in DOCS for each in command_names(text(name))}), ids=" ".join)
def test_commands_named_exist(words: tuple[str, ...]) -> None:
    command = load_command(words[0])
    for word in words[1:]:
        command = getattr(command, "commands", {word: command})[word]  # behind a command stand its arguments
