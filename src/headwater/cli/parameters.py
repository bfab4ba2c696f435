"""How commands declare their parameters: options, flags and arguments by what their names do not say, and classes of
options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from headwater.cli.completion import Kind, offering


def option(metavar: str, help: str, *spellings: str, offers: Kind | None = None, **more: Any) -> Any:
    """An option with a value. Unless a long spelling is given, it is the parameter's name. `offers`: what a Tab
    completes it with."""
    return typer.Option(..., *spellings, metavar=metavar, help=help, autocompletion=offers and offering(offers), **more)


def flag(help: str, *spellings: str, **more: Any) -> Any:
    """An option without a value, or with one of a few."""
    return typer.Option(..., *spellings, help=help, **more)


def argument(metavar: str, help: str, *, offers: Kind | None = None, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=offers and offering(offers), **more)


class Shared:
    """Options that go together. A command's parameter of a subclass becomes the parameters of the subclass."""


def declared(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it, with all options spelled and shared ones expanded."""
    shared: dict[str, tuple[type[Shared], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        kind = each.annotation
        if isinstance(kind, type) and issubclass(kind, Shared):
            first, *others = inspect.signature(kind, eval_str=True).parameters.values()
            if each.default is not each.empty:  # such as that of a LOG that may be left out
                first = first.replace(default=each.default)
            shared[each.name] = kind, [part.name for part in (first, *others)]
            parameters += first, *others
        else:
            parameters.append(each)
    parameters = sorted(map(_spelled, parameters), key=_place)

    @functools.wraps(command)
    def call(**given: Any) -> None:
        made = {name: kind(**{each: given.pop(each) for each in names}) for name, (kind, names) in shared.items()}
        command(**given, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _spelled(parameter: inspect.Parameter) -> inspect.Parameter:
    parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    info = _option_of(parameter)
    spellings = () if info is None else info.param_decls or ()
    if info is None or any(each.startswith("--") for each in spellings):
        return parameter
    info = copy(info)
    info.param_decls = (f"--{parameter.name.strip('_').replace('_', '-')}", *spellings)
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, info])


def _option_of(parameter: inspect.Parameter) -> OptionInfo | None:
    about = getattr(parameter.annotation, "__metadata__", ())
    return next((each for each in about if isinstance(each, OptionInfo)), None)


def _place(parameter: inspect.Parameter) -> int:
    """Arguments come first, and options of a panel of their own last, as in the help."""
    info = _option_of(parameter)
    return 0 if info is None else 1 if info.rich_help_panel is None else 2
