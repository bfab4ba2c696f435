"""Flags for settings that a command need not name one by one: `--limits-burst 10` is the setting `limits.burst`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from headwater.errors import InvalidOption

SECTIONS = ("limits", "log", "replicas")
_KEPT = "headwater.settings"


class SettingsCommand(TyperCommand):
    """Takes them out before typer looks, so that which of them exist is known in one place: the settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {spelling for parameter in self.params for spelling in parameter.opts}
        rest: list[str] = []
        found: dict[str, str] = {}
        words = iter(args)
        for word in words:
            flag, has_value, value = word.partition("=")
            path = None if flag in declared else setting_of(flag)
            if word == "--":
                rest += [word, *words]
            elif path is None:
                rest.append(word)
            else:
                said = value if has_value else next(words, None)
                if said is None:
                    raise InvalidOption(f"{flag} wants a value", next=f"{ctx.command_path} --help")
                found[path] = said
        ctx.meta[_KEPT] = found
        return super().parse_args(ctx, rest)


def setting_of(flag: str) -> str | None:
    """`--limits-frame-bytes` is `limits.frame_bytes`; None if the flag has no such form."""
    section, _, key = flag.removeprefix("--").partition("-")
    if not flag.startswith("--") or section not in SECTIONS or not key:
        return None
    return f"{section}.{key.replace('-', '_')}"


def settings_given(ctx: Any) -> dict[str, str]:
    """What was said this way, by the paths of the settings."""
    given: dict[str, str] = ctx.meta.get(_KEPT, {})
    return given
