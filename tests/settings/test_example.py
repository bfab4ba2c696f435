"""examples/headwater.toml shows every key with its default."""

import re
import tomllib
from pathlib import Path
from typing import get_args

from headwater.settings.load import load_settings
from headwater.settings.model import SECTIONS, Settings, TopicSettings, TransportSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "headwater.toml"


def load(path: Path, profile: str | None = None) -> Settings:
    return load_settings(config=str(path), profile=profile, flags={}, environment={}, directory=str(path.parent))


def test_the_example_says_the_defaults():
    assert load(EXAMPLE).model_dump() == Settings().model_dump()


def test_the_example_has_every_key_in_order():
    tables = tomllib.loads(EXAMPLE.read_text())
    assert list(tables) == ["profile", *SECTIONS]
    assert {name: list(tables[name]) for name in SECTIONS} == {
        name: list(model.model_fields) for name, model in SECTIONS.items()
    }


def test_what_the_example_only_suggests_can_be_used(tmp_path: Path):
    suggested = re.sub(r"^#: ", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    path = tmp_path / "headwater.toml"
    path.write_text(suggested)
    [topic] = load(path).topics
    assert topic.model_fields_set == set(TopicSettings.model_fields)
    assert (load(path).server.host, load(path, "production").server.host) == ("127.0.0.1", "0.0.0.0")
    archive = load(path).transports["archive"]
    assert archive.model_fields_set == set(TransportSettings.model_fields)
    assert archive.model_dump(exclude={"url"}) == TransportSettings().model_dump(exclude={"url"})
    assert load(path, "test").transports["archive"].url == "memory:"
    assert load(path).messages["OrderPlaced"].transports == ("archive",)


def test_the_example_names_every_choice():
    text = EXAMPLE.read_text()
    for model in (*SECTIONS.values(), TopicSettings):
        for key, field in model.model_fields.items():
            choices = [each for each in get_args(field.annotation) if isinstance(each, str)]
            assert [choice for choice in choices if f'"{choice}"' not in text] == [], key
