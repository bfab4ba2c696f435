"""`headwater replica key`: who may push to or pull from one replica."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli.opening import AsJson
from headwater.cli.output import clock, note, printable, say, show_table, table, write_document
from headwater.cli.replica_json import key_json
from headwater.cli.replica_opening import Directory, Name, directory_first, opened, parse_name
from headwater.errors import InvalidOption
from headwater.replication.host.keys import id_of

key = typer.Typer(
    no_args_is_help=True,
    help="Keys: who may push to or pull from one replica.\n\n"
    "[dim]A first one:[/]  headwater replica key create events.db-replicas shop/app.db --push",
)


@key.command("create")
def create(
    place: Directory,
    name: Name = None,
    push: Annotated[bool, typer.Option("--push", help="It may push and pull.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="It may only pull.")] = False,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What it is for.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only a hash of it is kept.

    From the first key on, nobody uses the replica without one. It need not have been pushed yet.
    """
    if push == pull:
        raise InvalidOption("a key is for pushes or for pulls", next="Pass either --push or --pull")
    directory, [name] = directory_first(place, [name], "key create")
    wanted = parse_name(name)
    with opened(directory) as shelf:
        is_new = shelf.find(wanted) is None
        text = shelf.create_key(wanted, "push" if push else "pull", label)
        [made] = [each for each in shelf.keys(wanted) if each.id == id_of(text)]
    if as_json:
        write_document({"key": text, **key_json(made)})
    else:
        say(text)
    if is_new:
        note(f"made {wanted.path}, which has no version yet")
    note("it will not be shown again; only a hash of it is kept")


@key.command("ls")
def list_keys(place: Directory, name: Name = None, as_json: AsJson = False) -> None:
    """List the keys of a replica, oldest first; never their secrets."""
    directory, [name] = directory_first(place, [name], "key ls")
    wanted = parse_name(name)
    with opened(directory) as shelf:
        found = shelf.keys(wanted)
    if as_json:
        write_document([key_json(each) for each in found])
        return
    if not found:
        say("no keys")
        return
    shown = table("id", "kind", "~label", "created")
    for each in found:
        shown.add_row(each.id, each.kind, printable(each.label) or "-", clock(each.created_ms))
    show_table(shown)


@key.command("revoke")
def revoke(
    place: Directory,
    name: Name = None,
    id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The key's id, or the whole key.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key: a running server refuses it from now on."""
    directory, [name, id] = directory_first(place, [name, id], "key revoke")
    wanted = parse_name(name)
    if id is None:
        raise InvalidOption("which key?", next="`headwater replica key ls` lists them")
    key_id = id_of(id) or id
    with opened(directory) as shelf:
        if not shelf.revoke_key(wanted, key_id):
            raise InvalidOption(f"{wanted.path} has no key {key_id!r}", next="`headwater replica key ls` lists them")
        left = len(shelf.keys(wanted))
    if as_json:
        write_document({"revoked": key_id, "left": left})
    else:
        say(f"revoked {key_id}")
    if not left:
        note("that was the last key: only a token of the server opens it now; key create makes another")
