"""Every error says where, why and what next; and all of them come at once."""

import pickle
from pathlib import Path

import pytest

from headwater.errors import InvalidConfigurationError
from headwater.settings.load import FILE_BYTES_MAX
from headwater.settings.model import is_loopback


def refusal(load, *args, **kwargs) -> tuple[str, str, str]:
    with pytest.raises(InvalidConfigurationError) as caught:
        load(*args, **kwargs)
    return caught.value.where, caught.value.why, caught.value.next


@pytest.mark.parametrize(
    ("text", "where", "why", "next"),
    [
        # unknown keys
        ("[server]\nprot = 1", "server.prot", "there is no such key", "Did you mean port?"),
        ("[servre]\nport = 1", "servre", "there is no such key", "Did you mean server?"),
        ("[server]\nxyz = 1", "server.xyz", "there is no such key", "Known keys: log, host, port, allow_anonymous, "),
        ("port = 1", "port", "there is no such key", "It belongs into [server]"),
        ("[server]\nbatch_calls = 1", "server.batch_calls", "there is no such key", "It belongs into [limits]"),
        ("[profiles.staging.server]", "profiles.staging", "there is no such key", "Known keys: development, test, "),
        ("[profiles.prod.server]", "profiles.prod", "there is no such key", "Did you mean production?"),
        ("[profiles.test]\nprofile = 'test'", "profiles.test.profile", "there is no such key", "Known keys: server, "),
        ("[profiles.test.log]\nburst = 1", "profiles.test.log.burst", "there is no such key",
         "It belongs into [profiles.test.limits]"),
        ("[[topics]]\npattern = 'a'\nmaxage = '1d'", "topics[0].maxage", "there is no such key",
         "Did you mean max_age?"),
        # wrong types
        ("[server]\nport = '80'", "server.port", "must be a whole number, not '80'", "The default is 8765"),
        ("[server]\nport = true", "server.port", "must be a whole number, not true", "The default is 8765"),
        ("[limits]\nburst = 1.5", "limits.burst", "must be a whole number, not 1.5", "The default is 1000"),
        ("[server]\nconsole = 1", "server.console", "must be true or false, not 1", "The default is true"),
        ("[server]\nhost = 1", "server.host", "must be text, not 1", "The default is 127.0.0.1"),
        ("[server]\ntokens = 1", "server.tokens", "must be text, not 1", "Leave it out to have none"),
        ("[server]\norigins = '*'", "server.origins", "must be a list, not '*'", "The default is []"),
        ("[server]\norigins = [1]", "server.origins[0]", "must be text, not 1", "The default is []"),
        ("server = 1", "server", "must be a table, not 1", "Write [server], and its keys below"),
        ("profiles.test.log = 1", "profiles.test.log", "must be a table, not 1", "Write [profiles.test.log], and "),
        ("topics = 1", "topics", "must be a list, not 1", "Write a [[topics]] table for each"),
        ("topics = [1]", "topics[0]", "must be a table, not 1", "Write a [[topics]] table for each"),
        # wrong values
        ("[server]\nport = 65536", "server.port", "must be at most 65535, not 65536", "The default is 8765"),
        ("[limits]\nconnections = 0", "limits.connections", "must be at least 1, not 0", "The default is 10000"),
        ("[limits]\nframe_bytes = 1", "limits.frame_bytes", "must be at least 4096, not 1", "The default is 4194304"),
        ("[limits]\nframe_bytes = '1 cow'", "limits.frame_bytes", "must be a size in bytes, not '1 cow'", "Write "),
        ("[server]\nlog = ''", "server.log", "it is empty", "The default is events.db"),
        ("[server]\nlog_format = 'jsn'", "server.log_format", "must be text or json, not 'jsn'", "Did you mean json?"),
        ("[log]\ndurability = 'no'", "log.durability", "must be full or relaxed, not 'no'", "The default is full"),
        ("profile = 'prod'", "profile", "must be development, test or production, not 'prod'",
         "Did you mean production?"),
        ("[server]\nhost = '::1:80/'", "server.host", "must be a name or an address, not '::1:80/'", "Write it like "),
        ("[server]\norigins = ['https://a.example/']", "server.origins[0]",
         "must be an origin as browsers send it, not 'https://a.example/'", "Write it like "),
        # lengths of time
        ("[limits]\nfetch_wait = '60'", "limits.fetch_wait",
         "must be a duration, not '60'", "Did you mean 60s?"),
        ("[limits]\nfetch_wait = '3mo'", "limits.fetch_wait",
         "must be a duration, not '3mo'", "Write it like 500ms, 10s, "),
        ("[limits]\nfetch_wait = true", "limits.fetch_wait", "must be a duration, not True", "Write it like "),
        ("[limits]\nfetch_wait = -1", "limits.fetch_wait",
         "a duration must lie between 0 and a hundred years, not -1", "The default is 1m"),
        ("[limits]\nfetch_wait = nan", "limits.fetch_wait",
         "a duration must be seconds, a timedelta or a text like 1h30m, not nan", "The default is 1m"),
        ("[limits]\nfetch_wait = '99999999999w'", "limits.fetch_wait", "must lie between ", "The "),
        ("[limits]\nping_timeout = 0", "limits.ping_timeout", "must be longer than 0", "Write it like "),
        # topics
        ("[[topics]]\nmax_count = 1", "topics[0].pattern", "it is missing", 'Write it like pattern = "orders.>"'),
        ("[[topics]]\npattern = 'a'", "topics[0]", "retention without a limit", "Set max_age, max_count or max_bytes"),
        ("[[topics]]\npattern = 'a..'\nmax_count = 1", "topics[0]", "nats pattern 'a..': a token is empty", "Put "),
        ("[[topics]]\npattern = 'a'\nmax_count = -1", "topics[0].max_count", "must be at least 0, not -1", "Leave it "),
        ("[[topics]]\npattern = 'a'\nmax_count = 1\n" * 2, "topics", "there are two policies of 'a'", "Keep one of"),
    ],
)  # fmt: skip
def test_errors_of_the_file(load, text, where, why, next):
    found = refusal(load, text)
    assert found[0] == f"headwater.toml, {where}"
    assert found[1].startswith(why)
    assert found[2].startswith(next)


@pytest.mark.parametrize(
    ("name", "value", "why", "next"),
    [
        ("HEADWATER_SERVER_PROT", "1", "no setting has this name", "Did you mean HEADWATER_SERVER_PORT?"),
        ("HEADWATER_server_port", "1", "no setting has this name", "Did you mean HEADWATER_SERVER_PORT?"),
        ("HEADWATER_PORT", "1", "no setting has this name", "Did you mean HEADWATER_SERVER_PORT?"),
        ("HEADWATER_PROFIL", "test", "no setting has this name", "Did you mean HEADWATER_PROFILE?"),
        ("HEADWATER_QQQQQQQQQQQQQQQQ", "1", "no setting has this name", "Unset it"),
        ("HEADWATER_TOPICS", "a", "topics are set in the file alone", "Write a [[topics]] table"),
        ("HEADWATER_SERVER_PORT", "x", "must be a whole number, not 'x'", "The default is 8765"),
        ("HEADWATER_SERVER_PORT", "", "must be a whole number, not ''", "The default is 8765"),
        ("HEADWATER_SERVER_PORT", "70000", "must be at most 65535, not 70000", "The default is 8765"),
        ("HEADWATER_SERVER_CONSOLE", "maybe", "must be true or false, not 'maybe'", "The default is true"),
        (
            "HEADWATER_LIMITS_FETCH_WAIT",
            "60",
            "must be a duration, not '60'",
            "Did you mean 60s?",
        ),
        ("HEADWATER_PROFILE", "prod", "there is no profile 'prod'", "Did you mean production?"),
        ("HEADWATER_PROFILE", "", "there is no profile ''", "Name one of development, test, production"),
        ("HEADWATER_CONFIG", "", "it is empty", "Name a file, or do not give it"),
    ],
)
def test_errors_of_the_environment(load, name, value, why, next):
    assert refusal(load, environment={name: value}) == (name, why, next)


def test_two_names_for_tokens_must_agree(load):
    names = ("HEADWATER_TOKENS", "HEADWATER_SERVER_TOKENS")
    assert load(environment=dict.fromkeys(names, "a.json")).server.tokens == "a.json"
    assert refusal(load, environment=dict(zip(names, ("a.json", "b.json"), strict=True))) == (
        "HEADWATER_TOKENS",
        "HEADWATER_SERVER_TOKENS means the same and says something else",
        "Keep one of them",
    )


@pytest.mark.parametrize(
    ("path", "value", "where", "why", "next"),
    [
        ("server.port", -1, "--port", "must be at least 0, not -1", "The default is 8765"),
        ("server.port", "x", "--port", "must be a whole number, not 'x'", "The default is 8765"),
        ("server.log", "", "LOG", "it is empty", "The default is events.db"),
        ("limits.burst", 0, "--limits-burst", "must be at least 1, not 0", "The default is 1000"),
        ("server.prot", 1, "--prot", "there is no key server.prot", "Did you mean --port?"),
        ("topics", [], "--topics", "there is no key topics", ""),
    ],
)
def test_errors_of_flags(load, path, value, where, why, next):
    assert refusal(load, flags={path: value}) == (where, why, next)


def test_a_secret_under_a_misspelt_name_is_not_shown(load):
    with pytest.raises(InvalidConfigurationError) as caught:
        load(environment={"HEADWATER_TOKNE": "hunter2", "HEADWATER_SERVER_TOKNES": "hunter2"})
    assert "HEADWATER_TOKEN?" in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- the file itself ------------------------------------------------------------------------------------------------


def test_a_file_that_is_named_must_be_there(load):
    next = "Without it, headwater.toml is used if there is one"
    assert refusal(load, config="no.toml") == ("--config no.toml", "there is no such file", next)
    by_variable = {"HEADWATER_CONFIG": "no.toml"}
    assert refusal(load, environment=by_variable)[0] == "HEADWATER_CONFIG no.toml"


def test_a_link_to_nowhere_is_not_no_file(load, tmp_path: Path):
    (tmp_path / "headwater.toml").symlink_to("nowhere.toml")
    assert refusal(load)[:2] == ("headwater.toml", "there is no such file")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[server]\nport 80", "it is not TOML: expected '=' after a key"),
        (b"[server]\nport = 1\nport = 2", "it is not TOML: cannot overwrite a value"),
        (b"a = " + b"9" * 5000, "it is not TOML: "),
        (b"a = " + b"[" * 100_000, "it is not TOML: "),
        (b"[server]\nlog = '\xff'", "it is not UTF-8 at byte 16"),
        (b"#" * (FILE_BYTES_MAX + 1), "it is larger than 1,048,576 bytes"),
    ],
    ids=["syntax", "twice", "digits", "depth", "encoding", "size"],
)
def test_a_file_that_cannot_be_read(load, tmp_path: Path, content, why):
    (tmp_path / "headwater.toml").write_bytes(content)
    found = refusal(load)
    assert found[0] == "headwater.toml"
    assert found[1].startswith(why)
    assert found[2]


def test_a_directory_is_no_file(load, tmp_path: Path):
    (tmp_path / "headwater.toml").mkdir()
    found = ("headwater.toml", "it cannot be read: is a directory", "Name a file that can be read")
    assert refusal(load) == found


# --- what does not go together --------------------------------------------------------------------------------------


def test_production_wants_tokens(load):
    where, why, next = refusal(load, environment={"HEADWATER_PROFILE": "production"})
    assert (where, why) == ("profile (HEADWATER_PROFILE)", "production needs tokens, and none are set")
    assert "server.tokens" in next
    assert "server.allow_anonymous = true" in next
    assert load(profile="production", flags={"server.allow_anonymous": True}).profile == "production"
    assert load('[profiles.production.server]\ntokens = "t.json"', profile="production").server.tokens == "t.json"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "broker.example"])
def test_an_address_for_others_wants_tokens(load, host):
    where, why, _ = refusal(load, flags={"server.host": host})
    assert (where, why) == ("server.host (--host)", f"other machines can reach {host}, and no tokens are set")
    assert load(flags={"server.host": host, "server.tokens": "tokens.json"}).server.host == host
    assert load(flags={"server.host": host, "server.allow_anonymous": True}).server.host == host


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("localhost.example", False),
        ("127.1", False),
        ("0", False),
        ("10.0.0.1", False),
    ],
)
def test_only_what_surely_is_loopback_counts_as_it(host, loopback):
    assert is_loopback(host) is loopback


def test_a_key_wants_its_certificate(load):
    found = refusal(load, '[server]\ntls_key = "key.pem"')
    assert found[:2] == ("server.tls_key (headwater.toml)", "a key without a certificate")
    assert load('[server]\ntls_certificate = "both.pem"').server.tls_certificate == "both.pem"


# --- all at once ----------------------------------------------------------------------------------------------------


def test_all_errors_come_at_once(load):
    with pytest.raises(InvalidConfigurationError) as caught:
        load(
            "[server]\nprot = 1\nconsole = 1\n[profiles.test.limits]\nburst = 0\n",
            {"HEADWATER_SERVER_PROT": "1", "HEADWATER_PROFILE": "tset"},
            {"server.port": "x"},
            profile="test",
        )
    assert str(caught.value).splitlines() == [
        "6 things are wrong",
        "- headwater.toml, server.console: must be true or false, not 1. The default is true",
        "- headwater.toml, server.prot: there is no such key. Did you mean port?",
        "- headwater.toml, profiles.test.limits.burst: must be at least 1, not 0. The default is 1000",
        "- HEADWATER_SERVER_PROT: no setting has this name. Did you mean HEADWATER_SERVER_PORT?",
        "- --port: must be a whole number, not 'x'. The default is 8765",
        "- HEADWATER_PROFILE: there is no profile 'tset'. Did you mean test?",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_wrong_value_is_wrong_even_where_another_wins(load):
    found = refusal(load, "[server]\nport = -1", {"HEADWATER_SERVER_PORT": "1"})
    assert found[0] == "headwater.toml, server.port"


def test_a_value_that_is_refused_is_not_shown_without_end(load):
    assert len(refusal(load, f'[server]\nlog_level = "{"x" * 100_000}"')[1]) < 200
    assert len(refusal(load, f'[limits]\nfetch_wait = "{"x" * 100_000}"')[1]) < 200
    assert len(refusal(load, f'[limits]\nfetch_wait = "{"1" * 100_000}"')[2]) < 200


@pytest.mark.parametrize("text", ["[server]\nlog = '{}'", "[server]\ntokens = '{}'"])
def test_texts_have_an_end(load, text):
    assert refusal(load, text.format("x" * 5000))[1] == "it is longer than 4096"
