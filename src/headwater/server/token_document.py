"""The tokens file: what it may say, who may read it, and how it is replaced."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec

from headwater.errors import InvalidConfiguration, InvalidOption, Locked
from headwater.message import time_ms
from headwater.server.scopes import Scopes

TOKENS_MAX = 10_000
LABEL_CHARS_MAX = 100
TOKENS_FILE_BYTES_MAX = 64 * 1024 * 1024
WRITE_TRIES_MAX = 500
WRITE_TRY_EVERY_S = 0.01
VERSION = 2

Signature: TypeAlias = tuple[int, int, int, int]
_Moment: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token in the file. Unknown fields are refused: a misspelt `expires_at` must not mean "for ever"."""

    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-z]{8,32}\Z")]
    # A slow hash protects secrets that people think up and others can guess. Nobody guesses 256 random bits, however
    # fast each try is; and a slow hash here would let strangers keep the server busy with wrong tokens.
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    label: str
    scopes: Scopes
    created_at: _Moment
    expires_at: _Moment | None

    def __post_init__(self) -> None:
        check_label(self.label)
        _ = self.created_ms, self.expires_ms  # which have limits

    @property
    def created_ms(self) -> int:
        return time_ms(self.created_at, "created_at")

    @property
    def expires_ms(self) -> int | None:
        return None if self.expires_at is None else time_ms(self.expires_at, "expires_at")


Entries: TypeAlias = Mapping[str, Entry]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=TOKENS_MAX)]


class _AnyVersion(msgspec.Struct):
    version: int


class _ScopesOfVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every token could call the application's methods; `subscribe` was also for durable subscriptions of any name,
    `admin` also for what is `manage` now."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    admin: bool = False

    def now(self) -> dict[str, Any]:
        return {
            "publish": self.publish,
            "read": self.subscribe,
            "consume": ("*",) if self.subscribe else (),
            "manage": (">",) if self.admin else (),
            "call": (">",),
            "admin": self.admin,
        }


class _EntryOfVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    sha256: str
    label: str
    scopes: _ScopesOfVersion1
    created_at: _Moment
    expires_at: _Moment | None


class _DocumentOfVersion1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: Annotated[tuple[_EntryOfVersion1, ...], msgspec.Meta(max_length=TOKENS_MAX)]

    def now(self) -> _Document:
        """As the next change of the file writes it."""
        entries = [{**msgspec.to_builtins(each), "scopes": each.scopes.now()} for each in self.tokens]
        return msgspec.convert({"version": VERSION, "tokens": entries}, _Document)


def check_label(label: str) -> None:
    if len(label) > LABEL_CHARS_MAX:
        raise InvalidOption(f"the label has {len(label):,} characters and the limit is {LABEL_CHARS_MAX}")
    if not label.isprintable():
        raise InvalidOption("the label holds characters that cannot be shown", next="Use one line of plain text")


def where(path: str) -> str:
    return f"tokens file {path}"


# --- reading --------------------------------------------------------------------------------------------------------


def signature_at(path: str) -> Signature | None:
    """What tells one state of the file from another; None if there is nothing to look at."""
    try:
        return _signature(os.stat(path))
    except OSError:
        return None


def _signature(found: os.stat_result) -> Signature:
    # With the mode, because `chmod` changes none of the others and may be all that was amiss.
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def read(path: str) -> tuple[Signature, Entries]:
    """The tokens by id, or InvalidConfiguration; its cause is an OSError if the system would not let us read."""
    try:
        # Not blocking, for it might be a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(descriptor)
            _check_file(path, found)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                text = file.read(TOKENS_FILE_BYTES_MAX)
        finally:
            os.close(descriptor)
    except FileNotFoundError as exc:
        raise InvalidConfiguration(
            "there is no such file",
            where=where(path),
            next=f"Make a first token: headwater token create --tokens {shlex.quote(path)} --read '>'",
        ) from exc
    except OSError as exc:
        raise InvalidConfiguration(
            f"it cannot be read ({exc.strerror})", where=where(path), next="Name a file that this user may read"
        ) from exc
    return _signature(found), _decode(path, text)


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidConfiguration("it is not a plain file", where=where(path), next="Name another one")
    if os.name == "posix" and found.st_mode & 0o077:
        raise InvalidConfiguration(
            f"others than its owner may read or write it (mode {stat.S_IMODE(found.st_mode):04o})",
            where=where(path),
            next=f"chmod 600 {shlex.quote(path)}",
        )
    _check_size(path, found.st_size)


def _check_size(path: str, size: int) -> None:
    if size > TOKENS_FILE_BYTES_MAX:
        raise InvalidConfiguration(
            f"it has {size:,} bytes and the limit is {TOKENS_FILE_BYTES_MAX:,}",
            where=where(path),
            next="Revoke tokens, or give them fewer patterns",
        )


def _decode(path: str, text: bytes) -> Entries:
    try:
        version = msgspec.json.decode(text, type=_AnyVersion).version
        if not 1 <= version <= VERSION:
            raise InvalidConfiguration(
                f"it has version {version}, and this Headwater reads versions 1 to {VERSION}",
                where=where(path),
                next="Use the Headwater that wrote it, or make new tokens in another file",
            )
        if version == 1:
            document = msgspec.json.decode(text, type=_DocumentOfVersion1).now()
        else:
            document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidConfiguration(
            f"it makes no sense ({exc})", where=where(path), next="Mend it, or make new tokens in another file"
        ) from exc
    entries = {entry.id: entry for entry in document.tokens}
    if len(entries) < len(document.tokens):
        raise InvalidConfiguration(
            "two tokens have the same id", where=where(path), next="Delete the one that is not meant"
        )
    return entries


# --- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def only_writer(path: str) -> Iterator[int]:
    """A scratch file beside the tokens file, for `replace`; no other process has it meanwhile.

    It is the lock as well: of two commands at once, neither undoes what the other did. Nothing is left behind, and the
    scratch file of a command that was killed is simply taken over.
    """
    scratch = _scratch_of(path)
    try:
        descriptor = _hold(scratch)
        try:
            yield descriptor
        finally:
            if _is_at(descriptor, scratch):  # so it has not become the tokens file
                os.unlink(scratch)
            os.close(descriptor)
    except OSError as exc:
        raise InvalidConfiguration(
            f"it cannot be written ({exc.strerror})", where=where(path), next="Name a file that this user may write"
        ) from exc


def replace(path: str, scratch: int, entries: Entries) -> Signature:
    """Put a file that says this in the place of the tokens file: whole and on disk, or not at all."""
    document = _Document(VERSION, tuple(entries.values()))
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
    return os.path.realpath(path) + ".new"  # beside what a link leads to, so that the link stays one


def _hold(scratch: str) -> int:
    import fcntl  # here, because Windows has none, and the other commands should start there all the same

    for _ in range(WRITE_TRIES_MAX):
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.geteuid():  # who made it could still write to it when it is ours
            os.close(descriptor)
            raise InvalidConfiguration("it belongs to another user", where=scratch, next="Delete it, then try again")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If another command had it before us, it has become the tokens file and is not ours to change.
            if _is_at(descriptor, scratch):
                return descriptor
        except BlockingIOError:
            time.sleep(WRITE_TRY_EVERY_S)
        os.close(descriptor)
    raise Locked("another command is writing it and does not finish", where=scratch, next="Try again later")


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
