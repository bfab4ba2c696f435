"""Names of replicas, versions and places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import InvalidOptionError, UnknownReplicaError
from headwater.replication.names import Remote, ReplicaName, VersionName, place_of, split_version
from headwater.topics import check_topic


def test_a_replica_has_a_path_and_a_topic() -> None:
    name = ReplicaName.parse("shop/app.db")
    assert (name.namespace, name.name) == ("shop", "app.db")
    assert name.topic == "replica.shop.app.db"
    assert str(name) == repr(name) == name.path == "shop/app.db"


@pytest.mark.parametrize("text", ["a/b", "A-_9/-", "a/_", "n" * 64 + "/" + "m" * 128, "a/" + ".".join("b" * 30)])
def test_names_that_are_taken(text: str) -> None:
    name = ReplicaName.parse(text)
    check_topic(name.topic)
    assert ReplicaName.parse(name.path) == name


BAD_SHAPES = ["", "a", "a/", "/a", "a/b/c", "a//b", "../b", "a/..", "a/.", "a/.b", "a/b.", "a/b..c", "a.b/c", "~/b"]
BAD_CHARACTERS = ["a/b\n", "a/b c", "a/b@3", "a/*", "a/>", "a/b\0", "a\\b/c", "a/c:d", "ä/b", "a/é", "a/%2e%2e"]
TOO_LONG = ["n" * 65 + "/b", "a/" + "m" * 129, "a/" + ".".join("b" * 31)]


@pytest.mark.parametrize("text", [*BAD_SHAPES, *BAD_CHARACTERS, *TOO_LONG])
def test_names_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError):
        ReplicaName.parse(text)


@settings(deadline=None)
@given(st.text(st.sampled_from("aZ0_-./\\~\0 @%"), max_size=12))
def test_no_name_can_be_read_as_another_path(text: str) -> None:
    try:
        name = ReplicaName.parse(text)
    except InvalidOptionError:
        return
    assert name.path == text
    assert text.count("/") == 1
    for part in (name.namespace, name.name):
        assert part
        assert part[0] != "."
        assert not set(part) & set("/\\~\0 @%")
        assert ".." not in part


@pytest.mark.parametrize(
    ("text", "meant", "shown"),
    [
        ("@3", VersionName(3), "@3"),
        ("@v3", VersionName(3), "@3"),
        ("7", VersionName(7), "@7"),
        ("@latest", VersionName(), "@latest"),
        ("@latest-2", VersionName(back=2), "@latest-2"),
    ],
)
def test_versions_that_are_named(text: str, meant: VersionName, shown: str) -> None:
    assert VersionName.parse(text) == meant
    assert str(meant) == repr(meant) == shown


NO_NUMBERS = ["@", "", "@0", "@-1", "@v", "@v0", "@03", "@3x", "@3\n", "@@3", "@1234567890", "@٣", "@3.0", "@v-1"]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "@latest1", "@latest+1", "@latest-", "@latest-0", "@LATEST"])
def test_versions_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="@latest-2"):
        VersionName.parse(text)


def test_a_version_is_picked_among_the_kept_ones() -> None:
    kept = [4, 5, 6, 7, 9]
    assert VersionName.parse("@4").pick(9, kept) == 4
    assert VersionName.parse("@latest").pick(9, kept) == 9
    assert VersionName.parse("@latest-2").pick(9, kept) == 7
    for text, why in {
        "@8": "not kept",
        "@3": "not kept",
        "@latest-1": "not kept",
        "@10": "no such",
        "@latest-9": "no such",
    }.items():
        with pytest.raises(UnknownReplicaError, match=rf"{why}.*Kept are 4-7, 9; the newest is 9"):
            VersionName.parse(text).pick(9, kept)
    with pytest.raises(UnknownReplicaError, match="no version yet"):
        VersionName.parse("@latest").pick(0, [])
    with pytest.raises(UnknownReplicaError) as caught:
        VersionName(1).pick(10_000, range(2, 10_001, 2))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", ["app.db", "./a://b", "C:\\data\\app.db", "a@3", "/tmp/ws:/x", "sqlite:app.db", "./host:8765/a/b", "~", " "]
)
def test_all_else_is_a_path(text: str) -> None:
    assert place_of(text) == text
    assert str(place_of(text)) == text


@pytest.mark.parametrize(
    ("text", "base", "version"),
    [
        ("ws://h:8080/a/b.db", "ws://h:8080", None),
        ("WS://Host:80/a/b.db@3", "ws://host", VersionName(3)),
        ("wss://h:443/a/b.db@latest-2", "wss://h", VersionName(back=2)),
        ("wss://[::1]:9000/a/b.db", "wss://[::1]:9000", None),
    ],
)
def test_a_remote_is_a_server_and_a_name(text: str, base: str, version: VersionName | None) -> None:
    remote = place_of(text)
    assert remote == Remote(base, ReplicaName("a", "b.db"), version)
    assert isinstance(remote, Remote)
    assert remote.key == f"{base}/a/b.db"
    assert remote.endpoint("push") == f"{base}/sapi/push/a/b.db"
    assert remote.endpoint("subscribe") == f"{base}/sapi/subscribe/a/b.db"
    assert remote.endpoint("pull") == f"{base}/sapi/pull/a/b.db{version or ''}"
    assert place_of(str(remote)) == remote


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://h/a/b", "not reached by http://. Did you mean ws://h/a/b.?"),
        ("https://h/a/b", "not reached by https://. Did you mean wss://h/a/b.?"),
        ("http://secret@h/a/b", "not reached by http://. Write it as ws://host"),
        ("ws//h/a/b", "lacks a colon. Did you mean ws://h/a/b.?"),
        ("postgres://h/a", "not reached by postgres://"),
        ("ws://h", "no replica"),
        ("ws:/host/a/b", "lacks a slash.*Did you mean ws://host/a/b"),
        ("wss:host:8765/a/b", "lacks a slash.*Did you mean wss://host:8765/a/b"),
        ("ws:/secret@host/a/b", "lacks a slash. Write it as ws://host"),
        ("host:8765/shop/app.db", "ws://host:8765/shop/app.db"),
        ("backup:/srv/app.db", "ws://backup:8765/srv/app.db"),
        ("ws://h/a", "is not namespace/name"),
        ("ws://h/a/b/", "is not namespace/name"),
        ("ws://h/a/b/c", "is not namespace/name"),
        ("ws:///a/b", "no readable host"),
        ("ws://h:x/a/b", "no readable host and port"),
        ("ws://h:99999/a/b", "no readable host and port"),
        ("ws://[::1/a/b", "no readable host"),
        ("ws://h/a/b@", "names no version"),
        ("ws://h/a/../b", "is not namespace/name"),
        ("ws://h/a/..", "no name of a replica"),
        ("ws://h/a/b ", "name"),
        ("", "cannot be empty"),
        ("a\0b", "zero byte"),
    ],
)
def test_places_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidOptionError, match=why):
        place_of(text)


@pytest.mark.parametrize(
    "text", ["ws://u:s3cret@h/a/b", "ws://s3cret@h/a/b", "ws://h/a/b?key=s3cret", "ws://h/a/b#s3cret"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        place_of(text)
    assert "s3cret" not in str(caught.value)


def test_a_version_is_split_off_a_path() -> None:
    assert split_version("a/b@v2") == ("a/b", VersionName(2))
    assert split_version("a/b") == ("a/b", None)
    with pytest.raises(InvalidOptionError):
        split_version("a/b@3@4")
