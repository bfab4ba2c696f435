"""`headwater schema`: the message classes of a module, as documents for others."""

from __future__ import annotations

import importlib
import os
import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec
import typer

from headwater.cli.output import note, say, some, write_document
from headwater.errors import HeadwaterError, InvalidOption


class Format(StrEnum):
    json_schema = "json-schema"
    asyncapi = "asyncapi"


def schema(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="A Python module, like shop.events.", show_default=False)
    ],
    format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.json_schema,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Write it there; into a directory, a file for each schema."),
    ] = None,
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="Title of an AsyncAPI document.")] = "Events",
    api_version: Annotated[
        str, typer.Option("--api-version", metavar="TEXT", help="Version of an AsyncAPI document.")
    ] = "1.0.0",
) -> None:
    """Write the message classes of a module as JSON Schemas, or as an AsyncAPI document.

    The module is imported, from here or from where Python finds it.

    [dim]For the pipeline:[/]  headwater schema shop.events --output types/
    """
    # Imported when needed: pydantic takes longer to import than most commands take to run.
    from headwater.typed.exporting import asyncapi, classes_in, gaps_in, json_schema

    loaded = _import(module)
    if not classes_in(loaded):
        raise InvalidOption(
            "there is no message class with a topic in it",
            where=module,
            next="Name the module that has class OrderPlaced(headwater.Event, topic=…), or imports it",
        )
    for gap in gaps_in(loaded):
        note(f"warning: {gap}")
    if format is Format.asyncapi:
        document: dict[str, Any] = asyncapi(loaded, title=title, version=api_version)
    else:
        document = json_schema(loaded)
    if output is None:
        write_document(document)
    elif format is Format.json_schema and (output.endswith(("/", os.sep)) or os.path.isdir(output)):
        for name, each in document.items():
            _write(Path(output) / f"{name}.json", each)
        say(f"{some(len(document), 'schema')} in {output}")
    else:
        _write(Path(output), document)
        say(f"wrote {output}")


def _import(module: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except HeadwaterError:  # a class in it that cannot be; it says which
        raise
    except ModuleNotFoundError as exc:
        missing = exc.name or module
        if module == missing or module.startswith(f"{missing}."):
            next = "Name it as in an import, without .py; it is looked for here and where Python looks"
        else:
            next = f"It imports {missing}: install that, or run this where it is"
        raise InvalidOption(f"there is no module {missing!r}", where=module, next=next) from exc
    except (Exception, SystemExit) as exc:
        raise InvalidOption(
            f"it cannot be imported: {type(exc).__name__}: {exc}",
            where=module,
            next="HEADWATER_DEBUG=1 shows where",
        ) from exc


def _write(path: Path, document: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    except OSError as exc:
        raise InvalidOption(f"it cannot be written: {exc.strerror}", where=str(path), next="Name another") from exc
