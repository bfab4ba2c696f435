"""What to write instead of a command or an option that is not there."""

from __future__ import annotations

import re
from typing import Any

from headwater.arguments import word_here

# The words of other systems and of other commands, by the command here; a blank stands between a group and its command.
_COMMANDS = {
    "publish": "send produce enqueue emit pub add",
    "subscribe": "consume sub read receive listen",
    "tail": "cat watch monitor show log",
    "topics": "list ls streams queues",
    "subscriptions": "consumers groups consumer",
    "subscriptions rm": "unsubscribe",
    "subscriptions seek": "seek rewind",
    "subscriptions pause": "pause",
    "subscriptions resume": "resume",
    "dlq redrive": "requeue retry replay redeliver",
    "retention set": "retain",
    "worker": "work run beat",
    "schedules": "cron schedule periodic",
    "serve": "server start up",
    "stats": "status info",
    "--install-completion": "completion completions",
}
_IN_GROUPS = {"ls": "list", "rm": "delete remove del", "show": "get info view", "redrive": "retry requeue replay"}
_OPTIONS = {
    "--delay": "--countdown --eta --in",
    "--ttl": "--expires --expiration",
    "--start first": "--from-beginning --earliest --all",
    "--start START": "--offset --since --from-seq --auto-offset-reset",
    "--last N": "--limit --tail --lines",
    "--count N": "--limit --max-messages",
    "the argument PATTERN": "--topic --subject --topics --pattern",
    "the argument TOPIC": "--topic --subject --queue --channel --routing-key",
    "the argument ID": "--group --durable --consumer --queue --name --group-id",
    "the argument MODULE:LOG": "-A --app",
    "--threads N or --processes N": "--concurrency -c --workers",
    "--max-age": "--days --ttl --age --retention",
    "--max-count": "--maxlen --max-len --max-msgs",
    "the argument LOG": "--log --url --db --database --broker --file --servers -s",
}


def explained(message: str, context: Any) -> tuple[str, str]:
    """The parser's message in plain words, and what to write instead, or nothing."""
    if found := re.match(r"No such command '([^']+)'(.*)", message):
        return _of_command(message, found[1], context)
    if found := re.match(r"No such option: (\S+)", message):
        return _of_option(message, found[1], context)
    if message.startswith("Missing argument 'LOG'"):
        return message, "Name it, like events.db, or set HEADWATER_LOG"
    if message.startswith("Missing argument"):
        return message, f"Write {_usage(context)}"
    message = re.sub(r"is not a valid int(eger)?( range)?$", "is not a whole number", message)
    message = re.sub(r"is not a valid float( range)?$", "is not a number", message)
    message = re.sub(r"is not in the range (-?\d+)<=x<=(-?\d+)$", r"must lie between \1 and \2", message)
    return re.sub(r"is not in the range x>=(-?\d+)$", r"must be at least \1", message), ""


def _of_command(message: str, name: str, context: Any) -> tuple[str, str]:
    root = context.find_root().command if context is not None else None
    if root is None:
        return message, ""
    if context.command is not root:  # of a group
        same = word_here(name, _IN_GROUPS)
        return message, f"Write {context.command_path} {same}" if same in context.command.commands else ""
    meant = word_here(name, _COMMANDS)
    if meant is None:
        return message, ""
    return f"No such command {name!r}", f"Write headwater {meant}"  # without a word that only looks alike


def _of_option(message: str, option: str, context: Any) -> tuple[str, str]:
    known = " ".join(_words(context))
    for here, others in _OPTIONS.items():
        needed = here.removeprefix("the argument ").split(" ")[0]
        if option in others.split() and needed in known.split(" "):
            return f"No such option: {option}", f"{'Use' if here.startswith('the ') else 'Write'} {here}"
    return message, ""


def _words(context: Any) -> list[str]:
    """The options of the command and the names of its arguments."""
    if context is None:
        return []
    found: list[str] = []
    for parameter in context.command.params:
        found += parameter.opts
        if parameter.param_type_name == "argument":
            found.append(parameter.make_metavar(context).strip("[]."))
    return found


def _usage(context: Any) -> str:
    pieces = [piece.strip("{}") for piece in context.command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    return " ".join([context.command_path, *pieces])
