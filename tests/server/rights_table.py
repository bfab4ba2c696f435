"""The table of rights and methods in docs/reference/server.md, from the code. As a program, it writes the table."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.server.auth import RIGHTS
from headwater.server.methods import METHODS
from headwater.server.registry import APPLICATION, Needs

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "server.md"
BLOCK = re.compile(r"(?<=<!-- rights -->\n).*?(?=<!-- end of rights -->)", re.DOTALL)


def rights_table() -> str:
    rows = [(f"`{name}`", method.needs) for name, method in METHODS.items()]
    rows.append(("methods of the application", APPLICATION))
    head = f"| method | {' | '.join(RIGHTS)} | for |\n|{'---|' * (len(RIGHTS) + 2)}\n"
    return head + "".join(_row(name, needs) for name, needs in rows)


def _row(name: str, needs: Needs) -> str:
    marks = ["yes" if right in needs.rights else "" for right in RIGHTS]
    return f"| {name} | {' | '.join(marks)} | {needs.of if needs.rights else 'also before authentication'} |\n"


if __name__ == "__main__":
    DOCS.write_text(BLOCK.sub(lambda _: rights_table(), DOCS.read_text()))
