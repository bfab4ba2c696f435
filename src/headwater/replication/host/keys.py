"""Push and pull keys: what opens one replica, and nothing else.

A key's text is `hwpush_<id>_<secret>` or `hwpull_<id>_<secret>`. It is shown once, when it is made; the catalogue keeps
a hash of the secret. 256 random bits need no slow hash: nobody guesses them, however fast each try is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from headwater.errors import InvalidOption
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.records import Key, KeyKind, Replica

SECRET_BYTES = 32
ID_BYTES = 6
LABEL_CHARS_MAX = 100

_TEXT = re.compile(r"hw(push|pull)_([0-9a-f]{12})_([0-9a-f]{64})")
# For ids that nobody has, so that they take as long to refuse as those that somebody has.
_NOBODYS_HASH = "0" * 64


def create_key(catalogue: Catalogue, replica: Replica, kind: KeyKind, label: str, now_ms: int) -> str:
    """The text of a new key, which is not to be had again."""
    if len(label) > LABEL_CHARS_MAX or not label.isprintable():
        raise InvalidOption(f"a label is one line of up to {LABEL_CHARS_MAX} characters that can be shown")
    id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
    catalogue.add_key(replica, Key(id, kind, label, now_ms), _hash(secret))
    return f"hw{kind}_{id}_{secret}"


def kind_of(catalogue: Catalogue, replica_id: str, text: str) -> KeyKind | None:
    """Which key of this replica the text is; None if it is none, or not any more."""
    if (found := _TEXT.fullmatch(text)) is None:
        return None
    said, id, secret = found.groups()
    kind, sha256 = catalogue.key(replica_id, id) or (None, _NOBODYS_HASH)
    same = hmac.compare_digest(_hash(secret), sha256)
    return kind if same and kind == said else None


def id_of(text: str) -> str | None:
    """The id in a key's text; None if it is no such text."""
    found = _TEXT.fullmatch(text)
    return found[2] if found else None


def is_key(text: str) -> bool:
    """Whether it looks like a key at all, rather than like a server's token."""
    return _TEXT.fullmatch(text) is not None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
