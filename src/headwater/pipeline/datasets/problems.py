"""What is wrong with one message, as a sentence. Pure; runs in Spark's Python workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs
import msgspec

from headwater.pipeline.datasets.types import Types, compiled

PROBLEM_CHARS_MAX = 500
VERSIONS_TOLD_MAX = 20

Validators = Mapping[str, Mapping[int | None, jsonschema_rs.Validator]]


def problems(types: Types, rows: Iterable[tuple[str | None, int | None, str | None]]) -> list[str | None]:
    """For each (type, version, data): None, or the first thing that is wrong."""
    validators = validators_of(types)
    return [_problem(validators, type, version, data) for type, version, data in rows]


@lru_cache(maxsize=4)
def validators_of(types: Types) -> Validators:
    """Compiled once in each worker, not once in each batch."""
    return {
        name: {version: compiled(schema.text) for version, schema in versions.items()}
        for name, versions in types.by_name.items()
    }


def _problem(validators: Validators, type: str | None, version: int | None, data: str | None) -> str | None:
    if data is None:
        return "there is no data"
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as exc:
        return _bounded(f"data is not JSON: {exc}")
    versions = validators.get(type) if type is not None else None
    if versions is None:
        return None
    validator = versions.get(version) or versions.get(None)
    if validator is None:
        return _bounded(_unknown_version(type, version, versions))
    return None if validator.is_valid(value) else _violation(validator, value)


def _violation(validator: jsonschema_rs.Validator, value: Any) -> str:
    error = next(validator.iter_errors(value), None)
    if error is None:
        return "the message does not fit its schema"
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return _bounded(f"${path}: {error.message}")


def _unknown_version(type: str | None, version: int | None, known: Mapping[int | None, object]) -> str:
    numbers = [str(each) for each in known]
    told = ", ".join(numbers[-VERSIONS_TOLD_MAX:])
    more = "…, " if len(numbers) > VERSIONS_TOLD_MAX else ""
    which = f"{type} without a version" if version is None else f"version {version} of {type}"
    return f"{which} is not registered; known: {more}{told}"


def _bounded(text: str) -> str:
    return text if len(text) <= PROBLEM_CHARS_MAX else text[: PROBLEM_CHARS_MAX - 1] + "…"
