"""HTML that cannot be broken from inside: whatever is not `Html` already is escaped on its way in. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable

from headwater.pipeline.page.words import clean

_VOID = frozenset({"br", "hr", "link", "meta", "rect", "line", "path", "circle"})  # SVG shapes too, when childless


class Html(str):
    """Text that is markup. Only this module makes it, so an f-string by mistake is seen as text, never run."""

    __slots__ = ()


def text(value: str) -> Html:
    """Markup stays as it is; anything else becomes text, with its control characters made visible."""
    return value if isinstance(value, Html) else Html(html.escape(clean(value)))


def join(parts: Iterable[str], between: str = "") -> Html:
    return Html(text(between).join(text(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Html:
    """An element. Attributes: `class_` is `class`, `_` becomes `-`; None and False leave one out, True has no value."""
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not children:
        return Html(f"<{opening}>" if name in ("br", "hr", "link", "meta") else f"<{opening}/>")
    return Html(f"<{opening}>{''.join(text(child) for child in children)}</{name}>")


def trusted(markup: str) -> Html:
    """For what ships with the package (its style sheet); never for data."""
    return Html(markup)


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = _SPELLED.get(key) or key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    written = value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(clean(written))}"'


# SVG has attributes in camel case, which `_` must not touch.
_SPELLED = {"viewBox": "viewBox", "preserveAspectRatio": "preserveAspectRatio"}
