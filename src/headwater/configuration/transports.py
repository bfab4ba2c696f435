"""Tables by name: where copies of messages go, and which classes of messages go there."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from headwater.configuration.frozen import Frozen
from headwater.configuration.kinds import Count, CountOrZero, OptionalText, Timeout, read_list
from headwater.errors import InvalidOption
from headwater.topics.topic import quoted

TRANSPORTS_MAX = 100
MESSAGE_TYPES_MAX = 10_000
NAMES_MAX = 32

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class TransportSettings(Frozen):
    """`url` says where and how; it is missing only where a profile changes something else of a transport. A batch_size
    of 1 sends each message at once, breaker_failures of 0 never stops asking."""

    url: OptionalText = Field(default=None, repr=False)  # there may be a password in it
    batch_size: Count = 1
    batch_wait: Timeout = 5.0
    breaker_failures: CountOrZero = 5
    breaker_window: Timeout = 120.0
    breaker_reset: Timeout = 30.0


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise InvalidOption("a name stands in it twice", next="Keep one of them")
    return names


class MessageSettings(Frozen):
    """What holds for messages of a type, before what their class says."""

    transports: Annotated[
        tuple[str, ...], BeforeValidator(read_list), AfterValidator(_check_names), Field(max_length=NAMES_MAX)
    ] = ()


def _check_transport_names(tables: dict[str, Any]) -> dict[str, Any]:
    for name in tables:
        if not _NAME.fullmatch(name):
            raise InvalidOption(
                f"{quoted(name)} cannot name a transport",
                next="Use lower-case letters, digits and _, beginning with a letter",
            )
    return tables


Transports = Annotated[
    dict[str, TransportSettings], AfterValidator(_check_transport_names), Field(max_length=TRANSPORTS_MAX)
]
Messages = Annotated[dict[str, MessageSettings], Field(max_length=MESSAGE_TYPES_MAX)]
