"""What `headwater doctor` finds out about a log in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.cli.findings import Finding, Level
from headwater.cli.output import some
from headwater.cli.times import say_size, say_span

CONNECTIONS_SHARE_NOTED = 0.8
OLD_TRANSACTION_S_NOTED = 60
DEAD_SHARE_NOTED = 0.5
DEAD_TUPLES_NOTED = 100_000


def database_findings(health: dict[str, Any]) -> Iterator[Finding]:
    yield Finding(
        "postgres", "ok", f"{health['postgres']}, schema {health['schema']}, {say_size(health['file_bytes'])}"
    )
    yield Finding("writing", "ok", "a transaction could be committed")
    yield from _durability(health)
    yield _connections(health)
    yield _vacuum(health)
    yield _oldest(health)


def _durability(health: dict[str, Any]) -> Iterator[Finding]:
    level: Level = "ok" if health["durability"] == "full" else "note"
    yield Finding("durability", level, f"{health['durability']}, when opened like this; each process chooses its own")
    for setting in ("fsync", "full_page_writes"):
        if health[setting] != "on":
            what = f"the server runs with {setting} = {health[setting]}: a crash of the machine may lose everything"
            yield Finding(setting, "wrong", what, f"Set {setting} = on in postgresql.conf and restart")


def _connections(health: dict[str, Any]) -> Finding:
    used, most = health["connections"], health["max_connections"]
    what = f"{used} of at most {most}"
    if used > most * CONNECTIONS_SHARE_NOTED:
        return Finding("connections", "note", what, "Raise max_connections, or share logs within a process")
    return Finding("connections", "ok", what)


def _vacuum(health: dict[str, Any]) -> Finding:
    dead, live = sum(health["dead_tuples"].values()), sum(health["live_tuples"].values())
    what = f"{some(dead, 'dead row')} beside {live:,} live ones"
    if health["autovacuum"] != "on":
        return Finding("vacuum", "wrong", f"autovacuum is off; {what}", "Set autovacuum = on")
    if dead > DEAD_TUPLES_NOTED and dead > live * DEAD_SHARE_NOTED:
        next = "Look for a transaction that is open for long; autovacuum cannot clean behind it"
        return Finding("vacuum", "note", what, next)
    return Finding("vacuum", "ok", what)


def _oldest(health: dict[str, Any]) -> Finding:
    age_s = health["oldest_reader_s"]
    if age_s > OLD_TRANSACTION_S_NOTED:
        what = f"{health['oldest_reader']} has been in a transaction for {say_span(age_s * 1000)}"
        return Finding("oldest transaction", "note", what, "End it: what was deleted since cannot be cleaned up")
    return Finding("oldest transaction", "ok", "none holds the clean-up back")
