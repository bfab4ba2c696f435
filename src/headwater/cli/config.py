"""`headwater config`: the settings of a server here, and the source of each; and `headwater version`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from headwater.cli.arguments import AsJson, Group
from headwater.cli.main import show_version, versions
from headwater.cli.output import say, show_list, write_document
from headwater.cli.parameters import option
from headwater.formats import plural

if TYPE_CHECKING:
    from headwater.settings import Explained, Settings

config = Group(help="The configuration: headwater.toml, HEADWATER_… variables, flags.")

ConfigFile = Annotated[
    str | None, option("FILE", "The configuration file. Else HEADWATER_CONFIG, or ./headwater.toml.", "--config")
]
ProfileName = Annotated[str | None, option("NAME", "One of development, test and production.")]


@config.command("show")
def show(file: ConfigFile = None, profile: ProfileName = None, as_json: AsJson = False) -> None:
    """Show every setting, its value and where that came from."""
    settings = _settings(file, profile)
    from headwater.settings.model import as_toml

    columns: dict[str, Callable[[Explained], str]] = {
        "key": lambda each: each.key,
        "~value": lambda each: as_toml(each.value),
        "source": lambda each: each.source,
    }
    read = {"file": settings.file, "profile": settings.profile}
    show_list(settings.explain(), lambda each: each._asdict(), columns, empty="", as_json=as_json, **read)


@config.command("check")
def check(file: ConfigFile = None, profile: ProfileName = None, as_json: AsJson = False) -> None:
    """Check the configuration; every problem is listed.

    All profiles are checked one by one, and the chosen profile as a whole.
    Files that settings name, such as tokens and certificates, are not opened.
    """
    settings = _settings(file, profile)
    sources = Counter(each.source for each in settings.explain())
    defaults = sources.pop("default")
    if as_json:
        write_document({"file": settings.file, "profile": settings.profile, "set": sources, "defaults": defaults})
        return
    read = f"{settings.file} is fine" if settings.file else "fine; there is no file"
    say(f"{read} (profile {settings.profile})")
    for source, number in sources.items():
        say(f"  {plural(number, 'value')} from {source}")
    say(f"  {plural(defaults, 'default')}")


def _settings(file: str | None, profile: str | None) -> Settings:
    # Imported when needed: pydantic takes longer to import than most commands take to run.
    from headwater.settings import load_settings

    return load_settings(config=file, profile=profile)


def version(as_json: AsJson = False) -> None:
    """Show the versions of Headwater and of the libraries it uses."""
    if as_json:
        write_document(versions())
    else:
        show_version()
