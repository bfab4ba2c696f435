"""The table of rights and methods in docs/reference/server.md, from the code. As a program, it writes the table."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.server.auth import RIGHTS
from headwater.server.methods import METHODS
from headwater.server.registry import APPLICATION

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "server.md"
BLOCK = re.compile(r"(?<=<!-- rights -->\n).*?(?=<!-- end of rights -->)", re.DOTALL)


def rights_table() -> str:
    """Methods that need the same are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, needs in [(f"`{name}`", method.needs) for name, method in METHODS.items()] + [
        ("own methods", APPLICATION)
    ]:
        rights = [f"`{right}`" for right in RIGHTS if right in needs.rights]
        key = (" or ".join(rights), needs.of) if rights else ("none", "also before authentication")
        rows.setdefault(key, []).append(name)
    head = "| right | for | methods |\n|---|---|---|\n"
    return head + "".join(f"| {right} | {of} | {', '.join(names)} |\n" for (right, of), names in rows.items())


if __name__ == "__main__":
    DOCS.write_text(BLOCK.sub(lambda _: rights_table(), DOCS.read_text()))
