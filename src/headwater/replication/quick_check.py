"""Checks the structure of a database that needs functions, collations or modules of its application.

The order of an index cannot be judged without them; the structure can. Runs as a program, by its path, with the url of
the database as its argument: prints a line for each finding. Exits with 1 and the reason if it cannot be read.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing

import apsw

FINDINGS_MAX = 10  # that are named
STAND_INS_MAX = 100  # functions of the application that the check replaces

MISSING = re.compile(r"no such (?:collation sequence|function|module): |unsafe use of |unknown function: ")
_FUNCTION = re.compile(r"(?:no such function: |unknown function: |unsafe use of )([^\s(]+)")


def findings(url: str) -> list[str]:
    stand_ins: set[str] = set()
    while True:
        with closing(apsw.Connection(url, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_URI)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON")
            connection.collation_needed(lambda link, name: link.create_collation(name, _in_byte_order))
            for name in stand_ins:
                connection.create_scalar_function(
                    name, lambda *_: None, -1, deterministic=True, flags=apsw.SQLITE_INNOCUOUS
                )
            try:
                return [line for (line,) in connection.execute(f"PRAGMA quick_check({FINDINGS_MAX})") if line != "ok"]
            except apsw.SQLError as exc:
                wanted = _FUNCTION.search(str(exc))
                if wanted and wanted[1] not in stand_ins and len(stand_ins) < STAND_INS_MAX:
                    stand_ins.add(wanted[1])
                elif MISSING.search(str(exc)):
                    return []  # a module that is missing: its tables cannot be read, its pages were
                else:
                    raise


def _in_byte_order(one: str, other: str) -> int:
    return (one > other) - (one < other)


if __name__ == "__main__":
    try:
        print("\n".join(findings(sys.argv[1])))
    except apsw.Error as exc:
        sys.exit(str(exc))
