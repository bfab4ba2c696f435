"""Writes the pages of the reference that follow from the code: `python tools/generate_reference.py`, or with `--check`
only compares.

The Python API comes from signatures and docstrings, the command line from its parameters, the configuration from the
settings and the comments of `examples/headwater.toml`, the metrics from their registry, the schema from its SQL.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, UnsetType

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
HEADER = "<!-- Written by tools/generate_reference.py: change the code that it describes, not this page. -->\n\n"
WIDTH = 100

API_INTRO = """# Python API

Every public name, from the docstrings. Import names from `headwater`, unless the section names another module.
[Options and limits](options.md) explains the options of `open`, `subscribe`, `on` and `publish`. `Span` is a
duration: seconds, a timedelta, or a text like `"1h30m"`. `Moment` is a time: an aware datetime, or seconds since
1970.

"""
CLI_INTRO = """# Command line

Every command and flag, from the code. [Options and limits](options.md#command-line) explains what all commands
share: the LOG, positions, filters and output.

"""
CONFIGURATION_INTRO = """# Configuration

`headwater serve` and `headwater.serve` read these settings. Later sources override earlier ones: the defaults, the
profile, `headwater.toml`, its `[profiles.…]` tables, variables, flags. A variable is named after its section and key,
like `HEADWATER_SERVER_PORT`. `headwater config show` prints each value and its source; `headwater config check` lists
all errors. An unknown key is an error. `examples/headwater.toml` has every setting in one file.

Durations are texts like `"250ms"`, `"3s"` and `"1h30m"`, or numbers of seconds. Sizes are bytes, or texts like
`"512MB"` and `"10GiB"`. Lists in variables are separated by commas.

| profile | changes |
|---|---|
| `development` | none; the default |
| `test` | `server.port` is 0 (any free port), `server.log` is `memory:` |
| `production` | `server.log_format` is `json`, and tokens are required |

The profile is `profile` in the file, `HEADWATER_PROFILE` or `--profile`.

"""
METRICS_INTRO = """# Metrics

A server answers `/metrics` in the text format of Prometheus. On a server with tokens, a scrape needs a token with the
right `admin`, or `manage` of `>`, unless `metrics_need_token` is false. [Endpoints](server.md#endpoints) says what
a scrape costs and how it is cached. Metrics of subscriptions cover the first 1,000 by id.

"""
WIRE_INTRO = """# Methods on the wire

Every method of a server with its params and the right that it needs, from the code.
[Server and wire](server.md#methods) says what each method does and returns, and has the notifications and the
error codes. Durations are seconds, times are ISO 8601. An unknown param is an error.

"""
SCHEMA_INTRO = """# Schema

The tables of a log in SQLite, schema version {}. A log in PostgreSQL has the same tables in its own schema
(`headwater`), with PostgreSQL's types. Write to `messages` only: an INSERT is a publish. Read messages from
`history`. The other tables are read-only for your programs; a later version may change them.

"""


def table(head: list[str], rows: list[list[str]]) -> str:
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *escaped)) + "\n\n"


def code(text: str | None) -> str:
    return f"`{text}`" if text else ""


# --- the Python API ---------------------------------------------------------------------------------------------------

# By section: the module, and the names of it. A name of a class stands for its public members too.
API: dict[str, tuple[str, list[str]]] = {
    "Opening": (
        "headwater",
        [
            "open",
            "open_async",
            "serve",
            "open_bus",
            "open_bus_async",
            "open_transport",
            "open_dedupe",
            "sync",
            "follow",
        ],
    ),
    "The log": ("headwater", ["Log"]),
    "`log.dead_letters`": ("headwater.api._sync", ["DeadLetters"]),
    "`log.live`": ("headwater.broker.live", ["LiveVerbs"]),
    "`log.remote`": ("headwater.api._sync", ["Remote"]),
    "Transactions": ("headwater.api._sync", ["Transaction"]),
    "Subscriptions and messages": ("headwater", ["Subscription", "ReceivedMessage", "Message"]),
    "Dead letters, gaps, occurrences": ("headwater", ["DeadLetter", "Gap", "Occurrence"]),
    "Statistics": ("headwater.broker.statistics", ["LogStatistics", "SubscriptionInfo"]),
    "Schedules": ("headwater.broker.schedules", ["ScheduleInfo"]),
    "Maintenance": ("headwater.broker.maintenance", ["MaintenanceReport"]),
    "Replication": ("headwater.replication.follow", ["Follower", "Outcome"]),
    "Forwarding": ("headwater", ["Forwarder", "MultiTransport"]),
    "Classes of messages": ("headwater", ["Event"]),
    "The module `headwater.typed`": (
        "headwater.typed",
        ["Bus", "AsyncBus", "Registry", "publish_many", "on", "register_serializer", "json_schema", "asyncapi"],
    ),
    "Servers": ("headwater.server.server", ["Server"]),
    "Middleware": ("headwater", ["Middleware", "ShortCircuit"]),
    "Handlers": ("headwater", ["Reject"]),
    "The module `headwater.testing`": (
        "headwater.testing",
        ["open_log", "open_log_async", "drain", "published", "assert_published", "clock_of", "Drained", "HandlerError"],
    ),
    "Clocks for tests": ("headwater", ["ManualClock"]),
    "The module `headwater.pipeline`": ("headwater.pipeline", ["session", "register"]),
}
ASYNC = {"AsyncLog": "Log", "AsyncSubscription": "Subscription", "AsyncReceivedMessage": "ReceivedMessage"}
INTERNAL = {
    "raw",
    "raw_headers",
    "identity",
    "settled",
    "declined",
    "model_config",
    "client_options",
    "read_instead",
    "admit",
    "answer",
    "loop",
}


def shown_name(kind: type) -> str:
    return kind.__name__.removesuffix("Verbs")  # log.live is of one of several classes, which share a protocol


def public_members(kind: type) -> dict[str, Any]:
    """Methods, properties and fields of a class and of its bases in Headwater, in the order of the source."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("headwater"):
            continue
        fields = dict.fromkeys(inspect.get_annotations(base))
        for name, value in {**fields, **vars(base)}.items():
            if (not name.startswith("_") and name not in INTERNAL and not name.endswith("_ms")) or name == "now_ms":
                found[name] = value
    return found


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below fields of a class."""
    found = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("headwater"):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return found


def signature(function: Callable[..., Any], name: str) -> str:
    try:
        found = inspect.signature(function)
    except ValueError:
        return f"{name}(…)"
    parameters = list(found.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    parts: list[str] = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts):
            parts.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        parts.append(star + each.name + _annotation(each.annotation) + _default(each))
    result = _annotation(found.return_annotation, " -> ")
    prefix = "async def " if inspect.iscoroutinefunction(inspect.unwrap(function)) else "def "
    line = f"{prefix}{name}({', '.join(parts)}){result}"
    if len(line) > WIDTH:
        line = f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return line


def _annotation(annotation: Any, before: str = ": ") -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    annotation = getattr(annotation, "__forward_arg__", annotation)  # of a named tuple
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return before + re.sub(r"\b(?:headwater|collections|datetime|typing)\.(?:\w+\.)*(?=\w)", "", text)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    return " = …" if repr(parameter.default).startswith("<") else f" = {parameter.default!r}"


def entry(kind: type, name: str, value: Any, docs: dict[str, str]) -> str:
    heading = f"#### `{shown_name(kind)}.{name}`\n\n"
    function = inspect.unwrap(value.__func__ if isinstance(value, classmethod | staticmethod) else value)
    if inspect.isfunction(function):
        decorators = "@classmethod\n" if isinstance(value, classmethod) else ""
        return f"{heading}```python\n{decorators}{signature(function, name)}\n```\n\n{inspect.getdoc(value) or ''}\n\n"
    if isinstance(value, property):
        kind_of = _annotation(inspect.signature(value.fget).return_annotation) if value.fget else ""
        return f"{heading}```python\n{name}{kind_of}\n```\n\n{inspect.getdoc(value) or ''}\n\n"
    return f"{heading}{docs.get(name, '')}\n\n"


def class_section(kind: type) -> str:
    text = f"### `{shown_name(kind)}`\n\n{inspect.cleandoc(vars(kind).get('__doc__') or '')}\n\n"
    docs = field_docs(kind)
    rows, entries = [], ""
    annotations = {name: each for base in kind.__mro__ for name, each in inspect.get_annotations(base).items()}
    for name, value in public_members(kind).items():
        if isinstance(value, property) or (name in annotations and not inspect.isfunction(inspect.unwrap(value))):
            annotation = annotations.get(name)
            if isinstance(value, property) and value.fget:
                annotation = inspect.signature(value.fget).return_annotation
            shown = _annotation(annotation, "") if annotation is not None else ""
            shown = re.sub(r"^Annotated\[(.*?), [A-Z]\w+\(.*\)\]$", r"\1", shown)
            about = inspect.getdoc(value) if isinstance(value, property) else docs.get(name)
            rows.append([code(name), code(shown), about or SAME_AS.get((kind.__name__, name), "")])
        else:
            entries += entry(kind, name, value, docs)
    if any(about for *_, about in rows):
        text += table(["attribute", "type", "meaning"], rows)
    elif rows:
        text += table(["attribute", "type"], [row[:2] for row in rows])
    return text + entries


SAME_AS: dict[tuple[str, str], str] = {}  # fields whose text is elsewhere


def async_section(name: str, other: str) -> str:
    kind = getattr(importlib.import_module("headwater"), name)
    rows = []
    for member, value in public_members(kind).items():
        if isinstance(value, property):
            rows.append([code(member), "attribute"])
        else:
            function = inspect.unwrap(value)
            how = "awaited" if inspect.iscoroutinefunction(function) else ""
            if inspect.isasyncgenfunction(function):
                how = "`async with`" if member == "transaction" else "`async for`"
            if member == "subscribe":
                how = "`async with`, or awaited"
            rows.append([code(member), how or "called"])
    return (
        f"### `{name}`\n\nThe asyncio counterpart of [`{other}`](#{other.lower()}), with the same parameters.\n\n"
        + table(["member", "use"], rows)
    )


def api_page() -> str:
    headwater = importlib.import_module("headwater")
    message = importlib.import_module("headwater.api.received").Received
    for name, value in public_members(message).items():
        SAME_AS["Message", name] = inspect.getdoc(value) or ""
    text = API_INTRO
    for section, (module, names) in API.items():
        text += f"## {section}\n\n"
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                text += class_section(value)
            else:
                shown = f"{module}.{name}" if not module.startswith("headwater.api") else name
                text += (
                    f"### `{shown}`\n\n```python\n{signature(value, name)}\n```\n\n{inspect.getdoc(value) or ''}\n\n"
                )
    text += "## asyncio\n\n" + "".join(async_section(name, other) for name, other in ASYNC.items())
    tree = (inspect.getdoc(headwater.errors) or "").split("\n\n")
    text += f"## Errors\n\nThe module `headwater.errors` has every error. {tree[3]} {tree[2]}\n\n"
    text += f"```text\n{tree[1]}\n```\n\n"
    text += f"### `HeadwaterError`\n\n{inspect.getdoc(headwater.HeadwaterError)}\n"
    return text


# --- the command line -------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name; a group comes before its commands. Former names are hidden."""
    from headwater.cli.commands import TARGETS, load_command

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for each, found in getattr(command, "commands", {}).items():
            if not found.hidden:
                yield from walk(f"{name} {each}", found)

    for name in TARGETS:
        yield from walk(name, load_command(name))


def plain(text: str | None) -> str:
    """Help without its colours."""
    return re.sub(r"\[/?(?:dim|bold|b|i|cyan|green|yellow|red|/)?\]", "", text or "").strip()


def help_text(text: str | None) -> str:
    """Paragraphs as they are, and those with aligned lines as blocks."""
    paragraphs = plain(text).split("\n\n")
    aligned = re.compile(r"^(?:\s{2,}|\S+:\s{2,}|headwater )|\S {2,}\S", re.MULTILINE)
    return "\n\n".join(
        f"```text\n{each}\n```" if aligned.search(each) else each.replace("<", "\\<") for each in paragraphs
    )


def default_of(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or value is False or value == () or value == []:
        return ""
    return code(str(getattr(value, "value", value)))


def cli_page() -> str:
    import click

    from headwater.cli import commands as module

    text = CLI_INTRO + f"{plain(module._EXITS)}\n\n"
    for name, command in commands():
        depth = "##" if " " not in name else "###"
        context = click.Context(command, info_name=f"headwater {name}")
        text += f"{depth} `headwater {name}`\n\n{help_text(command.help)}\n\n"
        usage = " ".join(command.collect_usage_pieces(context))
        text += f"```text\nheadwater {name} {usage}\n```\n\n"
        rows = []
        for each in command.params:
            if each.name in ("help", "install_completion", "show_completion") or getattr(each, "hidden", False):
                continue
            about = plain(getattr(each, "help", ""))
            if each.param_type_name == "argument":
                rows.append([code(re.sub(r"^\[(.*)\]$", r"\1", each.make_metavar(context))), about, default_of(each)])
            else:
                spelled = ", ".join(f"`{flag}`" for flag in (*each.opts, *each.secondary_opts))
                metavar = "" if each.is_flag else f" {code(each.make_metavar(context))}"
                rows.append([spelled + metavar, about, default_of(each)])
        if any(default for *_, default in rows):
            text += table(["argument", "meaning", "default"], rows)
        elif rows:
            text += table(["argument", "meaning"], [row[:2] for row in rows])
    return text


# --- the configuration ------------------------------------------------------------------------------------------------


def example_settings() -> dict[str, tuple[str, str]]:
    """`section.key` of examples/headwater.toml: the value and the comment beside it."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for line in (ROOT / "examples" / "headwater.toml").read_text().splitlines():
        line = line.removeprefix("#: ")
        if heading := re.match(r"\[+([\w.]+)\]+", line):
            section = heading[1].split(".")[0]
        elif setting := re.match(r"(\w+) = (\"[^\"]*\"|[^#]*?)\s*(?:#\s*(.*))?$", line):
            found.setdefault(f"{section}.{setting[1]}", (setting[2], setting[3] or ""))
    return found


def configuration_page() -> str:
    from headwater.settings.model import NAMED_TABLES, SECTIONS, TopicSettings

    examples = example_settings()
    text = CONFIGURATION_INTRO
    named = {f"{name}.NAME": model for name, model in NAMED_TABLES.items()}
    for section, model in {**SECTIONS, "topics": TopicSettings, **named}.items():
        brackets = f"[[{section}]]" if section == "topics" else f"[{section}]"
        text += f"## `{brackets}`\n\n" + (
            f"{inspect.cleandoc(model.__doc__)}\n\n" if "__doc__" in vars(model) and model.__doc__ else ""
        )
        rows = []
        for key, field in model.model_fields.items():
            value, about = examples.get(f"{section.split('.')[0]}.{key}", ("", ""))
            rows.append([code(key), "" if field.is_required() or field.default is None else code(value), about])
        text += table(["setting", "default", "meaning"], rows)
    return text


# --- metrics ----------------------------------------------------------------------------------------------------------


def metric_families() -> list[Any]:
    from headwater.replication.host.events import ReplicaMetrics
    from headwater.server.pages import Metrics

    metrics = Metrics()
    ReplicaMetrics(metrics, running=lambda _: 0, pushes_max=0)
    return list(metrics._registry._collector_to_names)


def metrics_page() -> str:
    rows = []
    for each in metric_families():
        name = each._name + ("_total" if each._type == "counter" else "")
        rows.append([code(name), each._type, ", ".join(code(label) for label in each._labelnames), each._documentation])
    return METRICS_INTRO + table(["metric", "type", "labels", "meaning"], rows)


# --- the wire ---------------------------------------------------------------------------------------------------------


def type_name(wanted: Any) -> str:
    """A type as people write it in JSON."""
    if get_origin(wanted) is Annotated:
        return type_name(get_args(wanted)[0])
    if isinstance(wanted, UnionType) or get_origin(wanted) is Union:
        return " or ".join(dict.fromkeys(type_name(each) for each in get_args(wanted) if each is not UnsetType))
    if get_origin(wanted) in (list, tuple):
        return f"list of {type_name(get_args(wanted)[0])}"
    if get_origin(wanted) is Literal:
        return " or ".join(f'"{each}"' for each in get_args(wanted))
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "boolean",
        type(None): "null",
        Raw: "JSON",
        Any: "JSON",
    }
    if wanted in names:
        return names[wanted]
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return f"object ({', '.join(each.encode_name for each in msgspec.structs.fields(wanted))})"
    return "object"


def wire_page() -> str:
    from headwater.server.methods import METHODS

    text = WIRE_INTRO
    for name, method in METHODS.items():
        rights = " or ".join(f"`{right}`" for right in method.needs.rights)
        needs = f"Needs {rights} for: {method.needs.of}." if rights else "Open to clients that have not authenticated."
        text += f"## `{name}`\n\n{needs}\n\n"
        rows = []
        if get_origin(method.params):
            text += f"The params are a {type_name(method.params)}.\n\n"
            continue
        for each in msgspec.structs.fields(method.params) if method.params else ():
            if each.required:
                default = "required"
            elif each.default in (None, UNSET) or each.default is msgspec.NODEFAULT:
                default = ""
            else:
                default = code(msgspec.json.encode(each.default).decode())
            rows.append([code(each.encode_name), type_name(each.type), default])
        text += table(["param", "type", "default"], rows) if rows else "No params.\n\n"
    return text


# --- the schema -------------------------------------------------------------------------------------------------------


def statements(path: str) -> list[tuple[str, str, str, str]]:
    """Kind, name, comment and SQL of each table and view, with the indexes below it."""
    found: list[tuple[str, str, str, str]] = []
    for block in (ROOT / path).read_text().split("\n\n"):
        comment = " ".join(line.removeprefix("--").strip() for line in block.splitlines() if line.startswith("--"))
        sql = "\n".join(line for line in block.splitlines() if not line.startswith("--"))
        if made := re.match(r"CREATE (TABLE|VIEW) (\w+)", sql):
            found.append((made[1], made[2], comment, sql))
        elif found and sql.strip():
            kind, name, before, above = found.pop()
            found.append((kind, name, before, f"{above}\n\n{sql}"))
    return found


def schema_page() -> str:
    sqlite = statements("src/headwater/stores/sqlite/schema.sql")
    postgres = {name for _, name, _, _ in statements("src/headwater/stores/postgres/schema.sql")}
    from headwater.stores.sqlite.migrations import SCHEMA_VERSION

    text = SCHEMA_INTRO.format(SCHEMA_VERSION)
    for kind, name, comment, sql in sqlite:
        note = "" if name in postgres else " In a file only."
        text += (
            f"## `{name}`\n\n{'A view. ' if kind == 'VIEW' else ''}{comment}{note}\n\n```sql\n{sql.strip()}\n```\n\n"
        )
    functions = re.findall(
        r"((?:^--[^\n]*\n)*)^CREATE OR REPLACE FUNCTION (\w+)",
        (ROOT / "src/headwater/stores/postgres/functions.sql").read_text(),
        re.MULTILINE,
    )
    rows = [
        [code(name), " ".join(line.removeprefix("--").strip() for line in about.splitlines())]
        for about, name in functions
    ]
    return text + "## Functions in PostgreSQL\n\n" + table(["function", "purpose"], rows)


MAKERS = {
    "api.md": api_page,
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "wire.md": wire_page,
    "schema.md": schema_page,
}


def main() -> int:
    stale = []
    for name, make in MAKERS.items():
        page = HEADER + re.sub(r"[ \t]+$", "", re.sub(r"\n{3,}", "\n\n", make()), flags=re.MULTILINE).rstrip() + "\n"
        if "--check" not in sys.argv:
            PAGES.mkdir(exist_ok=True)
            (PAGES / name).write_text(page)
        elif not (PAGES / name).exists() or (PAGES / name).read_text() != page:
            stale.append(f"docs/reference/{name}")
    if stale:
        print(f"not what the code says: {', '.join(stale)}. Run python tools/{Path(__file__).name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
