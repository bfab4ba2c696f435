"""Who comes, and who may do what with a replica.

Without tokens and keys, everybody may. A replica with keys, or a server with tokens, asks for its push or pull key, or
for a token whose scopes allow the topic of the replica.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headwater.ports.annex import Refusal, Rights
from headwater.replication.claims import Who
from headwater.replication.host.keys import is_key
from headwater.replication.host.records import Replica
from headwater.replication.host.scratch import CLIENT_CHARS_MAX
from headwater.replication.host.shelf import Shelf
from headwater.replication.host.visit import UNAUTHORIZED, Abort
from headwater.replication.names import ReplicaName, Session

KeyType = Literal["push", "pull", "token", "none"]


class Access(NamedTuple):
    replica: Replica | None
    key_type: KeyType
    may_push: bool
    may_pull: bool
    is_stranger: bool = False
    """Came without a key or token that is known here, where one is needed."""
    key_came: bool = False


def client_of(headers: dict[str, str], address: str) -> str:
    """What a client calls itself, as far as it can be shown; else where it comes from."""
    said = headers.get("x-clientid", "").strip()[:CLIENT_CHARS_MAX]
    return said if said and said.isprintable() else address


def who_of(headers: dict[str, str], bearer: str | None) -> Who:
    """Who has a claim, and may extend or release it: who calls itself the same and came with the same token or key. A
    client that calls itself nothing is known by its connection alone."""
    said = headers.get("x-clientid", "").strip()
    return (bearer, said) if said else object()


def access_to(
    shelf: Shelf,
    name: ReplicaName,
    replica: Replica | None,
    bearer: str | None,
    rights: Rights | None,
    *,
    needs_token: bool,
) -> Access:
    """Blocking."""
    if replica is not None and bearer is not None and (kind := shelf.key_kind(replica, bearer)) is not None:
        return Access(replica, kind, may_push=kind == "push", may_pull=True)
    if rights is not None:
        return Access(replica, "token", rights.may_publish(name.topic), rights.may_read(name.topic))
    # A key that nobody knows would give a false sense of safety where none is asked for.
    has_key = bearer is not None and is_key(bearer)
    if not needs_token and not has_key and (replica is None or not shelf.has_keys(replica)):
        return Access(replica, "none", may_push=True, may_pull=True)
    came = bearer is not None
    return Access(replica, "none", may_push=False, may_pull=False, is_stranger=True, key_came=came)


def refusal_of(access: Access, what: Session) -> Refusal | None:
    """To subscribe, either right will do: who pushes wants to hear of claims, who pulls of versions."""
    if (access.may_push and what != "pull") or (access.may_pull and what != "push"):
        return None
    if access.is_stranger and access.key_came:
        return Refusal(401, "this key or token is not known here: it is wrong, or was revoked\n")
    if access.is_stranger:
        return Refusal(401, f"to {what} needs a key of the replica, or a token of the server that allows it\n")
    return Refusal(403, f"this {_named(access)} does not allow to {what}\n")


def refuse_no_more(access: Access, what: Session) -> None:
    """Of one who was let in: raises Abort when it would not be by now."""
    if refusal_of(access, what) is not None:
        raise no_more(what)


def no_more(what: Session) -> Abort:
    why = "its key or token was revoked or has expired, or one is needed by now"
    return Abort(UNAUTHORIZED, f"this client may not {what} any more: {why}")


def _named(access: Access) -> str:
    return "token" if access.key_type == "token" else f"{access.key_type} key"
