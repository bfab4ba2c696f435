"""`headwater token`: the rights to use a server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from headwater.cli.arguments import AsJson, Group
from headwater.cli.output import Text, clock, note, show_list, show_result
from headwater.cli.parameters import argument, flag, option
from headwater.errors import InvalidOptionError
from headwater.formats import DURATION_HELP, iso, parse_duration, span_ms, time_ms

if TYPE_CHECKING:
    from headwater.server.auth import Right, Token

token = Group(
    help="Tokens: the rights to use a server.\n\n"
    "[dim]A first one:[/]  headwater token create --read 'orders.>' --consume billing --label billing"
)

TokensPath = Annotated[str, option("FILE", "The file of tokens.", envvar="HEADWATER_TOKENS")]
Patterns = list[str] | None

DEFAULT_FILE = "headwater.tokens"


@token.command("create")
def create(
    tokens: TokensPath = DEFAULT_FILE,
    publish: Annotated[Patterns, option("PATTERN", "Publish to these topics. Repeatable.")] = None,
    read: Annotated[
        Patterns, option("PATTERN", "Read these topics; durable subscriptions need --consume too. Repeatable.")
    ] = None,
    consume: Annotated[
        Patterns, option("NAME", "Use durable subscriptions of these names: billing, billing-*, or *. Repeatable.")
    ] = None,
    manage: Annotated[
        Patterns,
        option("PATTERN", "Manage these topics: retention, dead letters, subscriptions of other tokens. Repeatable."),
    ] = None,
    call: Annotated[Patterns, option("PATTERN", "Call these methods of the application. Repeatable.")] = None,
    admin: Annotated[bool, flag("Operate the server: health, maintenance, metrics.")] = False,
    label: Annotated[
        str, option("TEXT", "Which service it is for. Tokens of one label share subscriptions and publishers.")
    ] = "",
    expires: Annotated[
        str | None, option("SPAN", f"Expires after this long: {DURATION_HELP}. Never by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it once: the file has only its hash.

    [dim]A publisher:[/]   headwater token create --label shop --publish 'orders.>' --expires 30d
    [dim]A consumer:[/]    headwater token create --label billing --read 'orders.>' --consume 'billing*'
    [dim]A dashboard:[/]   headwater token create --label screen --read 'orders.>'
    [dim]An operator:[/]   headwater token create --label ops --read '>' --consume '*' --manage '>' --admin
    [dim]Prometheus:[/]    headwater token create --label prometheus --admin
    [dim]A caller:[/]      headwater token create --label till --call 'orders.*'

    No right includes another. A durable subscription belongs to the label of
    the token that created it; other labels need --manage for its topics. To
    replace a token, create one with the same label, then revoke the old one.
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
    [made] = [each for each in file.list() if each.id == id_of(text)]
    show_result({"token": text, **_token_json(made, now_ms)}, text, as_json=as_json)
    note(f"it will not be shown again; {tokens} keeps only a hash of it")


@token.command("ls")
def list_tokens(tokens: TokensPath = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """List tokens with their rights, oldest first."""
    from headwater.server.auth import LISTED, TokenFile

    found, now_ms = TokenFile(tokens).list(), _now_ms()
    columns: dict[str, Callable[[Token], str | Text]] = {
        "id": lambda each: each.id,
        "~label": lambda each: each.label or "-",
        **{f"~{name}": partial(_patterns, name) for name in LISTED},
        "admin": lambda each: "yes" if each.scopes.admin else "-",
        "created": lambda each: clock(each.created_ms, has_date=True),
        "expires": lambda each: _expiry(each, now_ms),
    }
    empty = "no tokens: no client may connect"
    show_list(found, lambda each: _token_json(each, now_ms), columns, empty=empty, as_json=as_json)


@token.command("revoke")
def revoke(
    id: Annotated[str, argument("ID", "The token's id, or the whole token.")],
    tokens: TokensPath = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Revoke a token: a running server refuses it from now on."""
    from headwater.server.auth import TokenFile, id_of

    token_id = id_of(id) or id
    if not TokenFile(tokens).revoke(token_id):
        raise InvalidOptionError(f"there is no token {token_id!r} in {tokens}", next="`headwater token ls` lists them")
    show_result({"revoked": token_id}, f"revoked {token_id}", as_json=as_json)


def _now_ms() -> int:
    return time_ms(datetime.now(UTC))


def _patterns(right: Right, each: Token) -> Text:
    return Text(", ".join(getattr(each.scopes, right)) or "-", "cyan")


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
