"""A disk that is full for a while: every commit fails, after all the work for it was done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headwater.errors import DiskFullError


@contextmanager
def full_disk(log: Any) -> Iterator[None]:
    store = log._core.engine.store
    write = store.write

    @contextmanager
    def failing_write(*arguments: Any, **options: Any) -> Iterator[Any]:
        with write(*arguments, **options) as writer:
            yield writer
            raise DiskFullError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", failing_write)
        yield
