"""A push under way: a copy of the newest version, which the pages that come are written into."""

from __future__ import annotations

import contextlib
import os
from typing import Literal

import msgspec

from headwater.errors import Corrupt, InvalidOption
from headwater.replication.database_file import remove_database
from headwater.replication.host import disk
from headwater.replication.host.layout import Layout
from headwater.replication.host.records import Replica, Version

PUSH_ID_CHARS_MAX = 128
CLIENT_CHARS_MAX = 300


class Scratch(msgspec.Struct, frozen=True):
    """`path` is where the pages go; there is no file yet if nothing of the newest version can be used. `base` is the
    number of the version that it was made from. `brings_replica`: there is no replica of this name yet."""

    replica: Replica
    path: str
    base: int
    push_id: str
    client: str
    brings_replica: bool

    @property
    def delta_path(self) -> str:
        return self.path.removesuffix(".db") + ".pages"


Base = int | Literal["latest"]


def agreed_base(base: Base, last_push_id: str | None, base_hash: str | None, newest: Version | None) -> int | None:
    """The version that a push is made from, or None if that is not the newest.

    Numbers come again when an old data directory is put back; the hash of the content, where both know it, does not.

    If the newest was made by this client's last push and from the version it names, the answer to that push was lost:
    what it has is the newest.
    """
    number = newest.number if newest is not None else 0
    if base == "latest":
        return number
    if base == number:
        is_another = newest is not None and None not in (base_hash, newest.dbhash) and base_hash != newest.dbhash
        return None if is_another else number
    answer_lost = newest is not None and newest.base == base and newest.push_id == last_push_id
    return number if answer_lost else None


def check_words(push_id: str, client: str) -> None:
    for what, text, limit in (("push id", push_id, PUSH_ID_CHARS_MAX), ("client", client, CLIENT_CHARS_MAX)):
        if len(text) > limit:
            raise InvalidOption(f"the {what} has {len(text):,} characters and the limit is {limit}")
    if not push_id:
        raise InvalidOption("a push needs an id of its own")


def prepare(layout: Layout, scratch: Scratch, newest: Version | None, page_size: int | None) -> None:
    """Its directory, if it is the first of its replica; and the newest version in it, if its pages are as large."""
    home = layout.home(scratch.replica.id)
    with disk.translated(home):
        if newest is None and not os.path.isdir(home):  # else it is there, or was removed just now
            with contextlib.suppress(FileExistsError):
                os.mkdir(home, 0o700)
        if scratch.brings_replica:
            disk.touch(layout.new_mark(scratch.replica.id))
        if newest is None or page_size not in (None, newest.page_size):
            return
        head = layout.head(scratch.replica.id, newest.number)
        if not os.path.exists(head) or os.stat(head).st_size != newest.size:
            raise Corrupt(
                f"version {newest.number} is not on the disk as it was accepted",
                where=scratch.replica.name.path,
                next="On the server, run `headwater replica verify`",
            )
        disk.copy(head, scratch.path)


def clear(layout: Layout, scratch: Scratch) -> None:
    """Whatever is left of it. What cannot be removed now goes when the server starts next."""
    with contextlib.suppress(OSError):
        remove_database(scratch.path)
        disk.remove(scratch.delta_path)
        if scratch.brings_replica:
            disk.remove(layout.new_mark(scratch.replica.id))
            os.rmdir(layout.home(scratch.replica.id))  # refused if a version lies there by now
