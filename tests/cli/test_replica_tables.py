"""Tables of `headwater replica` on terminals of several widths: nothing but free text gives way."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headwater.cli import output
from headwater.cli import replica as replica_commands
from headwater.cli.output import clock, show_table, table_of
from headwater.replication.host.catalogue import ClientReport, Replica, ReplicaListing, Version
from headwater.replication.names import ReplicaName

AT_MS = 1_700_000_000_000
TEXT = "before the move of all orders of last year into the archive, which takes a while and cannot be undone"
CLIENT = "build-server-07.example:1a2b"


def version(number: int, message: str) -> Version:
    return Version(number, number - 1, "", message, CLIENT, AT_MS, 69_632, 4096, 17, 1_234_567, 0, "0" * 40, "")


@pytest.fixture(params=[80, 100, 140])
def terminal(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """The lines shown on a terminal so many columns wide."""
    monkeypatch.setattr(output, "terminal_columns", lambda: request.param)

    def lines() -> list[str]:
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= request.param
        return shown

    return lines


def test_versions_keep_their_times_and_sizes_beside_a_long_message(terminal: Callable[[], list[str]]) -> None:
    show_table(table_of([version(12, TEXT), version(11, "")], replica_commands._VERSION_COLUMNS))
    first, *rows = terminal()
    assert first.split()[:7] == ["version", "pushed", "size", "new", "pages", "on", "disk"]
    assert "from" in first
    shown = [row for row in rows if row.split() and row.split()[0] in ("12", "11")]
    assert len(shown) == 2
    for row in shown:
        assert all(cell in row for cell in (clock(AT_MS), "1,234,567", "build-server-07."))
        assert row.count("68 KiB") == 2
    assert "".join(TEXT.split()) in "".join(row.partition("build-server-07.")[2] or row for row in rows).replace(
        " ", ""
    )


def test_reports_can_be_read_to_their_end(terminal: Callable[[], list[str]]) -> None:
    document = json.dumps({"kind": "conflict", "error": TEXT})
    report = replica_commands._report_json(ClientReport(AT_MS, CLIENT, document))
    show_table(table_of([report], replica_commands._REPORT_COLUMNS))
    head, first, *more = terminal()
    assert head.split() == ["at", "kind", "from", "error"]
    assert first.startswith(f"{clock(AT_MS)}  conflict  build-server-07.  before the move")
    assert " ".join([first.partition("07.")[2], *more]).split() == TEXT.split()


def test_replicas_keep_their_times_and_sizes_beside_a_long_name(terminal: Callable[[], list[str]]) -> None:
    name = ReplicaName("shop", "a-much-longer-name-than-most-databases-have.sqlite3")
    replica = Replica("0" * 16, name, AT_MS, 12, 12, 73_728, AT_MS)
    show_table(table_of([ReplicaListing(replica, version(12, ""))], replica_commands._REPLICA_COLUMNS))
    head, first, *more = terminal()
    assert all(cell in first for cell in (clock(AT_MS), "68 KiB", "72 KiB"))
    assert "".join([first.split()[0], *(line.strip() for line in more)]) == name.path
    assert ("changed" in head) == (first.count(clock(AT_MS)) == 2)
