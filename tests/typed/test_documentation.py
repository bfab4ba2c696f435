"""docs/reference/typed.md has every keyword, with its default, and its code runs."""

import re
import subprocess
import sys
from pathlib import Path

from headwater.typed import Event
from headwater.typed.declaration import KEYWORDS

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "typed.md").read_text()


def test_every_keyword_is_in_the_table():
    table = TEXT.split("| class keyword |")[1].split("\n\n")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert list(documented) == list(KEYWORDS)
    defaults = Event.__headwater__
    assert (documented["version"], documented["log"]) == (str(defaults.version), str(defaults.log))
    assert documented["serializer"] == f'`"{defaults.serializer.name}"`'


def test_every_error_of_a_dead_letter_is_in_the_table():
    from headwater.typed import handling

    kinds = {
        name for name, value in vars(handling).items() if isinstance(value, type) and issubclass(value, handling.Reject)
    }
    assert kinds - {"Reject"} == set(re.findall(r"^\| `([A-Z]\w+)` \|", TEXT, re.MULTILINE))


def test_its_code_runs_in_order_in_a_fresh_directory(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    program = [sys.executable, "-c", "\n".join(blocks)]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "o-1 9.90\n1.10\n", "")
