"""Which source wins, and how each is named."""

import re
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import pytest

import headwater
from headwater.errors import InvalidConfigurationError
from headwater.settings.load import OTHER_VARIABLES, PATHS, VARIABLES, flag_of, variable_of
from headwater.settings.model import SECTIONS, Settings

# From the lowest to the highest; each says another port. The lowest two are the built-in default and profile.
SOURCES = {
    "profile test": 0,
    "headwater.toml": 1,
    "headwater.toml [profiles.test]": 2,
    "HEADWATER_SERVER_PORT": 3,
    "--port": 4,
}


def explained(settings: Settings) -> dict[str, tuple[object, str]]:
    return {key: (value, source) for key, value, source in settings.explain()}


@pytest.mark.parametrize("given", [each for n in range(5) for each in combinations(list(SOURCES)[1:], n)])
def test_the_highest_source_that_says_something_wins(load, given):
    base = "[server]\nport = 1\n" if "headwater.toml" in given else ""
    overlay = "[profiles.test.server]\nport = 2\n" if "headwater.toml [profiles.test]" in given else ""
    settings = load(
        base + overlay,
        environment={"HEADWATER_SERVER_PORT": "3"} if "HEADWATER_SERVER_PORT" in given else {},
        flags={"server.port": 4 if "--port" in given else None},
        profile="test",
    )
    winner = given[-1] if given else "profile test"
    assert settings.server.port == SOURCES[winner]
    assert explained(settings)["server.port"] == (SOURCES[winner], winner)


def test_without_anything_there_are_the_defaults(load):
    settings = load()
    assert settings.model_dump() == Settings().model_dump()
    assert {each.source for each in settings.explain()} == {"default"}
    assert settings.file is None
    assert (settings.profile, settings.server.port, settings.limits.fetch_wait) == (
        "development",
        8765,
        60.0,
    )


def test_a_key_of_the_file_leaves_its_neighbours_alone(load):
    settings = load("[server]\nport = 1\nconsole = false\n[profiles.development.server]\nport = 2\n")
    assert (settings.server.port, settings.server.console, settings.server.host) == (2, False, "127.0.0.1")


def test_another_profile_is_not_laid_over(load):
    assert load("[profiles.production.server]\nport = 2\n").server.port == 8765


def test_topics_of_a_profile_replace_those_of_the_file(load):
    text = """
        [[topics]]
        pattern = "a"
        max_count = 1
        [[topics]]
        pattern = "b"
        max_age = "7d"
        [[profiles.test.topics]]
        pattern = "c.#"
        dialect = "amqp"
        max_bytes = "10GiB"
    """
    settings = load(text)
    assert [topic.pattern for topic in settings.topics] == ["a", "b"]
    assert settings.topics[1].max_age == 7 * 24 * 3600
    [only] = load(text, profile="test").topics
    assert (only.pattern, only.dialect, only.max_bytes) == ("c.#", "amqp", 10 * 1024**3)
    found = explained(load(text, profile="test"))
    assert found["topics[0].max_bytes"] == (10 * 1024**3, "headwater.toml [profiles.test]")
    assert found["topics[0].max_count"] == (None, "default")


# --- profiles -------------------------------------------------------------------------------------------------------


def test_what_profiles_change_by_themselves(load):
    development, test = load(profile="development"), load(profile="test")
    production = load(profile="production", flags={"server.tokens": "tokens.json"})
    assert development.model_dump() == Settings().model_dump()
    assert (test.server.port, test.server.log, test.server.log_format) == (0, "memory:", "text")
    assert (production.server.port, production.server.log_format) == (8765, "json")
    assert explained(production)["server.log_format"] == ("json", "profile production")


def test_which_source_chooses_the_profile(load):
    text = 'profile = "test"\n[server]\nallow_anonymous = true\n'
    by_variable = {"HEADWATER_PROFILE": "production"}
    assert explained(load(text))["profile"] == ("test", "headwater.toml")
    assert explained(load(text, by_variable))["profile"] == ("production", "HEADWATER_PROFILE")
    assert explained(load(text, by_variable, profile="development"))["profile"] == ("development", "--profile")


# --- files ----------------------------------------------------------------------------------------------------------


def test_which_file_is_read(load, tmp_path):
    for name, port in (("headwater.toml", 1), ("a.toml", 2), ("b.toml", 3)):
        (tmp_path / name).write_text(f"[server]\nport = {port}\n")
    by_variable = {"HEADWATER_CONFIG": "a.toml"}
    loaded = [load(), load(environment=by_variable), load(environment=by_variable, config=str(tmp_path / "b.toml"))]
    assert [settings.server.port for settings in loaded] == [1, 2, 3]
    assert [settings.file for settings in loaded] == ["headwater.toml", "a.toml", str(tmp_path / "b.toml")]


def test_a_byte_order_mark_is_no_error(load):
    assert load("\ufeff[server]\nport = 1\n").server.port == 1


# --- the environment and flags --------------------------------------------------------------------------------------


def test_every_key_has_its_variable_and_its_flag():
    assert len(PATHS) == sum(len(model.model_fields) for model in SECTIONS.values()) > 30
    assert len({variable_of(path) for path in PATHS}) == len({flag_of(path) for path in PATHS}) == len(PATHS)
    assert variable_of("limits.frame_bytes") == "HEADWATER_LIMITS_FRAME_BYTES"
    flags = [flag_of(path) for path in ("server.log", "server.allow_anonymous", "limits.frame_bytes")]
    assert flags == ["LOG", "--allow-anonymous", "--limits-frame-bytes"]


@pytest.mark.parametrize("path", PATHS)
def test_a_default_survives_the_way_through_its_variable_and_its_flag(load, path):
    value = explained(load())[path][0]
    word = "" if value is None else ",".join(value) if isinstance(value, list) else str(value)
    name = variable_of(path)
    assert explained(load(environment={name: word}))[path] == (value, name)
    assert explained(load(flags={path: word}))[path] == (value, flag_of(path))


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("HEADWATER_SERVER_CONSOLE", "No", "server.console", False),
        ("HEADWATER_SERVER_TRACING", "1", "server.tracing", True),
        ("HEADWATER_SERVER_ORIGINS", " https://a.example ,https://b.example:81,", "server.origins",
         ["https://a.example", "https://b.example:81"]),
        ("HEADWATER_LIMITS_FRAME_BYTES", "1MiB", "limits.frame_bytes", 1024**2),
        ("HEADWATER_LIMITS_FETCH_WAIT", "90s", "limits.fetch_wait", "1m30s"),
        ("HEADWATER_LOG_SUBSCRIPTION_TIMEOUT", "30d", "log.subscription_timeout", "30d"),
        ("HEADWATER_TOKENS", "tokens.json", "server.tokens", "tokens.json"),
    ],
)  # fmt: skip
def test_variables_are_read_as_what_they_set(load, name, text, path, value):
    assert explained(load(environment={name: text}))[path] == (value, name)


def test_flags_may_be_typed_already(load):
    settings = load(flags={"server.console": False, "server.origins": ["*"], "limits.fetch_wait": timedelta(seconds=5)})
    assert (settings.server.console, settings.server.origins) == (False, ("*",))
    assert settings.limits.fetch_wait == 5.0
    assert load(flags={"server.origins": ("https://a.example",)}).server.origins == ("https://a.example",)


def test_nothing_is_set_where_the_file_set_something(load):
    text = '[server]\ntokens = "tokens.json"\n[log]\nsubscription_timeout = "1d"\n'
    assert load(text).server.tokens == "tokens.json"
    emptied = load(text, {"HEADWATER_TOKENS": "", "HEADWATER_LOG_SUBSCRIPTION_TIMEOUT": ""})
    assert (emptied.server.tokens, emptied.log.subscription_timeout) == (None, None)
    assert explained(emptied)["server.tokens"] == (None, "HEADWATER_TOKENS")


def test_variables_of_others_are_left_alone(load):
    others = {"PATH": "x", "headwater_server_port": "1", "HEADWATER_DEBUG": "1", "HEADWATER_TOKEN": "secret"}
    assert {each.source for each in load(environment=others).explain()} == {"default"}


def test_every_variable_in_the_code_is_known():
    """A server starts on a machine that also runs clients and commands with variables of their own."""
    source = "".join(path.read_text() for path in Path(headwater.__file__).parent.rglob("*.py"))
    in_code = set(re.findall(r'"(HEADWATER_[A-Z_]+)"', source))
    assert "HEADWATER_PUSH_KEY" in in_code
    assert in_code <= {*OTHER_VARIABLES, *VARIABLES}


def test_what_kubernetes_says_of_services_called_headwater_is_left_alone(load):
    links = {
        f"{service}_{name}": value
        for service in ("HEADWATER", "HEADWATER_SERVER")
        for name, value in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "8765",
            "SERVICE_PORT_HTTP": "8765",
            "PORT": "tcp://10.0.0.1:8765",
            "PORT_8765_TCP": "tcp://10.0.0.1:8765",
            "PORT_8765_TCP_PROTO": "tcp",
            "PORT_8765_TCP_ADDR": "10.0.0.1",
        }.items()
    }
    assert {each.source for each in load(environment=links).explain()} == {"default"}
    with pytest.raises(InvalidConfigurationError, match=r"HEADWATER_SERVICE_PORT.*HEADWATER_SERVER_PORT"):
        load(environment={"HEADWATER_SERVICE_PORT": "8765"})


def test_lengths_of_time_are_seconds_in_every_source(load):
    by_file = load('[limits]\nfetch_wait = "1m30s"\n')
    by_variable = load(environment={"HEADWATER_LIMITS_FETCH_WAIT": "1m30s"})
    assert by_file.limits.fetch_wait == by_variable.limits.fetch_wait == 90.0


# --- values ---


def test_settings_cannot_be_changed(load):
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1
    with pytest.raises(ValueError, match="frozen"):
        settings.profile = "test"


def test_numbers_in_the_file_are_seconds(load):
    settings = load("[limits]\nfetch_wait = 90\nrequest_timeout = 0.25\n")
    assert (settings.limits.fetch_wait, settings.limits.request_timeout) == (90.0, 0.25)
