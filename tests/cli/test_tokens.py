"""`headwater token`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headwater.server.auth import Scopes, TokenFile

FAR_MS = 4_000_000_000_000
TEXT = r"hw_([0-9a-f]{12})_[0-9a-f]{64}"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "some.tokens"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWATER_TOKENS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_create_prints_the_token_and_nothing_else(run, tokens: Path):
    result = run("token", "create", "--tokens", tokens, "--publish", "orders.>", "--label", "shop")
    assert result.code == 0
    assert re.fullmatch(TEXT + "\n", result.out)
    assert result.err == f"it will not be shown again; {tokens} keeps only a hash of it\n"
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +never$", run("token", "ls", "--tokens", tokens).out)
    grant = TokenFile(tokens).check(result.out.strip(), FAR_MS)
    assert grant
    assert (grant.label, grant.scopes, grant.expires_ms) == ("shop", Scopes(publish=("orders.>",)), None)


def test_create_with_every_option(run, tokens: Path):
    topics = ("--publish", "orders.>", "--publish", "logs.#", "--read", "a.*", "--read", "b", "--manage", ">")
    scopes = (*topics, "--consume", "billing", "--consume", "mail-*", "--call", "orders.*", "--admin")
    result = run("token", "create", "--tokens", tokens, *scopes, "--label", "all", "--expires", "30d", "--json")
    made = result.json
    assert "not be shown again" in result.err
    found = re.fullmatch(TEXT, made["token"])
    assert found
    assert made["id"] == found[1]
    assert (made["label"], made["publish"], made["read"]) == ("all", ["orders.>", "logs.#"], ["a.*", "b"])
    assert (made["consume"], made["manage"], made["call"]) == (["billing", "mail-*"], [">"], ["orders.*"])
    assert (made["admin"], made["expired"]) == (True, False)
    [kept] = TokenFile(tokens).list()
    assert kept.scopes == Scopes(
        publish=("orders.>", "logs.#"),
        read=("a.*", "b"),
        consume=("billing", "mail-*"),
        manage=(">",),
        call=("orders.*",),
        admin=True,
    )
    assert kept.expires_ms == kept.created_ms + 30 * 86_400_000


def test_a_token_without_a_scope_is_refused(run, tokens: Path):
    result = run("token", "create", "--tokens", tokens, "--label", "nothing")
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        "error: a token without a right could do nothing",
        "next: Pass --publish, --read, --manage or --call with a PATTERN, --consume NAME, or --admin; "
        "the pattern '>' is every topic",
    ]
    assert not tokens.exists()


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--publish", "a..b"], "publish scope, nats pattern 'a..b': a token is empty"),
        (["--read", "a.*.>"], "read scope, nats pattern 'a.*.>': '*' and '>' do not go together"),
        (["--read", "a", "--consume", "a.>"], "consume scope: 'a.>' names no subscriptions"),
        (["--consume", "a"], "a durable subscription reads topics, and this token could read none"),
        (["--admin", "--expires", "soon"], "--expires must be a duration, not 'soon'"),
        (["--admin", "--expires", "0s"], "a token expires in the future"),
        (["--admin", "--label", "x" * 101], "the label has 101 characters and the limit is 100"),
        (["--admin", "--label", "a\nb"], "the label holds characters that cannot be shown"),
    ],
)
def test_what_cannot_be_used_is_refused(run, tokens: Path, arguments, output):
    result = run("token", "create", "--tokens", tokens, *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {output}")
    assert not tokens.exists()


def test_ls(run, tokens: Path):
    file = TokenFile(tokens)
    ids = [
        file.create("shop", Scopes(publish=("orders.>", "b")), now_ms=1_000, expires_ms=2_000).split("_")[1],
        file.create(
            "", Scopes(read=("logs.#",), consume=("*",), manage=(">",), admin=True), now_ms=2_000, expires_ms=FAR_MS
        ).split("_")[1],
        file.create("two words", Scopes(manage=(">",), admin=True), now_ms=3_000).split("_")[1],
    ]
    lines = [re.split(r" {2,}", line) for line in run("token", "ls", "--tokens", tokens).out.splitlines()]
    rights = ["publish", "read", "consume", "manage", "call", "admin"]
    assert lines[0] == ["id", "label", *rights, "created", "expires"]
    assert [*lines[1][:8], lines[1][-1]] == [ids[0], "shop", "orders.>, b", *("-" * 5), "expired"]
    assert lines[2][:8] == [ids[1], "-", "-", "logs.#", "*", ">", "-", "yes"]
    assert lines[2][-1].startswith("2096-")
    assert [lines[3][at] for at in (0, 1, -1)] == [ids[2], "two words", "never"]
    listed = run("token", "ls", "--tokens", tokens, "--json").items
    assert listed[0] == {
        "id": ids[0],
        "label": "shop",
        "publish": ["orders.>", "b"],
        "read": [],
        "consume": [],
        "manage": [],
        "call": [],
        "admin": False,
        "created_at": "1970-01-01T00:00:01.000Z",
        "expires_at": "1970-01-01T00:00:02.000Z",
        "expired": True,
    }
    assert [(each["id"], each["expired"]) for each in listed[1:]] == [(ids[1], False), (ids[2], False)]
    assert listed[2]["expires_at"] is None


def test_neither_secrets_nor_hashes_are_listed(run, tokens: Path):
    text = TokenFile(tokens).create("shop", Scopes(manage=(">",), admin=True), now_ms=1_000)
    hashed = re.findall(r"[0-9a-f]{64}", tokens.read_text())
    for options in ([], ["--json"]):
        listed = run("token", "ls", "--tokens", tokens, *options).out
        assert text.split("_")[1] in listed
        assert text.split("_")[2] not in listed
        assert hashed[0] not in listed


def test_revoke(run, tokens: Path):
    file = TokenFile(tokens)
    texts = [file.create(label, Scopes(manage=(">",), admin=True), now_ms=1_000) for label in ("a", "b", "c")]
    ids = [text.split("_")[1] for text in texts]
    assert run("token", "revoke", "--tokens", tokens, ids[0]).out == f"revoked {ids[0]}\n"
    assert run("token", "revoke", texts[1], "--tokens", tokens, "--json").json == {"revoked": ids[1]}
    again = run("token", "revoke", "--tokens", tokens, ids[0])
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith(f"error: there is no token '{ids[0]}' in {tokens}\nnext: ")
    assert [token.id for token in file.list()] == [ids[2]]
    run("token", "revoke", "--tokens", tokens, ids[2])
    assert run("token", "ls", "--tokens", tokens).out == "no tokens: no client may connect\n"


def test_the_file_is_the_one_of_the_environment_or_of_the_directory(run, tokens: Path, monkeypatch):
    run("token", "create", "--admin", "--label", "here")
    assert os.listdir() == ["headwater.tokens"]
    monkeypatch.setenv("HEADWATER_TOKENS", str(tokens))
    run("token", "create", "--admin", "--label", "there")
    assert [each["label"] for each in run("token", "ls", "--json").items] == ["there"]
    assert [each["label"] for each in run("token", "ls", "--tokens", "headwater.tokens", "--json").items] == ["here"]


@pytest.mark.parametrize("command", [["ls"], ["revoke", "x"]], ids=" ".join)
def test_looking_makes_no_file(run, tokens: Path, command):
    result = run("token", *command, "--tokens", tokens)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        f"error: tokens file {tokens}: there is no such file",
        f"next: Make a first token: headwater token create --tokens {tokens} --read '>'",
    ]
    assert os.listdir() == []


@pytest.mark.parametrize("command", [["ls"], ["revoke", "x"], ["create", "--admin"]], ids=" ".join)
def test_a_file_that_others_may_read_is_refused(run, tokens: Path, command):
    TokenFile(tokens).create("", Scopes(manage=(">",), admin=True), now_ms=1_000)
    tokens.chmod(0o644)
    result = run("token", *command, "--tokens", tokens)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[1] == f"next: chmod 600 {tokens}"
