"""Imports point down only, and the core is pure."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headwater"

PURE_ROOMS = ("delivery", "topics")
# What pure code may use. Nothing here reads a clock, a file, a socket, a random number or the environment.
PURE_STDLIB = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "itertools", "json", "math", "operator",
    "re", "typing",
}  # fmt: skip
PURE_OTHERS = {
    "msgspec", "re2", "headwater.arguments", "headwater.errors", "headwater.formats", "headwater.message",
    "headwater.delivery", "headwater.topics",
    "datetime", "zoneinfo", "cronsim",  # of calendars, without a clock: see IMPURE_CALLS
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "now", "utcnow", "today"}


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_imports_point_down() -> None:
    linted = lint_imports(ROOT / "src")
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 broken" in linted.stdout


def test_the_contract_bites(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "headwater", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "headwater" / "errors.py").open("a") as errors:
        errors.write("\nimport headwater.broker.log\n")
    linted = lint_imports(tmp_path)
    assert linted.returncode != 0
    assert "headwater.errors" in linted.stdout


def pure_modules() -> list[Path]:
    return [PACKAGE / "errors.py", *(path for room in PURE_ROOMS for path in sorted((PACKAGE / room).glob("*.py")))]


def imported_by(tree: ast.AST) -> set[str]:
    return {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }


def is_pure_import(name: str) -> bool:
    if name.split(".")[0] in PURE_STDLIB:
        return True
    return any(name == allowed or name.startswith(allowed + ".") for allowed in PURE_OTHERS)


def impure_calls(tree: ast.AST) -> set[str]:
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {func.id for func in called if isinstance(func, ast.Name)}
    names |= {func.attr for func in called if isinstance(func, ast.Attribute)}
    return names & IMPURE_CALLS


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_pure_rooms_import_nothing_impure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert {name for name in imported_by(tree) if not is_pure_import(name)} == set()
    assert impure_calls(tree) == set()


@pytest.mark.parametrize(
    "path", [PACKAGE / "formats.py", *sorted((PACKAGE / "message").glob("*.py"))], ids=lambda path: path.name
)
def test_messages_and_formats_read_no_clock(path: Path) -> None:
    tree = ast.parse(path.read_text())
    impure = {name for name in imported_by(tree) if not is_pure_import(name)}
    assert {name for name in impure if not name.startswith("headwater.message")} <= {"datetime", "urllib.parse"}
    assert impure_calls(tree) == set()


@pytest.mark.parametrize(
    "impure",
    ["import time", "import os.path", "from asyncio import Event", "import threading", "import headwater.ports.clock"],
)
def test_an_impure_import_is_seen(impure: str) -> None:
    assert not all(is_pure_import(name) for name in imported_by(ast.parse(impure)))


def test_an_impure_call_is_seen() -> None:
    assert impure_calls(ast.parse("datetime.now(UTC); open('x')")) == {"now", "open"}
