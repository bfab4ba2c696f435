"""Where the library speaks: the standard logger `headwater`, silent until the application configures logging."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

Raised = TypeVar("Raised", bound=BaseException)

logger = logging.getLogger("headwater")


def from_the_function_on(error: Raised) -> Raised:
    """The error of a function of the application, without the frames of Headwater that called it: they say nothing
    about it."""
    frames = error.__traceback__
    while frames and frames.tb_next and _is_of_headwater(frames.tb_frame.f_globals):
        frames = frames.tb_next
    error.__traceback__ = frames
    return error


def _is_of_headwater(module: dict[str, Any]) -> bool:
    """By its package: the module of a worker's process is called `__main__`."""
    package = module.get("__package__")
    return isinstance(package, str) and f"{package}.".startswith("headwater.")
