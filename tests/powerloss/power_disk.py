"""A disk that can lose power: what SQLite did to its files, and every state a cut could leave them in.

The recorder is a SQLite VFS. It does what the real one does and writes down each write, truncation, sync, creation and
deletion, in order, among marks that the workload puts in. `Disk` replays such a record. A sync makes a file's content
durable. What came after a file's last sync is at risk: of every write each sector may have reached the disk or not,
independently of all others, so later ones may be there without earlier ones. Directory entries are at risk until
the next sync of a new journal or WAL (SQLite's own VFS syncs the directory then), and are kept in order, as journaling
file systems do. The -shm file is no durable state and is in no image.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import apsw

SECTOR = 512
PAGE = 4096


class Write(NamedTuple):
    file: str
    offset: int
    data: bytes


class Truncate(NamedTuple):
    file: str
    size: int


class Sync(NamedTuple):
    file: str


class Create(NamedTuple):
    file: str


class Delete(NamedTuple):
    file: str
    directory_too: bool


class Mark(NamedTuple):
    """Something the workload got confirmed or is about to do."""

    what: str
    about: Any


Step = Write | Truncate | Sync | Create | Delete | Mark


class Recorder(apsw.VFS):
    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[Step] = []
        self.lock = threading.RLock()
        super().__init__(name, "")

    def mark(self, what: str, about: Any = None) -> None:
        with self.lock:
            self.steps.append(Mark(what, about))

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if not path:
            return apsw.VFSFile("", name, flags)
        with self.lock:
            is_new = not os.path.exists(path)
            file = _RecordedFile(self, name, path, flags)
            if is_new and os.path.exists(path):
                self.steps.append(Create(os.path.basename(path)))
            return file

    def xDelete(self, name: str, syncdir: bool) -> None:
        with self.lock:
            super().xDelete(name, syncdir)
            self.steps.append(Delete(os.path.basename(name), syncdir))


class _RecordedFile(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: Any, path: str, flags: list[int]) -> None:
        self._recorder = recorder
        self._file = os.path.basename(path)
        super().__init__("", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        with self._recorder.lock:
            super().xWrite(data, offset)
            self._recorder.steps.append(Write(self._file, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        with self._recorder.lock:
            super().xTruncate(newsize)
            self._recorder.steps.append(Truncate(self._file, newsize))

    def xSync(self, flags: int) -> None:
        # The real sync is left out: the disk that counts is the one replayed from the record.
        with self._recorder.lock:
            self._recorder.steps.append(Sync(self._file))


# --- replay ---------------------------------------------------------------------------------------------------------


class Fate(NamedTuple):
    """How the dice fall for what was not synced: the share of pieces kept, how large a piece is, how many are torn."""

    kept: float
    piece: int = SECTOR
    torn: float = 0.0


NOTHING, EVERYTHING = Fate(0.0), Fate(1.0)


class _Inode:
    def __init__(self) -> None:
        self.durable = bytearray()
        self.at_risk: list[Write | Truncate] = []

    def sync(self) -> None:
        for step in self.at_risk:
            _apply(self.durable, step)
        self.at_risk.clear()

    def after_cut(self, fate: Fate, dice: random.Random) -> bytes:
        content = bytearray(self.durable)
        for step in self.at_risk:
            if isinstance(step, Truncate):
                if dice.random() < fate.kept:
                    _apply(content, step)
                continue
            for piece in _pieces(step, fate.piece):
                if dice.random() < fate.kept:
                    torn = dice.random() < fate.torn
                    _apply(
                        content, piece._replace(data=piece.data[: dice.randrange(len(piece.data))]) if torn else piece
                    )
        return bytes(content)


class Disk:
    """Replay steps into it; ask for an image whenever the power shall fail."""

    def __init__(self) -> None:
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._names_at_risk: list[tuple[str, _Inode | None]] = []
        self._new: set[str] = set()

    def replay(self, step: Step) -> None:
        match step:
            case Create(file):
                self._link(file, _Inode())
                self._new.add(file)
            case Delete(file, directory_too):
                self._link(file, None)
                if directory_too:
                    self._sync_directory()
            case Write(file) | Truncate(file):
                self._names[file].at_risk.append(step)
            case Sync(file):
                self._names[file].sync()
                if file in self._new and not file.endswith(".db"):
                    self._sync_directory()
                    self._new.discard(file)
            case Mark():
                pass

    def image(self, fate: Fate, dice: random.Random) -> dict[str, bytes]:
        """File name -> content, one possible state after a cut right here."""
        names = dict(self._durable_names)
        if fate.kept in (0.0, 1.0):
            lived_to_see = round(fate.kept) * len(self._names_at_risk)
        else:
            lived_to_see = dice.randint(0, len(self._names_at_risk))
        for file, inode in self._names_at_risk[:lived_to_see]:
            _set(names, file, inode)
        return {file: inode.after_cut(fate, dice) for file, inode in names.items()}

    def _link(self, file: str, inode: _Inode | None) -> None:
        _set(self._names, file, inode)
        self._names_at_risk.append((file, inode))

    def _sync_directory(self) -> None:
        for file, inode in self._names_at_risk:
            _set(self._durable_names, file, inode)
        self._names_at_risk.clear()


def _set(names: dict[str, _Inode], file: str, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(file, None)
    else:
        names[file] = inode


def _apply(content: bytearray, step: Write | Truncate) -> None:
    if isinstance(step, Truncate):
        del content[step.size :]
        content.extend(bytes(step.size - len(content)))
        return
    end = step.offset + len(step.data)
    if step.data and len(content) < end:
        content.extend(bytes(end - len(content)))
    content[step.offset : end] = step.data


def _pieces(write: Write, size: int) -> Iterator[Write]:
    """A write cut at the disk's sector boundaries; bytes outside of it are never at risk."""
    start, end = write.offset, write.offset + len(write.data)
    while start < end:
        stop = min((start // size + 1) * size, end)
        yield Write(write.file, start, write.data[start - write.offset : stop - write.offset])
        start = stop
