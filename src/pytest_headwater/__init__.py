"""The fixtures of Headwater for pytest. PYTEST_DONT_REWRITE: there is no assertion here.

pytest imports this module in every run of an environment that has Headwater installed. Headwater itself is imported by
the first test that asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headwater import Log, ManualClock


@pytest.fixture
def log() -> Iterator[Log]:
    """An empty log in memory, whose clock stands still until it is moved: `headwater.testing.open_log()`."""
    from headwater import testing

    with testing.open_log() as log:
        yield log


@pytest.fixture
def clock(log: Log) -> ManualClock:
    """The clock of the fixture `log`."""
    from headwater import testing

    return testing.clock_of(log)
