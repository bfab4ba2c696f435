"""From the params of a call to the arguments of a function."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from headwater.protocol.jsonrpc import INVALID_PARAMS, Call, Fault

_params = msgspec.json.Decoder(list[Any] | dict[str, Any])


def bind_params(call: Call, signature: inspect.Signature, *first: Any) -> inspect.BoundArguments:
    """Params by name or by position, behind `first`. Raises Fault if they do not fit."""
    given = [] if call.params is msgspec.UNSET else _params.decode(call.params)
    try:
        return signature.bind(*first, **given) if isinstance(given, dict) else signature.bind(*first, *given)
    except TypeError as exc:
        why = str(exc)
        raise Fault(INVALID_PARAMS, f"Invalid params: {why}", {"where": call.method, "why": why}) from exc
