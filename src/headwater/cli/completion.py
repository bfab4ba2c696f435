"""What a shell offers on Tab: topics, ids of subscriptions, names of replicas. They are read from files alone, through
SQLite and without the library, because a person waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

Kind = Literal["log", "topic", "subscription", "replica"]

WORDS = "headwater.words"  # in the meta of a context: the arguments that stand before what is completed
OFFERED_MAX = 200
STEPS_MAX = 2_000_000  # of SQLite's virtual machine, some 50 ms

_QUERIES = {
    # The newest messages may not be counted yet.
    "topic": """
        SELECT topic FROM topic_counts WHERE substr(topic, 1, length(?1)) = ?1
        UNION
        SELECT topic FROM (SELECT topic FROM messages ORDER BY seq DESC LIMIT 10000)
        WHERE substr(topic, 1, length(?1)) = ?1
        ORDER BY topic LIMIT ?2
    """,
    "subscription": "SELECT id FROM subscriptions WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id LIMIT ?2",
    "replica": """
        SELECT namespace || '/' || name AS path FROM replicas
        WHERE substr(path, 1, length(?1)) = ?1 ORDER BY path LIMIT ?2
    """,
}


def offering(kind: Kind) -> Callable[[Any, str], list[str]]:
    """A function for the parameter `autocompletion` of an argument or an option."""

    def offer(ctx: Any, incomplete: str) -> list[str]:
        try:
            return list(_offered(kind, ctx, incomplete))
        except Exception:  # of a file that is no log, is locked, or is another's: there is nothing to offer
            return []

    return offer


def _offered(kind: Kind, ctx: Any, incomplete: str) -> Iterable[str]:
    from headwater.cli.arguments import default_log

    first = (ctx.meta.get(WORDS) or [""])[0]
    if kind == "replica":
        return _replicas(first, incomplete)
    if kind != "log":
        return _rows(_QUERIES[kind], first or default_log() or "", incomplete)
    # Where LOG has a default, the first word may be what comes after it.
    after = [each for each in ctx.command.params if each.param_type_name == "argument"][1:2]
    names = [
        name
        for each in after
        if default_log() is not None and each._custom_shell_complete is not None
        for name in each._custom_shell_complete(ctx, each, incomplete)
    ]
    return [*(each.value for each in names), *_files(incomplete)]


def _files(incomplete: str) -> list[str]:
    directory, name = os.path.split(incomplete)
    found = [
        os.path.join(directory, each.name) + ("/" if each.is_dir() else "")
        for each in os.scandir(os.path.expanduser(directory) or ".")
        if each.name.startswith(name) and (name or not each.name.startswith("."))
    ]
    beside = ("-wal", "-shm", "-server", "-journal")
    return sorted(each for each in found if not each.endswith(beside))[:OFFERED_MAX]


def _replicas(place: str, incomplete: str) -> list[str]:
    import glob

    from headwater.replication import DIRECTORY_SUFFIX

    known = [place] if os.path.isdir(place) else glob.glob(f"*{DIRECTORY_SUFFIX}")
    names = [name for each in known for name in _rows(_QUERIES["replica"], f"{each}/catalogue.db", incomplete)]
    # The directory may be left out where there is one: a name may stand in its place.
    return names if os.path.isdir(place) else [*names, *_files(incomplete)]


def _rows(query: str, path: str, prefix: str) -> list[str]:
    import apsw

    path = path.removeprefix("sqlite:")
    if not os.path.isfile(path):
        return []
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_progress_handler(lambda: True, STEPS_MAX)
        return [text for (text,) in connection.execute(query, (prefix, OFFERED_MAX))]
    finally:
        connection.close()
