"""Everything public is in the reference: names and members, commands and flags, methods, settings, metrics, tables."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from command_line import serving

import headwater
from headwater import errors
from headwater.cli.commands import TARGETS, load_command
from headwater.server.methods import METHODS
from headwater.settings.model import NAMED_TABLES, SECTIONS, TopicSettings

ROOT = Path(__file__).parents[2]
INTERNAL = {"settled", "declined", "raw", "raw_headers", "identity", "model_config"}  # fields that programs do not use


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def sections(text: str) -> dict[str, str]:
    """Headings in code, of any level, and what is below each up to the next heading of its level or above."""
    headings = list(re.finditer(r"^(#+) `(.+?)`$", text, re.MULTILINE))
    ends = {each: each.end() for each in headings}
    for each in headings:
        following = re.compile(rf"^#{{1,{len(each[1])}}} ", re.MULTILINE).search(text, ends[each])
        ends[each] = following.start() if following else len(text)
    return {each[2]: text[each.end() : ends[each]] for each in headings}


def is_described(name: str, text: str, cell: int = -1) -> bool:
    """`name` has a row with something in this cell, or a heading with a sentence below its code."""
    for line in text.splitlines():
        cells = [each.strip() for each in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and f"`{name}`" in cells[0] and cells[cell]:
            return True
    found = re.search(rf"^#+ `[\w.]*\b{re.escape(name)}`$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return found is not None and bool(re.sub(r"```.*?```", "", found[1], flags=re.DOTALL).strip())


# --- Python -----------------------------------------------------------------------------------------------------------


def public_members(kind: type) -> set[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("headwater"):
            found |= {*vars(base), *inspect.get_annotations(base)}
    return {
        name
        for name in found - INTERNAL
        if not name.startswith("_")
        and not name.endswith("_ms")
        and not isinstance(getattr(kind, name, 0), str | frozenset)
    }


def undocumented_names(text: str) -> Iterator[str]:
    described = sections(text)
    for name in headwater.__all__:
        value = getattr(headwater, name)
        if inspect.ismodule(value):
            if f"`headwater.{name}`" not in text:
                yield name
        elif f"headwater.{name}" not in described and name not in described:
            yield name
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            yield from (
                f"{name}.{each}" for each in sorted(public_members(value)) if not is_described(each, described[name])
            )
        elif not re.sub(
            r"```.*?```", "", described.get(name) or described[f"headwater.{name}"], flags=re.DOTALL
        ).strip():
            yield name


def test_every_public_name_is_in_the_reference() -> None:
    assert list(undocumented_names(page("reference/api.md"))) == []


def test_every_error_is_in_the_reference() -> None:
    known = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert len(known) > 40
    assert {name for name in known if not re.search(rf"\b{name}\b", page("reference/api.md"))} == set()


# --- the command line -------------------------------------------------------------------------------------------------


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, each in getattr(command, "commands", {}).items():
        if not each.hidden:  # a former name
            yield from commands(f"{name} {word}", each)


def undocumented_commands(text: str) -> Iterator[str]:
    described = sections(text)
    for first in TARGETS:
        for name, command in commands(first, load_command(first)):
            own = described.get(f"headwater {name}", "").split("\n#")[0]
            if not own.strip():
                yield name
                continue
            for each in command.params:
                if getattr(each, "hidden", False) or each.name == "help":
                    continue
                flags = [*each.opts, *each.secondary_opts] if each.param_type_name == "option" else []
                yield from (f"{name} {flag}" for flag in flags if not is_described(flag, own, cell=1))


def test_every_command_and_flag_is_in_the_reference() -> None:
    assert list(undocumented_commands(page("reference/cli.md"))) == []


# --- the server -------------------------------------------------------------------------------------------------------


def undocumented_methods(text: str) -> set[str]:
    without_rights = re.sub(r"<!-- rights -->.*?<!-- end of rights -->", "", text, flags=re.DOTALL)
    return {name for name in METHODS if f"`{name}`" not in without_rights}


def test_every_rpc_method_is_in_the_reference() -> None:
    assert undocumented_methods(page("reference/server.md")) == set()
    described = sections(page("reference/wire.md"))
    for name, method in METHODS.items():
        is_object = isinstance(method.params, type) and issubclass(method.params, msgspec.Struct)
        params = {each.encode_name for each in msgspec.structs.fields(method.params)} if is_object else set()
        assert {each for each in params if f"| `{each}` |" not in described[name]} == set(), name


def undocumented_settings(text: str) -> Iterator[str]:
    described = sections(text)
    named = {f"[{name}.NAME]": model for name, model in NAMED_TABLES.items()}
    for table, model in {
        **{f"[{name}]": each for name, each in SECTIONS.items()},
        "[[topics]]": TopicSettings,
        **named,
    }.items():
        yield from (f"{table} {key}" for key in model.model_fields if not is_described(key, described.get(table, "")))


def test_every_setting_is_in_the_reference() -> None:
    assert list(undocumented_settings(page("reference/configuration.md"))) == []


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The metrics of a real server that has a log in a file, and so replicas."""
    with (
        serving(tmp_path_factory.mktemp("metrics")) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer,
    ):
        return set(re.findall(r"^# TYPE (\w+?)(?:_created)? ", answer.read().decode(), re.MULTILINE))


def test_every_metric_is_in_the_reference(scraped: set[str]) -> None:
    text = page("reference/metrics.md")
    assert len(scraped) > 30
    assert {name for name in scraped if not (is_described(name, text) or is_described(f"{name}_total", text))} == set()


# --- the schema -------------------------------------------------------------------------------------------------------


def test_every_table_is_in_the_reference(tmp_path: Path) -> None:
    headwater.open(tmp_path / "events.db").close()
    connection = apsw.Connection(str(tmp_path / "events.db"))
    made = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")}
    connection.close()
    postgres = (ROOT / "src" / "headwater" / "stores" / "postgres" / "schema.sql").read_text()
    made |= set(re.findall(r"^CREATE (?:TABLE|VIEW) (\w+)", postgres, re.MULTILINE))
    tables = {name for name in made if not name.startswith("sqlite_")}
    assert len(tables) > 12
    assert tables - set(sections(page("reference/schema.md"))) == set()


# --- the pages --------------------------------------------------------------------------------------------------------


def test_the_pages_are_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_reference.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stderr == ""


@pytest.mark.parametrize("kind", ["name", "member", "command", "flag", "method", "setting", "text"])
def test_what_is_missing_is_noticed(kind: str) -> None:
    api, cli = page("reference/api.md"), page("reference/cli.md")
    match kind:
        case "name":
            assert list(undocumented_names(api.replace("### `headwater.sync`", ""))) == ["sync"]
        case "member":
            assert list(undocumented_names(api.replace("#### `Log.seek`", ""))) == ["Log.seek"]
        case "command":
            assert "dlq redrive" in list(undocumented_commands(cli.replace("### `headwater dlq redrive`", "")))
        case "flag":
            assert "publish --ttl" in list(undocumented_commands(cli.replace("`--ttl`", "")))
        case "method":
            assert undocumented_methods(page("reference/server.md").replace("`rpc.nack`", "")) == {"rpc.nack"}
        case "setting":
            text = page("reference/configuration.md").replace("| `audit` |", "| |")
            assert list(undocumented_settings(text)) == ["[server] audit"]
        case "text":
            without = re.sub(r"(### `headwater.sync`\n\n```python.*?```\n).*?(?=\n#)", r"\1", api, flags=re.DOTALL)
            assert list(undocumented_names(without)) == ["sync"]


def test_flags_that_the_docs_use_exist() -> None:
    """Every `headwater COMMAND … --flag` in code, anywhere in the docs."""
    described = sections(page("reference/cli.md"))
    unknown = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        used = re.sub(r"\\\n\s*", "", path.read_text())
        for line in re.findall(r"(?:^|`)headwater ([a-z][^`\n#|;&]*)", used, re.MULTILINE):
            words = line.split()
            name = next((each for n in (2, 1) if (each := f"headwater {' '.join(words[:n])}") in described), None)
            if name and path.name != "cli.md":
                own = described[name] + described[f"headwater {words[0]}"]
                spelled = {
                    re.sub(r"(?<=[a-z])([A-Z])", r"-\1", flag).lower() for flag in re.findall(r"(?<=\s)--[\w-]+", line)
                }
                unknown += [f"{path.name}: {name} {flag}" for flag in spelled - {"--help"} if f"`{flag}`" not in own]
    assert unknown == []
