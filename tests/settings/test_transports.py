"""Transports and messages: tables by name, laid over by profiles and variables, key by key."""

import pytest

from headwater.errors import InvalidConfigurationError

FILE = """
[transports.archive]
url = "s3://bucket/orders?secret_access_key=hidden&region=eu"
batch_size = 100
batch_wait = "10s"

[transports.live]
url = "redis://me:secret@cache/0"

[messages.OrderPlaced]
transports = ["archive", "live"]

[messages."com.shop.Memo"]
transports = ["live"]

[profiles.test.transports.archive]
url = "memory:"

[profiles.test.messages.OrderPlaced]
transports = []

[profiles.production.transports.audit]
url = "stdout:"
[profiles.production.server]
allow_anonymous = true
"""


def explained(settings) -> dict[str, tuple[object, str]]:
    return {key: (value, source) for key, value, source in settings.explain()}


def test_every_key_has_its_default(load):
    live = load(FILE).transports["live"]
    assert (live.batch_size, live.batch_wait) == (1, 5.0)
    assert (live.breaker_failures, live.breaker_window, live.breaker_reset) == (5, 120.0, 30.0)
    assert load("").transports == load("").messages == {}


def test_a_profile_changes_what_it_names_key_by_key(load):
    here, test = load(FILE), load(FILE, profile="test")
    production = load(FILE, profile="production")
    assert here.transports["archive"].url.startswith("s3:")
    assert (test.transports["archive"].url, test.transports["archive"].batch_size) == ("memory:", 100)
    assert test.transports["live"] == here.transports["live"]
    assert (here.messages["OrderPlaced"].transports, test.messages["OrderPlaced"].transports) == (
        ("archive", "live"),
        (),
    )
    assert test.messages["com.shop.Memo"].transports == ("live",)
    assert [list(settings.transports) for settings in (here, production)] == [
        ["archive", "live"],
        ["archive", "live", "audit"],
    ]


def test_every_value_is_explained_and_no_password_is_reported(load):
    found = explained(load(FILE, {"HEADWATER_TRANSPORTS_LIVE_BATCH_WAIT": "1s"}, profile="test"))
    assert found["transports.archive.url"] == ("memory:", "headwater.toml [profiles.test]")
    assert found["transports.archive.batch_wait"] == ("10s", "headwater.toml")
    assert found["transports.archive.breaker_reset"] == ("30s", "default")
    assert found["transports.live.url"] == ("redis://me:***@cache/0", "headwater.toml")
    assert found["transports.live.batch_wait"] == ("1s", "HEADWATER_TRANSPORTS_LIVE_BATCH_WAIT")
    assert found["messages.OrderPlaced.transports"] == ([], "headwater.toml [profiles.test]")
    assert found["messages.com.shop.Memo.transports"] == (["live"], "headwater.toml")
    here = explained(load(FILE))
    assert here["transports.archive.url"][0] == "s3://bucket/orders?secret_access_key=***&region=eu"


def test_a_variable_may_say_all_of_a_transport(load):
    variables = {
        "HEADWATER_TRANSPORTS_RED_HOT_URL": "redis://me:secret@cache/0",
        "HEADWATER_TRANSPORTS_RED_HOT_BREAKER_FAILURES": "0",
    }
    settings = load("", variables)
    assert settings.transports["red_hot"].url == "redis://me:secret@cache/0"
    assert settings.transports["red_hot"].breaker_failures == 0
    assert explained(settings)["transports.red_hot.url"][0] == "redis://me:***@cache/0"


def test_an_empty_table_changes_nothing(load):
    settings = load(FILE + "[profiles.development.transports.archive]\n[profiles.development.messages.OrderPlaced]\n")
    assert settings.transports["archive"].url.startswith("s3:")
    assert settings.messages["OrderPlaced"].transports == ("archive", "live")
    assert explained(settings)["messages.OrderPlaced.transports"][1] == "headwater.toml"


def test_no_password_is_in_a_repr(load):
    settings = load(FILE + '[server]\nlog = "postgres://me:hidden@db/shop"\n')
    assert settings.server.log.endswith("@db/shop")
    for each in (settings, settings.server, settings.transports, settings.transports["live"]):
        found = f"{each!r} {each}"
        assert "hidden" not in found
        assert "me:" not in found


def test_without_a_server_no_tokens_are_needed(load):
    production = "profile = 'production'\n"
    with pytest.raises(InvalidConfigurationError, match="production needs tokens"):
        load(production)
    assert load(production, serves=False).profile == "production"
    for text in ("[server]\nhost = '0.0.0.0'", "[server]\ntls_key = 'a'"):
        load(text, serves=False)
    with pytest.raises(InvalidConfigurationError, match=r"transports\.archive\.url"):
        load("[transports.archive]", serves=False)


@pytest.mark.parametrize(
    ("text", "where", "why", "next"),
    [
        ("[transports.archive]\nurll = 'a'", "headwater.toml, transports.archive.urll", "there is no such key",
         "Did you mean url?"),
        ("[transports.archive]\nbatch_size = '9'", "headwater.toml, transports.archive.batch_size",
         "must be a whole number, not '9'", "The default is 1"),
        ("[transports.archive]\nbatch_size = 0", "headwater.toml, transports.archive.batch_size",
         "must be at least 1, not 0", "The default is 1"),
        ("[transports.archive]\nbatch_wait = '5'", "headwater.toml, transports.archive.batch_wait",
         "must be a duration, not '5'", "Did you mean 5s?"),
        ("[transports.Archive]\nurl = 'memory:'", "headwater.toml, transports",
         "'Archive' cannot name a transport", "Use lower-case letters"),
        ("transports = 5", "headwater.toml, transports", "must be tables by name, not 5", "Write [transports.NAME], "),
        ("transports.archive = 5", "headwater.toml, transports.archive", "must be a table, not 5",
         "Write [transports.archive], and its keys below"),
        ("[profiles.test.transports.a]\nbatch = 1", "headwater.toml, profiles.test.transports.a.batch",
         "there is no such key", "Did you mean batch_"),
        ("[messages.Memo]\ntransports = 'a'", "headwater.toml, messages.Memo.transports", "must be a list, not 'a'",
         "The default is []"),
        ("[messages.Memo]\ntransports = ['a', 'a']", "headwater.toml, messages.Memo.transports",
         "a name is in it twice", "Keep one of them"),
        ("[messages.Memo]\ntransport = ['a']", "headwater.toml, messages.Memo.transport", "there is no such key",
         "Did you mean transports?"),
        # fine one by one
        ("[profiles.development.transports.archive]", "transports.archive.url (default)", "it is missing", "Write it "),
        ("[transports.archive]", "transports.archive.url (default)", "it is missing", "Write it like url = "),
        ("[transports.archive]\nbatch_size = 2", "transports.archive.url (default)", "it is missing", "Write it like"),
        ("[transports.a]\nurl = 'memory:'\n[messages.Memo]\ntransports = ['b']",
         "messages.Memo.transports (headwater.toml)", "there is no transport 'b'",
         "Write a [transports.b] table; there is a"),
    ],
)  # fmt: skip
def test_errors(load, text, where, why, next):
    with pytest.raises(InvalidConfigurationError) as caught:
        load(text)
    assert (caught.value.where, caught.value.why) == (where, why)
    assert caught.value.next.startswith(next)


@pytest.mark.parametrize(
    ("name", "value", "why", "next"),
    [
        ("HEADWATER_TRANSPORTS_ARCHIVE_ULR", "x", "it does not end with a key of a transport", "Known keys: URL, "),
        ("HEADWATER_TRANSPORTS_ARCHIVE_BATCH_SIZE", "x", "must be a whole number, not 'x'", "The default is 1"),
        ("HEADWATER_TRANSPORTS__URL", "x", "'' cannot name a transport", "Use lower-case letters"),
        ("HEADWATER_MESSAGES_NOTED", "x", "messages are set in the file alone", "Write a [messages.TYPE] table"),
    ],
)
def test_errors_of_variables(load, name, value, why, next):
    with pytest.raises(InvalidConfigurationError) as caught:
        load("", {name: value})
    assert (caught.value.where, caught.value.why) == (name, why)
    assert caught.value.next.startswith(next)
