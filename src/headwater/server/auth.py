"""Authentication and authorization: the rights of a token, and the file of tokens beside the log.

A token's text is `hw_<id>_<secret>`. The id names it in listings and logs; the secret is shown once, when the token is
created, and only its hash is stored. Commands write the file; a running server reads it again whenever it has changed,
so that a new token works, and a revoked one stops working, without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from headwater.errors import (
    InvalidConfigurationError,
    InvalidOptionError,
    InvalidPatternError,
    LockedError,
    TooLargeError,
    UnauthorizedError,
)
from headwater.formats import TIME_MS_MAX, datetime_of, time_ms
from headwater.server.logging import logger
from headwater.topics import Pattern, covers, parse_pattern

TOKENS_MAX = 10_000
LABEL_CHARS_MAX = 100
SECRET_BYTES = 32
ID_BYTES = 6
TOKENS_FILE_BYTES_MAX = 64 * 1024 * 1024
WRITE_TRIES_MAX = 500
WRITE_TRY_EVERY_S = 0.01
VERSION = 2
PATTERNS_PER_SCOPE_MAX = 64

Right: TypeAlias = Literal["publish", "read", "consume", "manage", "call", "admin"]
OF_TOPICS: tuple[Right, ...] = ("publish", "read", "manage", "call")  # a method's name is dotted like a topic
LISTED: tuple[Right, ...] = ("publish", "read", "consume", "manage", "call")
RIGHTS: tuple[Right, ...] = (*LISTED, "admin")

# A subscription's name, or the beginning of one and *.
_NAMES = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\*?")
_TOKEN = re.compile(r"hw_([0-9a-z]{8,32})_([0-9a-f]{64})")
_UNKNOWN_HASH = "0" * 64  # compared for unknown ids, so that refusing them takes as long as for known ones

Signature: TypeAlias = tuple[int, int, int, int]
_Time: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]


# --- scopes ---------------------------------------------------------------------------------------------------------


class Scopes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The rights of a token; none implies another.

    `publish`: to topics that match. `read`: topics that match, live or in a durable subscription. `consume`: durable
    subscriptions of these names (`billing`, `billing-*`, `*`). `manage`: subscriptions of others,
    retention and dead letters of topics that match. `call`: methods of the application whose names match. `admin`: the
    server.
    """

    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    admin: bool = False

    def __post_init__(self) -> None:
        for name in LISTED:
            msgspec.structs.force_setattr(self, name, _texts(name, getattr(self, name)))
        for text in self.consume:
            if not isinstance(text, str) or not _NAMES.fullmatch(text):
                raise InvalidOptionError(
                    f"{text!r} names no subscriptions",
                    where="consume scope",
                    next="Write a name, the beginning of names like 'billing-*', or '*'",
                )
        if not isinstance(self.admin, bool):
            raise InvalidOptionError(f"the admin scope is true or false, not {self.admin!r}")
        _ = self._patterns  # an invalid pattern raises here, and not at the first message

    @property
    def allow_nothing(self) -> bool:
        return not any(getattr(self, name) for name in RIGHTS)

    @property
    def granted(self) -> dict[str, Any]:
        return {name: given for name in RIGHTS if (given := getattr(self, name))}

    def has(self, right: Right) -> bool:
        """Whether it grants this right for at least one topic, name or method."""
        return bool(getattr(self, right))

    def may_publish(self, topic: str) -> bool:
        """`topic` is valid for `check_topic`."""
        return self._matches("publish", topic)

    def may_call(self, method: str) -> bool:
        return self._matches("call", method)

    def may_look_at(self, topic: str) -> bool:
        """Whether it grants the right to read or to manage it."""
        return self.reads(topic) or self.manages(topic)

    def reads(self, topic: str) -> bool:
        return self._matches("read", topic)

    def may_read(self, pattern: Pattern) -> bool:
        """Whether one allowed pattern covers all topics of `pattern`; several patterns are not combined."""
        return self._covers("read", pattern)

    def may_manage(self, pattern: Pattern) -> bool:
        return self._covers("manage", pattern)

    def manages(self, topic: str) -> bool:
        return self._matches("manage", topic)

    def may_consume(self, name: str) -> bool:
        return any(
            name.startswith(text[:-1]) if text.endswith("*") else name == text
            for text in self.consume  # a name holds no *
        )

    def may_use(self, name: str, pattern: Pattern, *, is_own: bool) -> bool:
        """Whether a durable subscription may be held, inspected, moved and deleted: the token may consume its name, and
        it belongs to this token or to none; or the token may manage its topics."""
        return self.may_manage(pattern) or (is_own and self.may_consume(name))

    @property
    def may_watch(self) -> bool:
        """The metrics of the whole server."""
        return self.admin or self.may_manage(_ALL)

    def _matches(self, right: Right, topic: str) -> bool:
        return any(pattern.matches(topic) for pattern in self._patterns[right])

    def _covers(self, right: Right, pattern: Pattern) -> bool:
        return any(covers(allowed, pattern) for allowed in self._patterns[right])

    # A frozen struct caches a property only with `dict=True`.
    @cached_property
    def _patterns(self) -> dict[Right, tuple[Pattern, ...]]:
        return {name: tuple(_pattern(name, text) for text in getattr(self, name)) for name in OF_TOPICS}


def _texts(name: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidOptionError(
            f"the {name} scope is a list of patterns, not {type(given).__name__}", next="Write it like ['orders.>']"
        )
    texts = tuple(given)
    if len(texts) > PATTERNS_PER_SCOPE_MAX:
        raise InvalidOptionError(
            f"the {name} scope has {len(texts):,} patterns and the limit is {PATTERNS_PER_SCOPE_MAX}",
            next="Use wildcards, or several tokens",
        )
    return texts


def parse_any_spelling(text: str) -> Pattern:
    """A pattern in either dialect: only AMQP has '#', and only NATS has '>'."""
    return parse_pattern(text, "amqp" if isinstance(text, str) and "#" in text else "nats")


def _pattern(name: str, text: str) -> Pattern:
    try:
        return parse_any_spelling(text)
    except InvalidPatternError as exc:
        raise type(exc)(exc.why, where=f"{name} scope, {exc.where}", next=exc.next) from exc


def not_allowed(right: str, what: str) -> UnauthorizedError:
    of_all = what == ">"  # what a command asks for if it names no pattern
    narrower = "Name a pattern that the token covers, like 'orders.>', or ask" if of_all else "Ask"
    return UnauthorizedError(
        f"the token has no {right} right for {'all topics' if of_all else 'this'}",
        where="" if of_all else what,
        next=f"{narrower} for a token with --{right.replace(' or ', ' or --')}: headwater token create",
    )


_ALL = parse_pattern(">")
# The rights of every client of a server without tokens.
EVERYTHING = Scopes(publish=(">",), read=(">",), consume=("*",), manage=(">",), call=(">",), admin=True)


# --- tokens ---------------------------------------------------------------------------------------------------------


class Grant(msgspec.Struct, frozen=True):
    """The rights of a client that has authenticated with a token."""

    token_id: str
    label: str
    scopes: Scopes
    expires_ms: int | None

    @property
    def owner(self) -> str:
        """The owner of its subscriptions and publishers. Tokens with the same label have the same owner, so that a
        new token continues where the one it replaces ended."""
        return f"label:{self.label}" if self.label else f"token:{self.token_id}"


class TokenFile:
    """The tokens in the file at `path`. May be used from several threads, and while other processes write the file.

    Every lookup sees the current content of the file. If it is unreadable or invalid, the first lookup raises
    InvalidConfigurationError; later ones use the last valid content, and a warning is logged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.RLock()
        self._tokens: Tokens | None = None
        self._seen: Signature | None = None
        self._generation = 0
        self._reported = ""

    # --- for servers --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the file, or raise InvalidConfigurationError."""
        with self._lock:
            self._accept(*read_tokens(self.path))

    def changed(self) -> bool:
        """Whether the file has changed since it was read."""
        return _signature_at(self.path) != self._seen

    def refresh(self) -> int:
        """Read the file if it has changed; returns a number that grows with every change.

        When it has grown, connected clients may have lost their rights: call `grant` for each.
        """
        with self._lock:
            if self._tokens is None:
                self.load()
            elif self.changed():
                self._reload()
            return self._generation

    def check(self, text: str, now_ms: int) -> Grant | None:
        """Authenticate; None if the token is unknown or expired."""
        found = _TOKEN.fullmatch(text)
        if found is None:
            return None
        id, secret = found.groups()
        token = self._current().get(id)
        same = hmac.compare_digest(_hash(secret), token.sha256 if token else _UNKNOWN_HASH)
        return _grant(token, now_ms) if token and same else None

    def grant(self, token_id: str, now_ms: int) -> Grant | None:
        """The current rights of an authenticated token; None if it was revoked or has expired."""
        token = self._current().get(token_id)
        return _grant(token, now_ms) if token else None

    # --- for commands -------------------------------------------------------------------------------------------------

    def create(self, label: str, scopes: Scopes, *, now_ms: int, expires_ms: int | None = None) -> str:
        """Add a token to the file, which is created if it does not exist. Returns its text, which is not stored."""
        check_label(label)
        if expires_ms is not None and not now_ms < expires_ms <= TIME_MS_MAX:
            raise InvalidOptionError(
                "a token expires in the future, before the year 10000", next="Give it another time"
            )
        with self._lock, _exclusive_writer(self.path) as scratch:
            tokens = dict(read_tokens(self.path)[1]) if os.path.exists(self.path) else {}
            if len(tokens) >= TOKENS_MAX:
                raise TooLargeError(
                    f"there are {len(tokens):,} tokens and the limit is {TOKENS_MAX:,}",
                    where=_where(self.path),
                    next="Revoke those that are unused or expired",
                )
            id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
            while id in tokens:
                id = secrets.token_hex(ID_BYTES)
            expires_at = None if expires_ms is None else datetime_of(expires_ms)
            tokens[id] = Token(id, _hash(secret), label, scopes, datetime_of(now_ms), expires_at)
            self._accept(write_tokens(self.path, scratch, tokens), tokens)
        return f"hw_{id}_{secret}"

    def revoke(self, token_id: str) -> bool:
        """Remove a token from the file; False if there is none with this id."""
        with self._lock, _exclusive_writer(self.path) as scratch:
            tokens = dict(read_tokens(self.path)[1])
            if tokens.pop(token_id, None) is None:
                return False
            self._accept(write_tokens(self.path, scratch, tokens), tokens)
        return True

    def list(self) -> tuple[Token, ...]:
        """All tokens, including expired ones, oldest first."""
        return tuple(sorted(self._current().values(), key=lambda token: (token.created_ms, token.id)))

    # --- the current content ------------------------------------------------------------------------------------------

    def _current(self) -> Tokens:
        with self._lock:
            self.refresh()
            return self._tokens or {}

    def _accept(self, signature: Signature, tokens: Tokens) -> None:
        self._seen, self._tokens = signature, tokens
        self._generation += 1
        self._reported = ""

    def _reload(self) -> None:
        looked_at = _signature_at(self.path)
        try:
            self._accept(*read_tokens(self.path))
        except InvalidConfigurationError as exc:
            # Invalid content stays invalid until the file changes. An error of the system may be temporary.
            if not isinstance(exc.__cause__, OSError):
                self._seen = looked_at
            if str(exc) != self._reported:
                self._reported = str(exc)
                logger.warning("the tokens read before stay in force: %s", exc)


def id_of(text: str) -> str | None:
    """The id in a token's text; None if it is no such text."""
    found = _TOKEN.fullmatch(text)
    return found[1] if found else None


def _grant(token: Token, now_ms: int) -> Grant | None:
    if token.is_expired(now_ms):
        return None
    return Grant(token.id, token.label, token.scopes, token.expires_ms)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


# --- the file of tokens ---------------------------------------------------------------------------------------------


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token in the file. Unknown fields are refused: a misspelt `expires_at` must not mean "for ever"."""

    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-z]{8,32}\Z")]
    # A slow hash protects secrets that can be guessed. 256 random bits cannot be, however fast each try is, and a slow
    # hash would let unauthenticated clients keep the server busy with wrong tokens.
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    label: str
    scopes: Scopes
    created_at: _Time
    expires_at: _Time | None

    def __post_init__(self) -> None:
        check_label(self.label)
        _ = self.created_ms, self.expires_ms  # raises if they are out of range

    @property
    def created_ms(self) -> int:
        return time_ms(self.created_at, "created_at")

    @property
    def expires_ms(self) -> int | None:
        return None if self.expires_at is None else time_ms(self.expires_at, "expires_at")

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


Tokens: TypeAlias = Mapping[str, Token]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=TOKENS_MAX)]


class _AnyVersion(msgspec.Struct):
    version: int


class _ScopesOfVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every token could call the application's methods; `subscribe` included durable subscriptions of any name, and
    `admin` included the right that is `manage` now."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    admin: bool = False

    def upgrade(self) -> dict[str, Any]:
        return {
            "publish": self.publish,
            "read": self.subscribe,
            "consume": ("*",) if self.subscribe else (),
            "manage": (">",) if self.admin else (),
            "call": (">",),
            "admin": self.admin,
        }


class _DocumentOfVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: list[dict[str, Any]]

    def upgrade(self) -> _Document:
        old = [(each, msgspec.convert(each.get("scopes"), _ScopesOfVersion1)) for each in self.tokens]
        tokens = [{**each, "scopes": scopes.upgrade()} for each, scopes in old]
        return msgspec.convert({"version": VERSION, "tokens": tokens}, _Document)


def check_label(label: str) -> None:
    if len(label) > LABEL_CHARS_MAX:
        raise InvalidOptionError(f"the label has {len(label):,} characters and the limit is {LABEL_CHARS_MAX}")
    if not label.isprintable():
        raise InvalidOptionError("the label holds characters that cannot be shown", next="Use one line of plain text")


def _where(path: str) -> str:
    return f"tokens file {path}"


# --- reading --------------------------------------------------------------------------------------------------------


def _signature_at(path: str) -> Signature | None:
    """Differs whenever the file has changed; None if there is no file."""
    try:
        return _signature(os.stat(path))
    except OSError:
        return None


def _signature(found: os.stat_result) -> Signature:
    # With the mode, because `chmod` changes none of the others and may be the correction.
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def read_tokens(path: str) -> tuple[Signature, Tokens]:
    """The tokens by id; raises InvalidConfigurationError, with an OSError as the cause if the file cannot be read."""
    try:
        # Not blocking, because it might be a pipe without a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(descriptor)
            _check_file(path, found)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                text = file.read(TOKENS_FILE_BYTES_MAX)
        finally:
            os.close(descriptor)
    except FileNotFoundError as exc:
        raise InvalidConfigurationError(
            "there is no such file",
            where=_where(path),
            next=f"Make a first token: headwater token create --tokens {shlex.quote(path)} --read '>'",
        ) from exc
    except OSError as exc:
        raise InvalidConfigurationError(
            f"it cannot be read ({exc.strerror})", where=_where(path), next="Name a file that this user may read"
        ) from exc
    return _signature(found), _decode(path, text)


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidConfigurationError("it is not a plain file", where=_where(path), next="Name another one")
    if os.name == "posix" and found.st_mode & 0o077:
        raise InvalidConfigurationError(
            f"others than its owner may read or write it (mode {stat.S_IMODE(found.st_mode):04o})",
            where=_where(path),
            next=f"chmod 600 {shlex.quote(path)}",
        )
    _check_size(path, found.st_size)


def _check_size(path: str, size: int) -> None:
    if size > TOKENS_FILE_BYTES_MAX:
        raise InvalidConfigurationError(
            f"it has {size:,} bytes and the limit is {TOKENS_FILE_BYTES_MAX:,}",
            where=_where(path),
            next="Revoke tokens, or give them fewer patterns",
        )


def _decode(path: str, text: bytes) -> Tokens:
    try:
        version = msgspec.json.decode(text, type=_AnyVersion).version
        if not 1 <= version <= VERSION:
            raise InvalidConfigurationError(
                f"it has version {version}, and this Headwater reads versions 1 to {VERSION}",
                where=_where(path),
                next="Use the Headwater that wrote it, or make new tokens in another file",
            )
        if version == 1:
            document = msgspec.json.decode(text, type=_DocumentOfVersion1).upgrade()
        else:
            document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidConfigurationError(
            f"it is not valid ({exc})", where=_where(path), next="Correct it, or make new tokens in another file"
        ) from exc
    tokens = {token.id: token for token in document.tokens}
    if len(tokens) < len(document.tokens):
        raise InvalidConfigurationError(
            "two tokens have the same id", where=_where(path), next="Delete the one that is not meant"
        )
    return tokens


# --- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def _exclusive_writer(path: str) -> Iterator[int]:
    """A scratch file beside the tokens file, for `write_tokens`; no other process has it meanwhile.

    It is also the lock: of two commands at once, neither overwrites the change of the other. The scratch file of a
    command that was killed is reused.
    """
    scratch = _scratch_of(path)
    try:
        descriptor = _hold(scratch)
        try:
            yield descriptor
        finally:
            if _is_at(descriptor, scratch):  # it has not become the tokens file
                os.unlink(scratch)
            os.close(descriptor)
    except OSError as exc:
        raise InvalidConfigurationError(
            f"it cannot be written ({exc.strerror})", where=_where(path), next="Name a file that this user may write"
        ) from exc


def write_tokens(path: str, scratch: int, tokens: Tokens) -> Signature:
    """Replace the tokens file atomically and durably."""
    document = _Document(VERSION, tuple(tokens.values()))
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    _check_size(path, len(text))
    target = os.path.realpath(path)
    os.ftruncate(scratch, 0)
    os.fchmod(scratch, 0o600)
    with os.fdopen(scratch, "wb", closefd=False) as file:
        file.write(text)
    if os.geteuid() == 0 and os.path.exists(target):  # the server need not run as root, and must still read it
        owner = os.stat(target)
        os.fchown(scratch, owner.st_uid, owner.st_gid)
    os.fsync(scratch)
    os.replace(_scratch_of(path), target)
    directory = os.open(os.path.dirname(target), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return _signature(os.fstat(scratch))


def _scratch_of(path: str) -> str:
    return os.path.realpath(path) + ".new"  # beside the target of a link, so that the link stays


def _hold(scratch: str) -> int:
    import fcntl  # here, because Windows has none, and the other commands should work there

    for _ in range(WRITE_TRIES_MAX):
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.geteuid():  # its creator could still write to it later
            os.close(descriptor)
            raise InvalidConfigurationError(
                "it belongs to another user", where=scratch, next="Delete it, then try again"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If another command had it before, it has become the tokens file.
            if _is_at(descriptor, scratch):
                return descriptor
        except BlockingIOError:
            time.sleep(WRITE_TRY_EVERY_S)
        os.close(descriptor)
    raise LockedError("another command is writing it and does not finish", where=scratch, next="Try again later")


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
