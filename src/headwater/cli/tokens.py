"""`headwater token`: the rights to use a server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.arguments import AsJson, Group
from headwater.cli.output import Text, clock, note, printable, say, show_table, table, write_document, write_items
from headwater.errors import InvalidOptionError
from headwater.formats import DURATION_HELP, iso, parse_duration, span_ms, time_ms

if TYPE_CHECKING:
    from headwater.server.auth import Token

token = Group(
    help="Tokens: the rights to use a server.\n\n"
    "[dim]A first one:[/]  headwater token create --read 'orders.>' --consume billing --label billing",
)

TokensPath = Annotated[
    str, typer.Option("--tokens", metavar="FILE", envvar="HEADWATER_TOKENS", help="The file of tokens.")
]
Patterns = list[str] | None

DEFAULT_FILE = "headwater.tokens"


@token.command("create")
def create(
    tokens: TokensPath = DEFAULT_FILE,
    publish: Annotated[
        Patterns, typer.Option("--publish", metavar="PATTERN", help="Publish to these topics. Repeatable.")
    ] = None,
    read: Annotated[
        Patterns,
        typer.Option("--read", metavar="PATTERN", help="Read these topics, live or by consuming. Repeatable."),
    ] = None,
    consume: Annotated[
        Patterns,
        typer.Option(
            "--consume", metavar="NAME", help="Have durable subscriptions: billing, billing-*, or *. Repeatable."
        ),
    ] = None,
    manage: Annotated[
        Patterns,
        typer.Option(
            "--manage",
            metavar="PATTERN",
            help="Manage these topics: retention, dead letters, subscriptions of other tokens. Repeatable.",
        ),
    ] = None,
    call: Annotated[
        Patterns,
        typer.Option("--call", metavar="PATTERN", help="Call these methods of the application. Repeatable."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Operate the server: health, maintenance, metrics.")] = False,
    label: Annotated[
        str,
        typer.Option(
            "--label",
            metavar="TEXT",
            help="Which service it is for. Tokens of one label share subscriptions and publishers.",
        ),
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="SPAN", help=f"Expires after this long: {DURATION_HELP}. Never by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it once: the file keeps only a hash of it.

    [dim]A shop that publishes:[/]   headwater token create --label shop --publish 'orders.>' --expires 30d
    [dim]A service that works:[/]    headwater token create --label billing --read 'orders.>' --consume 'billing*'
    [dim]A dashboard that looks:[/]  headwater token create --label screen --read 'orders.>'
    [dim]An operator:[/]             headwater token create --label ops --read '>' --consume '*' --manage '>' --admin
    [dim]Prometheus:[/]              headwater token create --label prometheus --admin
    [dim]One that calls:[/]          headwater token create --label till --call 'orders.*'

    No right includes another. A durable subscription belongs to the label that
    made it; a token of another label needs --manage for its topics. To replace
    a token, make a new one of the same label, then revoke the old one.
    """
    from headwater.server.auth import Scopes, TokenFile, id_of

    scopes = Scopes(
        publish=tuple(publish or ()),
        read=tuple(read or ()),
        consume=tuple(consume or ()),
        manage=tuple(manage or ()),
        call=tuple(call or ()),
        admin=admin,
    )
    if scopes.allow_nothing:
        raise InvalidOptionError(
            "a token without a right could do nothing",
            next="Pass --publish, --read, --manage or --call with a PATTERN, --consume NAME, or --admin; "
            "the pattern '>' is every topic",
        )
    if scopes.consume and not scopes.read and not scopes.manage:
        raise InvalidOptionError(
            "a durable subscription reads topics, and this token could read none",
            next="Pass --read PATTERN too; the pattern '>' is every topic",
        )
    now_ms = _now_ms()
    expires_ms = None if expires is None else now_ms + span_ms(parse_duration(expires, "--expires"), "--expires")
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
    """List tokens and their rights, oldest first; never their secrets."""
    from headwater.server.auth import LISTED, TokenFile

    found, now_ms = TokenFile(tokens).list(), _now_ms()
    if as_json:
        write_items([_token_json(each, now_ms) for each in found])
        return
    if not found:
        say("no tokens: no client may connect")
        return
    shown = table("id", "~label", *(f"~{name}" for name in LISTED), "admin", "created", "expires")
    for each in found:
        shown.add_row(
            each.id,
            printable(each.label) or "-",
            *(Text(printable(", ".join(getattr(each.scopes, name))) or "-", "cyan") for name in LISTED),
            "yes" if each.scopes.admin else "-",
            clock(each.created_ms, has_date=True),
            _expiry(each, now_ms),
        )
    show_table(shown)


@token.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, or the whole token.")],
    tokens: TokensPath = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Revoke a token: a running server refuses it from now on."""
    from headwater.server.auth import TokenFile, id_of

    token_id = id_of(id) or id
    if not TokenFile(tokens).revoke(token_id):
        raise InvalidOptionError(f"there is no token {token_id!r} in {tokens}", next="`headwater token ls` lists them")
    if as_json:
        write_document({"revoked": token_id})
    else:
        say(f"revoked {token_id}")


def _now_ms() -> int:
    return time_ms(datetime.now(UTC))


def _expiry(each: Token, now_ms: int) -> str | Text:
    if each.expires_ms is None:
        return "never"
    return Text("expired", "red") if each.is_expired(now_ms) else clock(each.expires_ms, has_date=True)


def _token_json(each: Token, now_ms: int) -> dict[str, Any]:
    from headwater.server.auth import RIGHTS

    return {
        "id": each.id,
        "label": each.label,
        **{name: getattr(each.scopes, name) for name in RIGHTS},
        "created_at": iso(each.created_ms),
        "expires_at": None if each.expires_ms is None else iso(each.expires_ms),
        "expired": each.is_expired(now_ms),
    }
