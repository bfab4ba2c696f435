"""Tokens: which are accepted, what the file must be like, and how a running server learns of changes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import InvalidConfigurationError, InvalidOptionError, LockedError, TooLargeError
from headwater.formats import TIME_MS_MAX
from headwater.server import auth
from headwater.server.auth import LABEL_CHARS_MAX, TOKENS_MAX, Grant, Scopes, TokenFile, id_of

NOW = 1_700_000_000_000
SCOPES = Scopes(publish=("orders.>",), read=("logs.#",), consume=("*",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "headwater.tokens"


@pytest.fixture
def file(path: Path) -> TokenFile:
    return TokenFile(path)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the library warns of. Not by caplog: the command line, tested in the same process, may stop propagation."""
    output: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            output.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("headwater").addHandler(listener)
    yield output
    logging.getLogger("headwater").removeHandler(listener)


def create(file: TokenFile, label: str = "shop", **options: Any) -> str:
    return file.create(label, SCOPES, now_ms=NOW, **options)


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the first token by hand."""
    document = json.loads(path.read_text())
    document["tokens"][0].update(changes)
    path.write_text(json.dumps(document))


# --- admission -----------------------------------------------------------------------------------------------------


def test_a_token_opens_what_it_was_made_for(file: TokenFile) -> None:
    text = create(file, expires_ms=NOW + 1_000)
    assert re.fullmatch(r"hw_[0-9a-f]{12}_[0-9a-f]{64}", text)
    id = text.split("_")[1]
    assert id_of(text) == id
    assert file.check(text, NOW) == Grant(id, "shop", SCOPES, NOW + 1_000)
    assert file.grant(id, NOW) == Grant(id, "shop", SCOPES, NOW + 1_000)


def test_each_secret_opens_its_own_token_only(file: TokenFile) -> None:
    first, second = create(file, "first"), create(file, "second")
    crossed = f"{first.rpartition('_')[0]}_{second.rpartition('_')[2]}"
    assert first != second
    assert file.check(crossed, NOW) is None
    assert [grant.label for text in (first, second) if (grant := file.check(text, NOW))] == ["first", "second"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: text.upper(),
        lambda text: text.removeprefix("hw_"),
        lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"),
        lambda text: text.replace(text.split("_")[1], "0" * 12),
        lambda text: text[:-64] + "é" * 64,
    ],
)
def test_anything_else_opens_nothing(file: TokenFile, spoil: Any) -> None:
    text = create(file)
    assert file.check(text, NOW)
    assert file.check(spoil(text), NOW) is None


def test_a_token_ends_when_it_expires(file: TokenFile) -> None:
    text = create(file, expires_ms=NOW + 1_000)
    assert file.check(text, NOW + 999)
    for late in (NOW + 1_000, NOW + 1_001):
        assert file.check(text, late) is None
        assert file.grant(text.split("_")[1], late) is None
    assert [token.is_expired(NOW + 1_000) for token in file.list()] == [True]


def test_unknown_ids_are_compared_too(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    text = create(file)
    compared: list[tuple[int, int]] = []

    def spy(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(auth, "hmac", type("Spied", (), {"compare_digest": staticmethod(spy)}))
    assert file.check(text, NOW)
    assert file.check(text.replace(text.split("_")[1], "0" * 12), NOW) is None
    assert compared == [(64, 64)] * 2


def test_a_well_known_hash_opens_nothing(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    create(file)
    monkeypatch.setattr(auth, "_hash", lambda secret: auth._UNKNOWN_HASH)
    assert file.check(f"hw_{'0' * 12}_{'0' * 64}", NOW) is None


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_file_keeps_a_hash_and_not_the_secret(file: TokenFile, path: Path) -> None:
    id, secret = create(file, expires_ms=NOW + 1_000).split("_")[1:]
    assert json.loads(path.read_text()) == {
        "version": 2,
        "tokens": [
            {
                "id": id,
                "sha256": hashlib.sha256(secret.encode()).hexdigest(),
                "label": "shop",
                "scopes": {
                    "publish": ["orders.>"],
                    "read": ["logs.#"],
                    "consume": ["*"],
                    "manage": [],
                    "call": [],
                    "admin": False,
                },
                "created_at": "2023-11-14T22:13:20Z",
                "expires_at": "2023-11-14T22:13:21Z",
            }
        ],
    }
    assert secret not in path.read_text()


def test_tokens_are_listed_oldest_first(file: TokenFile) -> None:
    for label, late in [("b", 2), ("a", 1), ("c", 3)]:
        file.create(label, SCOPES, now_ms=NOW + late)
    assert [(token.label, token.created_ms, token.expires_ms) for token in file.list()] == [
        ("a", NOW + 1, None),
        ("b", NOW + 2, None),
        ("c", NOW + 3, None),
    ]


def test_a_revoked_token_is_gone(file: TokenFile, path: Path) -> None:
    stays, goes = create(file, "stays"), create(file, "goes")
    assert file.revoke(goes.split("_")[1])
    assert not file.revoke(goes.split("_")[1])
    assert file.check(goes, NOW) is None
    assert file.check(stays, NOW)
    assert [token.label for token in TokenFile(path).list()] == ["stays"]


def test_when_the_last_is_revoked_no_client_gets_in(file: TokenFile) -> None:
    text = create(file)
    assert file.revoke(text.split("_")[1])
    file.load()
    assert file.list() == ()
    assert file.check(text, NOW) is None


def test_the_number_of_tokens_is_limited(file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "TOKENS_MAX", 2)
    create(file)
    create(file)
    before = path.read_bytes()
    with pytest.raises(TooLargeError, match="there are 2 tokens and the limit is 2"):
        create(file)
    assert path.read_bytes() == before


@pytest.mark.parametrize("label", ["x" * (LABEL_CHARS_MAX + 1), "two\nlines", "\x1b[2J"])
def test_a_label_is_one_short_line(file: TokenFile, path: Path, label: str) -> None:
    create(file, "x" * LABEL_CHARS_MAX)
    with pytest.raises(InvalidOptionError, match="the label"):
        create(file, label)
    rewrite(path, label=label)
    with pytest.raises(InvalidConfigurationError, match="the label"):
        file.load()


@pytest.mark.parametrize("expires_ms", [0, NOW - 1, NOW, TIME_MS_MAX + 1])
def test_a_token_expires_in_the_future(file: TokenFile, path: Path, expires_ms: int) -> None:
    with pytest.raises(InvalidOptionError, match="expires in the future"):
        create(file, expires_ms=expires_ms)
    assert not path.exists()


# --- files that are refused -----------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_says_how_to_make_one(file: TokenFile, path: Path) -> None:
    for ask in (file.load, file.list, file.refresh, lambda: file.revoke("x"), lambda: file.grant("x", NOW)):
        with pytest.raises(InvalidConfigurationError, match="there is no such file") as caught:
            ask()
        assert f"headwater token create --tokens {path}" in caught.value.next
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o610])
def test_a_file_that_others_may_use_is_refused(file: TokenFile, path: Path, mode: int) -> None:
    text = create(file)
    path.chmod(mode)
    before = path.read_bytes()
    again = TokenFile(path)
    for ask in (again.load, lambda: again.check(text, NOW), lambda: create(again), lambda: again.revoke(text)):
        with pytest.raises(InvalidConfigurationError, match=f"mode {mode:04o}") as caught:
            ask()
        assert caught.value.next == f"chmod 600 {path}"
    assert path.read_bytes() == before
    path.chmod(0o600)
    assert again.check(text, NOW)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not valid"),
        (b"hw_x", "is not valid"),
        (b"[]", "is not valid"),
        (b"\xff\xfe", "is not valid"),
        (b'{"version": 1}', "tokens"),
        (b'{"tokens": []}', "version"),
        (b'{"version": 1, "tokens": [], "more": 1}', "more"),
        (b'{"version": 3, "tokens": "in another shape"}', "it has version 3, and this Headwater reads versions 1 to 2"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(file: TokenFile, path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidConfigurationError, match=why) as caught:
        file.load()
    assert caught.value.where == f"tokens file {path}"
    assert caught.value.next
    with pytest.raises(InvalidConfigurationError):
        create(file)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "short"},
        {"id": "0" * 12 + "\n"},
        {"sha256": "0" * 63},
        {"sha256": "0" * 64 + "\n"},
        {"scopes": {"publish": ["a..b"]}},
        {"scopes": {"publsh": ["a"]}},
        {"created_at": "2023-11-14T22:13:20"},
        {"expires_at": "soon"},
        {"expires_at": "1969-01-01T00:00:00Z"},
        {"expires": "2030-01-01T00:00:00Z"},
    ],
    ids=str,
)
def test_an_entry_that_makes_no_sense_is_refused_with_its_place(
    file: TokenFile, path: Path, changes: dict[str, Any]
) -> None:
    create(file)
    rewrite(path, **changes)
    with pytest.raises(InvalidConfigurationError, match=r"\$\.tokens\[0\]|\$\.tokens\[\.\.\.\]"):
        file.load()


OF_VERSION_1: list[tuple[dict[str, Any], Scopes]] = [
    ({"publish": ["a"], "subscribe": [], "admin": False}, Scopes(publish=("a",), call=(">",))),
    ({"publish": [], "subscribe": ["b.>"], "admin": False}, Scopes(read=("b.>",), consume=("*",), call=(">",))),
    ({"publish": [], "subscribe": [], "admin": True}, Scopes(manage=(">",), admin=True, call=(">",))),
    ({}, Scopes(call=(">",))),
]


@pytest.mark.parametrize(("before", "now"), OF_VERSION_1, ids=str)
def test_tokens_of_version_1_keep_what_they_could_do(
    file: TokenFile, path: Path, before: dict[str, Any], now: Scopes
) -> None:
    text = create(file)
    document = json.loads(path.read_text())
    document["version"] = 1
    document["tokens"][0]["scopes"] = before
    path.write_text(json.dumps(document))
    grant = file.check(text, NOW)
    assert grant is not None
    assert grant.scopes == now
    assert json.loads(path.read_text())["version"] == 1  # looking changes nothing
    other = create(file)
    written = json.loads(path.read_text())
    assert written["version"] == 2
    assert "subscribe" not in path.read_text()
    for each in (text, other):
        assert TokenFile(path).check(each, NOW) is not None
    assert TokenFile(path).check(text, NOW) == grant


@pytest.mark.parametrize(
    "changes",
    [{"id": "short"}, {"sha256": "0" * 63}, {"scopes": {"subscribe": ["a..b"]}}, {"scopes": {"read": ["a"]}}],
    ids=str,
)
def test_what_made_no_sense_in_version_1_makes_none_now(file: TokenFile, path: Path, changes: dict[str, Any]) -> None:
    create(file)
    document = json.loads(path.read_text())
    document["tokens"][0] |= {"scopes": {}, **changes}
    path.write_text(json.dumps({**document, "version": 1}))
    with pytest.raises(InvalidConfigurationError, match="is not valid"):
        file.load()


def test_two_tokens_with_one_id_are_refused(file: TokenFile, path: Path) -> None:
    create(file)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({"version": 2, "tokens": document["tokens"] * 2}))
    with pytest.raises(InvalidConfigurationError, match="same id"):
        file.load()


def test_a_file_with_too_many_tokens_is_refused(file: TokenFile, path: Path) -> None:
    create(file)
    [entry] = json.loads(path.read_text())["tokens"]
    many = [{**entry, "id": f"{number:012x}"} for number in range(TOKENS_MAX + 1)]
    path.write_text(json.dumps({"version": 2, "tokens": many}))
    with pytest.raises(InvalidConfigurationError, match=f"length <= {TOKENS_MAX}"):
        file.load()
    path.write_text(json.dumps({"version": 2, "tokens": many[1:]}))
    file.load()


def test_a_file_that_is_too_large_is_neither_read_nor_written(
    file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(file)
    size = path.stat().st_size
    monkeypatch.setattr(auth, "TOKENS_FILE_BYTES_MAX", size)
    file.load()
    with pytest.raises(InvalidConfigurationError, match=f"the limit is {size:,}"):
        create(file)
    monkeypatch.setattr(auth, "TOKENS_FILE_BYTES_MAX", size - 1)
    with pytest.raises(InvalidConfigurationError, match=f"it has {size:,} bytes"):
        file.load()


def test_what_is_no_plain_file_is_refused(file: TokenFile, path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidConfigurationError, match="not a plain file"):
        file.load()
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(InvalidConfigurationError, match="not a plain file"):
        file.load()


# --- writing --------------------------------------------------------------------------------------------------------


def test_the_file_is_private_whatever_the_umask(file: TokenFile, path: Path) -> None:
    before = os.umask(0)
    try:
        create(file)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        create(file)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert os.listdir(path.parent) == [path.name]


def test_the_new_file_is_on_disk_before_it_takes_the_place_of_the_old(
    file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(file)
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(descriptor: int) -> None:
        calls.append("sync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def spied_replace(source: str, target: str) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    create(file)
    assert calls == ["sync file", "replace", "sync directory"]


@pytest.mark.parametrize("step", ["fsync", "replace", "ftruncate"])
def test_a_write_that_fails_leaves_the_old_file(
    file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    text = create(file)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(InvalidConfigurationError, match=r"cannot be written \(No space left"):
            create(file)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    assert [token.id for token in file.list()] == [text.split("_")[1]]


def test_of_many_writers_none_undoes_what_another_did(path: Path) -> None:
    first = create(TokenFile(path))

    def work(number: int) -> str:
        made = create(TokenFile(path), f"keeps {number}")
        gone = create(TokenFile(path), f"goes {number}")
        assert TokenFile(path).revoke(gone.split("_")[1])
        return made

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(work, range(16)))
    assert {token.id for token in TokenFile(path).list()} == {text.split("_")[1] for text in [first, *made]}
    assert os.listdir(path.parent) == [path.name]


def test_a_writer_that_comes_late_leaves_the_file_of_the_one_before_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(TokenFile(path), "first")
    flock = fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        """Between opening the scratch file and locking it, another writer makes it the tokens file."""
        monkeypatch.setattr(fcntl, "flock", flock)
        create(TokenFile(path), "second")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    create(TokenFile(path), "third")
    assert {token.label for token in TokenFile(path).list()} == {"first", "second", "third"}


def test_a_writer_that_does_not_finish_is_not_waited_for_without_end(
    file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "WRITE_TRIES_MAX", 2)
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="another command is writing it"):
            create(file)
    assert not path.exists()


def test_what_a_killed_writer_left_is_taken_over(file: TokenFile, path: Path) -> None:
    path.with_name(path.name + ".new").write_text("half a document, and longer than the whole one" * 100)
    text = create(file)
    file.load()
    assert file.check(text, NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_link_in_the_scratch_files_place_is_not_followed(file: TokenFile, path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.with_name(path.name + ".new").symlink_to(victim)
    with pytest.raises(InvalidConfigurationError, match="cannot be written"):
        create(file)
    assert victim.read_text() == "precious"


def test_a_scratch_file_of_another_user_is_refused(
    file: TokenFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_name(path.name + ".new").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidConfigurationError, match="belongs to another user"):
        create(file)
    assert not path.exists()


def test_a_link_to_the_tokens_file_stays_one(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "tokens"
    path.symlink_to(target)
    replace = os.replace

    def spied_replace(source: str, to: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(to)  # else it might be another disk, and fail
        replace(source, to)

    monkeypatch.setattr(os, "replace", spied_replace)
    text = create(TokenFile(path))
    assert TokenFile(path).check(text, NOW)
    assert path.is_symlink()
    assert TokenFile(target).check(text, NOW)
    assert os.listdir(target.parent) == ["tokens"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_the_file_to_its_owner(file: TokenFile, path: Path) -> None:
    create(file)
    os.chown(path, 12_345, 12_345)
    create(file)
    assert (path.stat().st_uid, path.stat().st_gid) == (12_345, 12_345)


# --- while a server runs --------------------------------------------------------------------------------------------


@pytest.fixture
def old(file: TokenFile) -> str:
    return create(file, "old")


@pytest.fixture
def server(old: str, path: Path) -> TokenFile:
    """The file as a server has it, which has read it once."""
    running = TokenFile(path)
    running.load()
    return running


@given(st.text() | st.from_regex(r"hw_[0-9a-z]{8,32}_[0-9a-f]{64}"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_is_an_error(server: TokenFile, text: str) -> None:
    assert server.check(text, NOW) is None


def test_a_running_server_sees_new_and_revoked_tokens(file: TokenFile, server: TokenFile, old: str) -> None:
    assert not server.changed()
    new = create(file, "new")
    assert server.changed()
    assert server.check(new, NOW)
    assert not server.changed()
    file.revoke(old.split("_")[1])
    assert server.check(old, NOW) is None
    assert server.grant(old.split("_")[1], NOW) is None
    assert server.check(new, NOW)


def test_a_running_server_sees_an_edit_in_place(server: TokenFile, path: Path, old: str) -> None:
    rewrite(path, scopes={"admin": True})
    grant = server.grant(old.split("_")[1], NOW)
    assert grant
    assert grant.scopes == Scopes(admin=True)


def test_the_generation_grows_with_each_set_read_and_only_then(file: TokenFile, server: TokenFile, old: str) -> None:
    first = server.refresh()
    assert server.refresh() == first
    assert server.check(old, NOW)
    assert server.refresh() == first
    create(file)
    server.check(old, NOW)
    assert server.refresh() == first + 1


def test_an_unchanged_file_is_not_read_again(server: TokenFile, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "read_tokens", lambda path: pytest.fail("read again"))
    assert server.check(old, NOW)


def test_the_writer_of_the_file_knows_its_content(file: TokenFile, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "read_tokens", lambda path: pytest.fail("read again"))
    assert not file.changed()
    assert file.check(old, NOW)


def make_missing(path: Path) -> None:
    path.unlink()


def make_malformed(path: Path) -> None:
    path.write_text("{")


def make_open_to_others(path: Path) -> None:
    path.chmod(0o644)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize("spoil", [make_missing, make_malformed, make_open_to_others, make_directory])
def test_a_spoilt_file_keeps_the_last_good_set_and_warns_once(
    server: TokenFile, path: Path, old: str, warnings: list[str], spoil: Any
) -> None:
    generation = server.refresh()
    spoil(path)
    for _ in range(3):
        assert server.check(old, NOW)
    assert server.refresh() == generation
    [output] = warnings
    assert output.startswith(f"the tokens read before stay in force: tokens file {path}: ")
    assert old not in output


def test_a_mended_file_is_read_again(server: TokenFile, path: Path, old: str, warnings: list[str]) -> None:
    good = path.read_bytes()
    make_malformed(path)
    assert server.check(old, NOW)
    path.write_bytes(good.replace(b'"old"', b'"mended"'))
    grant = server.check(old, NOW)
    assert grant
    assert grant.label == "mended"
    make_malformed(path)
    server.check(old, NOW)
    assert len(warnings) == 2


def test_mending_the_mode_alone_is_seen(server: TokenFile, path: Path, old: str, warnings: list[str]) -> None:
    rewrite(path, label="new")
    path.chmod(0o644)
    grant = server.check(old, NOW)
    assert grant
    assert grant.label == "old"
    path.chmod(0o600)
    grant = server.check(old, NOW)
    assert grant
    assert grant.label == "new"


def test_what_the_system_refuses_is_tried_again(
    file: TokenFile, server: TokenFile, old: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file.revoke(old.split("_")[1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        for _ in range(2):
            assert server.check(old, NOW)
    assert len(warnings) == 1
    assert server.check(old, NOW) is None
