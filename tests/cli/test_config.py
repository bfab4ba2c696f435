"""`headwater config`."""

import os
from pathlib import Path

import pytest

FILE = """
profile = "production"
[server]
port = 9000
tokens = "tokens.json"
[profiles.production.server]
host = "0.0.0.0"
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one to be in, and no variables of ours."""
    monkeypatch.chdir(tmp_path)
    for name in [each for each in os.environ if each.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    return tmp_path


def lines(out: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, out.splitlines())}


def test_show_tells_value_and_source(run, directory: Path, monkeypatch):
    (directory / "headwater.toml").write_text(FILE)
    monkeypatch.setenv("HEADWATER_LIMITS_FETCH_WAIT", "90s")
    result = run("config", "show")
    assert result.code == 0
    reported = lines(result.out)
    assert reported["key"] == ["value", "source"]
    assert reported["profile"] == ["production", "headwater.toml"]
    assert reported["server.port"] == ["9000", "headwater.toml"]
    assert reported["server.host"] == ["0.0.0.0", "headwater.toml", "[profiles.production]"]
    assert reported["server.log_format"] == ["json", "profile", "production"]
    assert reported["limits.fetch_wait"] == ["1m30s", "HEADWATER_LIMITS_FETCH_WAIT"]
    assert reported["server.tls_key"] == ["-", "default"]


def test_show_for_programs(run, directory: Path):
    (directory / "other.toml").write_text(FILE)
    shown = run("config", "show", "--config", "other.toml", "--profile", "development", "--json")
    # Listening for other machines is a thing of the production table alone.
    assert (shown.json["file"], shown.json["profile"]) == ("other.toml", "development")
    settings = {each["key"]: (each["value"], each["source"]) for each in shown.items}
    assert settings["profile"] == ("development", "--profile")
    assert settings["server.port"] == (9000, "other.toml")
    assert settings["server.host"] == ("127.0.0.1", "default")
    assert settings["server.origins"] == ([], "default")


def test_check_of_what_is_fine(run, directory: Path):
    assert run("config", "check").out.splitlines()[0] == "fine; there is no file (profile development)"
    (directory / "headwater.toml").write_text(FILE)
    result = run("config", "check")
    assert result.code == 0
    assert result.out.splitlines()[:4] == [
        "headwater.toml is fine (profile production)",
        "  3 values from headwater.toml",
        "  1 value from headwater.toml [profiles.production]",
        "  1 value from profile production",
    ]
    assert run("config", "check", "--json").json["set"]["headwater.toml"] == 3


@pytest.mark.parametrize("command", ["show", "check"])
def test_problems_end_with_2(run, directory: Path, command, monkeypatch):
    (directory / "headwater.toml").write_text("[server]\nprot = 1\n")
    result = run("config", command)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        "error: headwater.toml, server.prot: there is no such key",
        "next: Did you mean port?",
    ]
    monkeypatch.setenv("HEADWATER_SERVER_PROT", "1")
    assert run("config", command).err.splitlines() == [
        "error: 2 things are wrong",
        "- headwater.toml, server.prot: there is no such key. Did you mean port?",
        "- HEADWATER_SERVER_PROT: no setting has this name. Did you mean HEADWATER_SERVER_PORT?",
    ]


def test_a_file_cannot_steer_the_terminal(run, directory: Path):
    (directory / "headwater.toml").write_text('[server]\nlog = "a\\u001b[31m"\n')
    assert "\x1b" not in run("config", "show").out
    (directory / "headwater.toml").write_text('[server]\n"a\\u001b[31m" = 1\n')
    assert "\x1b" not in run("config", "check").err
