"""Who may connect: tokens, kept in one small file beside the log.

A token's text is `hw_<id>_<secret>`. The id names it in listings and logs; the secret is shown once, when the token is
made, and only its hash is kept. Commands write the file; a running server reads it again whenever it has changed, so
that a new token works, and a revoked one stops working, without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading

import msgspec

from headwater.errors import InvalidConfiguration, InvalidOption, TooLarge
from headwater.message import TIME_MS_MAX, datetime_of
from headwater.server import token_document
from headwater.server.logger import logger
from headwater.server.scopes import Scopes
from headwater.server.token_document import TOKENS_MAX, Entries, Entry, Signature

SECRET_BYTES = 32
ID_BYTES = 6

_TEXT = re.compile(r"hw_([0-9a-z]{8,32})_([0-9a-f]{64})")
# For ids that nobody has, so that they take as long to refuse as those that somebody has.
_NOBODYS_HASH = "0" * 64


class Token(msgspec.Struct, frozen=True):
    """A token as it may be shown: everything but its secret."""

    id: str
    label: str
    scopes: Scopes
    created_ms: int
    expires_ms: int | None

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


class Grant(msgspec.Struct, frozen=True):
    """What the bearer of a token may do, and until when."""

    token_id: str
    label: str
    scopes: Scopes
    expires_ms: int | None

    @property
    def owner(self) -> str:
        """To whom its subscriptions and publishers belong. Tokens of one label are one owner, so that a new token can
        go on where the one that it replaces ended."""
        return f"label:{self.label}" if self.label else f"token:{self.token_id}"


class TokenFile:
    """The tokens in the file at `path`. May be used from several threads, and while other processes write the file.

    Whoever asks gets what the file says now. If it cannot be read or makes no sense, the first to ask gets
    InvalidConfiguration; later on the last good set stays in force, and a warning is logged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.RLock()
        self._entries: Entries | None = None
        self._seen: Signature | None = None
        self._generation = 0
        self._complaint = ""

    # --- for servers --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the file, or raise InvalidConfiguration saying what is wrong with it."""
        with self._lock:
            self._accept(*token_document.read(self.path))

    def changed(self) -> bool:
        """Whether the file is another than the one last read."""
        return token_document.signature_at(self.path) != self._seen

    def refresh(self) -> int:
        """Read the file if it has changed; returns a number that grows with every set of tokens read.

        When it has grown, those who are connected may have lost their rights: ask `grant` about each.
        """
        with self._lock:
            if self._entries is None:
                self.load()
            elif self.changed():
                self._try_again()
            return self._generation

    def check(self, text: str, now_ms: int) -> Grant | None:
        """What the bearer of this text may do; None if it is no token, or not any more."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        id, secret = found.groups()
        entry = self._current().get(id)
        same = hmac.compare_digest(_hash(secret), entry.sha256 if entry else _NOBODYS_HASH)
        return _grant(entry, now_ms) if entry and same else None

    def grant(self, token_id: str, now_ms: int) -> Grant | None:
        """What `check` would say now to the bearer of a token who has been let in already."""
        entry = self._current().get(token_id)
        return _grant(entry, now_ms) if entry else None

    # --- for commands -------------------------------------------------------------------------------------------------

    def create(self, label: str, scopes: Scopes, *, now_ms: int, expires_ms: int | None = None) -> str:
        """Add a token to the file, which is made if need be. Returns its text, which is not to be had again."""
        token_document.check_label(label)
        if expires_ms is not None and not now_ms < expires_ms <= TIME_MS_MAX:
            raise InvalidOption("a token expires in the future, before the year 10000", next="Give it another time")
        with self._lock, token_document.only_writer(self.path) as scratch:
            entries = dict(token_document.read(self.path)[1]) if os.path.exists(self.path) else {}
            if len(entries) >= TOKENS_MAX:
                raise TooLarge(
                    f"there are {len(entries):,} tokens and the limit is {TOKENS_MAX:,}",
                    where=token_document.where(self.path),
                    next="Revoke those that nobody uses or that have expired",
                )
            id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
            while id in entries:
                id = secrets.token_hex(ID_BYTES)
            expires_at = None if expires_ms is None else datetime_of(expires_ms)
            entries[id] = Entry(id, _hash(secret), label, scopes, datetime_of(now_ms), expires_at)
            self._accept(token_document.replace(self.path, scratch, entries), entries)
        return f"hw_{id}_{secret}"

    def revoke(self, token_id: str) -> bool:
        """Take a token from the file; False if it is not there."""
        with self._lock, token_document.only_writer(self.path) as scratch:
            entries = dict(token_document.read(self.path)[1])
            if entries.pop(token_id, None) is None:
                return False
            self._accept(token_document.replace(self.path, scratch, entries), entries)
        return True

    def list(self) -> tuple[Token, ...]:
        """All of them, expired ones too, oldest first."""
        return tuple(sorted(map(_token, self._current().values()), key=lambda token: (token.created_ms, token.id)))

    # --- the set in force ---------------------------------------------------------------------------------------------

    def _current(self) -> Entries:
        with self._lock:
            self.refresh()
            return self._entries or {}

    def _accept(self, signature: Signature, entries: Entries) -> None:
        self._seen, self._entries = signature, entries
        self._generation += 1
        self._complaint = ""

    def _try_again(self) -> None:
        looked_at = token_document.signature_at(self.path)
        try:
            self._accept(*token_document.read(self.path))
        except InvalidConfiguration as exc:
            # What makes no sense will make none until it changes. What the system refused, it may grant next time.
            if not isinstance(exc.__cause__, OSError):
                self._seen = looked_at
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                logger.warning("the tokens read before stay in force: %s", exc)


def id_of(text: str) -> str | None:
    """The id in a token's text; None if it is no such text."""
    found = _TEXT.fullmatch(text)
    return found[1] if found else None


def _token(entry: Entry) -> Token:
    return Token(entry.id, entry.label, entry.scopes, entry.created_ms, entry.expires_ms)


def _grant(entry: Entry, now_ms: int) -> Grant | None:
    if _token(entry).is_expired(now_ms):
        return None
    return Grant(entry.id, entry.label, entry.scopes, entry.expires_ms)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
