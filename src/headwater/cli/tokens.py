"""`headwater token`: who may use a server, and for what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from headwater.cli.opening import AsJson
from headwater.cli.output import clock, note, printable, say, show_table, table, write_document
from headwater.cli.times import SPAN_HELP, parse_span
from headwater.errors import InvalidOption
from headwater.message import iso, span_ms, time_ms
from headwater.server.scopes import Scopes
from headwater.server.tokens import Token, TokenFile, id_of

token = typer.Typer(
    no_args_is_help=True,
    help="Tokens: who may use a server, and for what.\n\n"
    "[dim]A first one:[/]  headwater token create --subscribe 'orders.>' --label billing",
)

TokensPath = Annotated[
    str, typer.Option("--tokens", metavar="FILE", envvar="HEADWATER_TOKENS", help="The file that keeps them.")
]
Patterns = list[str] | None

DEFAULT_FILE = "headwater.tokens"


@token.command("create")
def create(
    tokens: TokensPath = DEFAULT_FILE,
    publish: Annotated[
        Patterns, typer.Option("--publish", metavar="PATTERN", help="It may publish here. Can be repeated.")
    ] = None,
    subscribe: Annotated[
        Patterns, typer.Option("--subscribe", metavar="PATTERN", help="It may subscribe here. Can be repeated.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may look after the log: dead letters, retention.")] = False,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What it is for.", show_default=False)] = "",
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="SPAN", help=f"Good for so long, {SPAN_HELP}. Else for ever.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once: the file keeps only a hash of it.

    [dim]For a month:[/]  headwater token create --publish 'orders.>' --label shop --expires 30d
    """
    scopes = Scopes(publish=tuple(publish or ()), subscribe=tuple(subscribe or ()), admin=admin)
    if scopes.allow_nothing:
        raise InvalidOption(
            "a token without a scope could do nothing",
            next="Pass --publish PATTERN, --subscribe PATTERN or --admin; the pattern '>' is every topic",
        )
    now_ms = _now_ms()
    expires_ms = None if expires is None else now_ms + span_ms(parse_span(expires, "--expires"), "--expires")
    file = TokenFile(tokens)
    text = file.create(label, scopes, now_ms=now_ms, expires_ms=expires_ms)
    if as_json:
        [made] = [each for each in file.list() if each.id == id_of(text)]
        write_document({"token": text, **_token_json(made, now_ms)})
    else:
        say(text)
    note(f"it will not be shown again; {tokens} keeps only a hash of it")


@token.command("ls")
def list_tokens(tokens: TokensPath = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """List tokens and their scopes, oldest first; never their secrets."""
    found, now_ms = TokenFile(tokens).list(), _now_ms()
    if as_json:
        write_document([_token_json(each, now_ms) for each in found])
        return
    if not found:
        say("no tokens: nobody may connect")
        return
    shown = table("id", "~label", "~publish", "~subscribe", "admin", "created", "expires")
    for each in found:
        shown.add_row(
            each.id,
            printable(each.label) or "-",
            Text(printable(", ".join(each.scopes.publish)) or "-", "cyan"),
            Text(printable(", ".join(each.scopes.subscribe)) or "-", "cyan"),
            "yes" if each.scopes.admin else "-",
            clock(each.created_ms),
            _expiry(each, now_ms),
        )
    show_table(shown)


@token.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, or the whole token.", show_default=False)],
    tokens: TokensPath = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Revoke a token: a running server refuses it from now on."""
    token_id = id_of(id) or id
    if not TokenFile(tokens).revoke(token_id):
        raise InvalidOption(f"there is no token {token_id!r} in {tokens}", next="`headwater token ls` lists them")
    if as_json:
        write_document({"revoked": token_id})
    else:
        say(f"revoked {token_id}")


def _now_ms() -> int:
    return time_ms(datetime.now(UTC))


def _expiry(each: Token, now_ms: int) -> str | Text:
    if each.expires_ms is None:
        return "never"
    return Text("expired", "red") if each.is_expired(now_ms) else clock(each.expires_ms)


def _token_json(each: Token, now_ms: int) -> dict[str, Any]:
    return {
        "id": each.id,
        "label": each.label,
        "publish": each.scopes.publish,
        "subscribe": each.scopes.subscribe,
        "admin": each.scopes.admin,
        "created_at": iso(each.created_ms),
        "expires_at": None if each.expires_ms is None else iso(each.expires_ms),
        "expired": each.is_expired(now_ms),
    }
