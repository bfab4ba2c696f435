"""Options and the line of figures that the hardest tests (crash, powerloss) share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_figures: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headwater")
    group.addoption("--kills", type=int, default=24, help="how many processes the crash loop kills")
    group.addoption("--every-cut", action="store_true", help="cut the power at every sync, not only at some")
    group.addoption("--dice", type=int, default=1, help="seed of the crash, power-loss and fault tests")
    group.addoption(
        "--spark",
        choices=("classic", "connect", "standalone"),
        default="classic",
        help="where the pipeline's tests that use Spark run; elsewhere than classic, no others of the pipeline do",
    )


@pytest.fixture
def figures(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Say a line at the end of the run, whatever is captured."""
    return pytestconfig.stash.setdefault(_figures, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_figures, []):
        terminalreporter.write_line(line)
