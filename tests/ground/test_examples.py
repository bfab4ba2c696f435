"""Every example runs to its end by itself and prints what stands beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_has_its_expected_output() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts
    assert scripts == {path.stem for path in (EXAMPLES / "expected").glob("*.txt")}


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_what_it_should(script: Path, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (EXAMPLES / "expected" / f"{script.stem}.txt").read_text()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_names_its_own_file(script: Path) -> None:
    assert f"python examples/{script.name} [directory]" in script.read_text()
